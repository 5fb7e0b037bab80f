"""Profilers of PyTorch that the script starts itself. Kineto records for one at a time, and two of them end in a crash.

The script's comes first, since it has to find what it finds without us: ours ends when the script's begins, and begins only when
none of the script's runs. The traces that the script's writes are heard of, since they may be all that is recorded.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.autograd.profiler
import torch.profiler


class _Calling(threading.local):
    depth = 0
    exporting = False


_calling = _Calling()


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
    has written a Chrome trace.

    It watches every class through which PyTorch's profilers begin; :meth:`remove` puts them back.
    """

    def __init__(self, begins: Callable[[], None], exported: Callable[[Path], None] = lambda _: None) -> None:
        self._begins = begins
        self._exported = exported
        self._pid = os.getpid()
        self._undo: list[Callable[[], None]] = []
        self._running: WeakSet[Any] = WeakSet()
        module = torch.autograd.profiler
        for name in ("profile", "emit_nvtx", "emit_itt"):
            owner = getattr(module, name, None)
            if owner is not None:
                self._wrap(owner, "_prepare_trace" if hasattr(owner, "_prepare_trace") else "__enter__", self._before)
                self._wrap(owner, "__exit__", None)
        for owner in (module.profile, torch.profiler.profiler._KinetoProfile):
            self._watch_export(owner)

    @property
    def running(self) -> bool:
        """Return whether one of the script's profilers records, or prepares to."""
        return bool(self._running)

    def remove(self) -> None:
        """Watch no longer."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _wrap(self, owner: Any, name: str, before: Callable[[Any], None] | None) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            if _calling.depth or os.getpid() != self._pid:
                return original(profiler, *args, **kwargs)
            try:
                if before is not None:
                    before(profiler)
                return original(profiler, *args, **kwargs)
            except BaseException:
                self._running.discard(profiler)
                raise
            finally:
                if before is None:
                    self._running.discard(profiler)

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
                self._exported(Path(path).absolute())
            return result

        owner.export_chrome_trace = watched
        self._undo.append(lambda: setattr(owner, "export_chrome_trace", original))

    def _before(self, profiler: Any) -> None:
        if not getattr(profiler, "enabled", True):
            return
        if not self._running:
            self._begins()
        self._running.add(profiler)


class ScriptTrace:
    """The trace that the script's profiler wrote last, kept in ``directory`` in case that it is all there is."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self.path: Path | None = None
        """Relative to the run directory, which is the directory's parent."""

    def keep(self, exported: Path) -> None:
        """Link the file, or copy it where it lies on another file system. The script's own stays as it is."""
        self.drop()
        self._directory.mkdir(exist_ok=True)
        packed = ".gz" if exported.suffix == ".gz" else ""
        kept = self._directory / f"rank{self._rank}.json{packed}"
        kept.unlink(missing_ok=True)
        try:
            os.link(exported, kept)
        except OSError:
            shutil.copyfile(exported, kept)
        self.path = kept.relative_to(self._directory.parent)

    def drop(self) -> None:
        """Keep it no longer: pptrace recorded itself."""
        if self.path is not None:
            (self._directory.parent / self.path).unlink(missing_ok=True)
            with suppress(OSError):
                self._directory.rmdir()  # of the last rank
        self.path = None
