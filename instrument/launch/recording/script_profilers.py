"""Profilers of PyTorch that the script starts itself. Kineto records for one at a time, and two of them end in a crash.

The script's comes first, since it has to find what it finds without us: ours ends when the script's begins, and begins only when
none of the script's runs. The traces that the script's writes are heard of, since they may be all that is recorded, and when they
were recorded: a scheduled profiler writes several.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.autograd.profiler
import torch.profiler


class _Calling(threading.local):
    depth = 0
    exporting = False


_calling = _Calling()
Span = tuple[int, int]
"""Begin and end of a recording, by the clock of ``time.perf_counter_ns``."""


@contextmanager
def by_pptrace() -> Iterator[None]:
    """Treat what the body starts and stops as pptrace's own profiler, not the script's."""
    _calling.depth += 1
    try:
        yield
    finally:
        _calling.depth -= 1


class ScriptProfilers:
    """Calls ``begins`` directly before a profiler of the script begins, or prepares to, and ``exported`` after one of them
    has written a Chrome trace, with the time that it recorded.

    It watches every class through which PyTorch's profilers begin; :meth:`remove` puts them back.
    """

    def __init__(self, begins: Callable[[], None], exported: Callable[[Path, Span], None] = lambda *_: None) -> None:
        self._begins = begins
        self._exported = exported
        self._pid = os.getpid()
        self._undo: list[Callable[[], None]] = []
        self._running: WeakSet[Any] = WeakSet()
        self._started: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._spans: WeakKeyDictionary[Any, Span] = WeakKeyDictionary()
        self._ended: list[Span] = []
        module = torch.autograd.profiler
        for name in ("profile", "emit_nvtx", "emit_itt"):
            owner = getattr(module, name, None)
            if owner is not None:
                self._wrap(owner, "_prepare_trace" if hasattr(owner, "_prepare_trace") else "__enter__", self._before)
                if hasattr(owner, "_start_trace"):
                    self._wrap(owner, "_start_trace", self._start)
                self._wrap(owner, "__exit__", self._end, self._running.discard)
        for owner in (module.profile, torch.profiler.profiler._KinetoProfile):
            self._watch_export(owner)

    @property
    def running(self) -> bool:
        """Return whether one of the script's profilers records, or prepares to."""
        return bool(self._running)

    @property
    def spans(self) -> list[Span]:
        """Times that were recorded, one after the other, and the one that is until now."""
        return [*self._ended, *((start, time.perf_counter_ns()) for start in self._started.values())]

    def remove(self) -> None:
        """Watch no longer."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _wrap(
        self, owner: Any, name: str, before: Callable[[Any], None], after: Callable[[Any], None] = lambda _: None
    ) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if _calling.depth or os.getpid() != self._pid:
                return original(profiler, *args, **kwargs)
            try:
                before(profiler)
                return original(profiler, *args, **kwargs)
            except BaseException:
                self._running.discard(profiler)
                raise
            finally:
                after(profiler)

        setattr(owner, name, watched)
        self._undo.append(lambda: setattr(owner, name, original))

    def _watch_export(self, owner: Any) -> None:
        original = owner.export_chrome_trace

        @functools.wraps(original)
        def watched(profiler: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            if _calling.depth or _calling.exporting or os.getpid() != self._pid:
                return original(profiler, path, *args, **kwargs)
            _calling.exporting = True  # one class's export calls the other's, on a file that it packs then
            try:
                result = original(profiler, path, *args, **kwargs)
            finally:
                _calling.exporting = False
            with suppress(OSError, TypeError, ValueError):
                span = self._spans.get(getattr(profiler, "profiler", profiler), (0, 0))
                self._exported(Path(path).absolute(), span)
            return result

        owner.export_chrome_trace = watched
        self._undo.append(lambda: setattr(owner, "export_chrome_trace", original))

    def _before(self, profiler: Any) -> None:
        if not getattr(profiler, "enabled", True):
            return
        if not self._running:
            self._begins()
        self._running.add(profiler)

    def _start(self, profiler: Any) -> None:
        self._started[profiler] = time.perf_counter_ns()

    def _end(self, profiler: Any) -> None:
        started = self._started.pop(profiler, None)
        if started is not None:
            self._spans[profiler] = span = (started, time.perf_counter_ns())
            self._ended.append(span)


class ScriptTrace:
    """The trace of the script's profiler with the most wanted steps, of several the last, in case that it is all there is."""

    def __init__(self, directory: Path, rank: int, is_wanted: Callable[[int], bool]) -> None:
        self._directory = directory
        self._rank = rank
        self._is_wanted = is_wanted
        self.steps: Sequence[int] = ()
        self.path: Path | None = None
        """Relative to the run directory, which is the directory's parent."""

    def keep(self, exported: Path, steps: Sequence[int]) -> None:
        """Link the file of these steps, or copy it where it lies on another file system. The script's own stays as it is."""
        if self.path is not None and self._num_wanted(steps) < self._num_wanted(self.steps):
            return
        self.drop()
        self._directory.mkdir(exist_ok=True)
        packed = ".gz" if exported.suffix == ".gz" else ""
        kept = self._directory / f"rank{self._rank}.json{packed}"
        kept.unlink(missing_ok=True)
        try:
            os.link(exported, kept)
        except OSError:
            shutil.copyfile(exported, kept)
        self.path, self.steps = kept.relative_to(self._directory.parent), steps

    def _num_wanted(self, steps: Sequence[int]) -> int:
        return sum(map(self._is_wanted, steps))

    def drop(self) -> None:
        """Keep it no longer: pptrace recorded itself."""
        if self.path is not None:
            (self._directory.parent / self.path).unlink(missing_ok=True)
            with suppress(OSError):
                self._directory.rmdir()  # of the last rank
        self.path = None
