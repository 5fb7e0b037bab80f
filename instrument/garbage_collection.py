"""Ranges of Python's garbage collections, which stop every thread that runs Python: their pauses have a cause of their own.

Collections of the young generation are left out: there is one for every few hundred objects, and each takes some microseconds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

from instrument.recorder import Range, Recorder
from pptrace.marks import SpanKind

_OLDER = 1
"""Generation from which on collections get a range."""


def _hide_from_compiler(function: FunctionType) -> None:
    """Let torch.compile leave alone the function and what it calls: a collection may come while compiled code runs.

    A torch without the means (before 2.7) looks at the callback's code once, and goes on.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError, TypeError):
        return


class CollectionRanges:
    """Opens a ``GC`` range for each collection of an older generation; ``step`` gives the number of the running step."""

    def __init__(self, recorder: Recorder, step: Callable[[], int]) -> None:
        self._recorder = recorder
        self._step = step
        self._range: Range | None = None

    def watch(self) -> None:
        """Begin to open ranges."""
        _hide_from_compiler(type(self)._note)  # type: ignore[arg-type]
        gc.callbacks.append(self._note)

    def remove(self) -> None:
        """End what :meth:`watch` began; may be called without it."""
        with suppress(ValueError):
            gc.callbacks.remove(self._note)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Open ranges during the body, unless they are opened already."""
        if self._note in gc.callbacks:
            yield
            return
        self.watch()
        try:
            yield
        finally:
            self.remove()

    def _note(self, phase: str, info: Mapping[str, Any]) -> None:
        """Called by Python at both ends of a collection, of which one runs at a time in a process."""
        if info["generation"] < _OLDER:
            return
        if phase == "start":
            self._range = self._recorder.span(SpanKind.GC, self._step())
            self._range.__enter__()
        elif self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
