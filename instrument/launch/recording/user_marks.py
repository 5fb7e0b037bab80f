"""Opens the ranges of ``pptrace.mark`` in a rank of ``pptrace run``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch

from instrument.recorder import Range, null_range
from pptrace.marks import SpanKind

if TYPE_CHECKING:
    from instrument.launch.recording.traced import TracedSession

_OPS = {
    "forward": "F",
    "backward": "B",
    "input-gradient": "I",
    "weight-gradient": "W",
    **{letter: letter for letter in "FBIW"},
}
_SPANS = {
    "optimizer": SpanKind.OPTIMIZER,
    "data": SpanKind.DATA,
    "gradient-sync": SpanKind.GRAD_SYNC,
    "eval": SpanKind.EVAL,
}


class UserMarks:
    """Makes the range of each mark. A mark that cannot be read is a range with its name; none ever raises."""

    def __init__(self, session: TracedSession) -> None:
        self._session = session
        self._in_step = False

    def open(self, name: str, stage: int | None, microbatch: int | None) -> AbstractContextManager[object]:
        if torch.compiler.is_compiling():
            return null_range()
        kind = str(name).strip()
        plain = kind if kind in _OPS else kind.lower().replace("_", "-")
        if plain == "step":
            return self._step()
        if plain in _OPS:
            self._session.look()
        if not self._session.recorder.listening:
            return null_range()
        if plain in _SPANS:
            return self._session.recorder.span(_SPANS[plain], self._session.num_steps)
        return self._named(plain, kind, stage, microbatch)

    def _named(self, plain: str, name: str, stage: int | None, microbatch: int | None) -> Range:
        text = f"pptrace.mark: {name}"
        if plain in _OPS:
            text = f"pptrace.mark {_OPS[plain]}{_value('stage', stage)}{_value('microbatch', microbatch)}"
            return self._session.recorder.named_op(text)
        return self._session.recorder.named(text)

    @contextmanager
    def _step(self) -> Iterator[None]:
        if self._in_step:  # a step inside a step is a part of it
            yield
            return
        self._in_step = True
        self._session.take_step_marks()
        self._session.begin_step()
        try:
            yield
        finally:
            self._in_step = False
            self._session.end_step()


def _value(name: str, value: int | None) -> str:
    """A number of a mark; what is no number from 0 is left out, for the order to tell."""
    try:
        number = -1 if value is None else int(value)
    except (TypeError, ValueError):
        number = -1
    return "" if number < 0 else f" {name}={number}"
