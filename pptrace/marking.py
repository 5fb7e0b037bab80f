"""Marks for training loops that no hook knows: which part of a step runs now.

    with pptrace.mark("forward", microbatch=3, stage=1):
        ...

    @pptrace.mark("optimizer")
    def update(): ...

Under ``pptrace run`` each becomes a range of the trace; anywhere else it does nothing, and needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType

Opener = Callable[[str, int | None, int | None], AbstractContextManager[object]]
"""Makes the range of a name, a stage and a microbatch."""

_opener: Opener | None = None


class Mark(ContextDecorator):
    """A context manager and a decorator; it may be entered again and again, also inside itself."""

    __slots__ = ("_microbatch", "_name", "_open", "_stage")

    def __init__(self, name: str, stage: int | None, microbatch: int | None) -> None:
        self._name = name
        self._stage = stage
        self._microbatch = microbatch
        self._open: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        if _opener is not None:
            opened = _opener(self._name, self._stage, self._microbatch)
            opened.__enter__()
            self._open.append(opened)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._open.pop().__exit__(kind, error, trace)

    def _recreate_cm(self) -> Mark:
        return Mark(self._name, self._stage, self._microbatch)  # one for each call of a decorated function


def mark(name: str, *, microbatch: int | None = None, stage: int | None = None) -> Mark:
    """Say what the body of a ``with``, or a function, does.

    Args:
        name: ``forward``, ``backward`` (both gradients), ``input-gradient`` or ``weight-gradient`` of a microbatch, also as
            ``F``, ``B``, ``I`` and ``W``; ``step`` (a whole training step; these marks then tell the steps), ``optimizer``,
            ``data``, ``gradient-sync`` or ``eval``; any other name is a range of that name (reports have ``checkpoint``
            and ``logging`` apart).
        microbatch: its number in the step, from 0. Without it, the k-th op of a kind and stage in a step is that of microbatch k.
        stage: the pipeline stage, from 0 over all ranks. Without it, the order of the messages between the ranks tells it.
    """
    return Mark(name, stage, microbatch)


def register(opener: Opener | None) -> None:
    """Set ``opener`` (or None) as what opens marks. For ``pptrace run``'s ranks, before the script starts."""
    global _opener
    _opener = opener
