"""Profilers of PyTorch that the script starts itself. Kineto records for one at a time, and two of them end in a crash.

The script's comes first, since it has to find what it finds without us: ours ends when the script's begins, and begins only when
none of the script's runs.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch.autograd.profiler


class _Calling(threading.local):
    depth = 0


_calling = _Calling()


@contextmanager
def by_pptrace() -> Iterator[None]:
    """What the body starts and stops is pptrace's own profiler, not the script's."""
    _calling.depth += 1
    try:
        yield
    finally:
        _calling.depth -= 1


class ScriptProfilers:
    """Calls ``begins`` directly before a profiler of the script begins, or prepares to.

    It watches every class through which PyTorch's profilers begin; :meth:`remove` puts them back.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        self._pid = os.getpid()
        self._undo: list[Callable[[], None]] = []
        self._running: WeakSet[Any] = WeakSet()
        module = torch.autograd.profiler
        for name in ("profile", "emit_nvtx", "emit_itt"):
            owner = getattr(module, name, None)
            if owner is not None:
                self._wrap(owner, "_prepare_trace" if hasattr(owner, "_prepare_trace") else "__enter__", self._before)
                self._wrap(owner, "__exit__", None)

    @property
    def running(self) -> bool:
        """Whether one of the script's profilers records, or prepares to."""
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

    def _before(self, profiler: Any) -> None:
        if not getattr(profiler, "enabled", True):
            return
        if not self._running:
            self._begins()
        self._running.add(profiler)
