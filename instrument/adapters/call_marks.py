"""Writes a range for every call that the hooks see, and one for each wait."""

from __future__ import annotations

from dataclasses import dataclass

from instrument.adapters.calls import Call
from instrument.recorder import Range
from instrument.session import Session
from pptrace.marks import AwaitMark, Axis, CallMark

_MOST_FAILED = 1000


@dataclass(slots=True)
class _Open:
    """A call that a listener has heard of. ``range`` is the one that is open now, of its posting or of a wait."""

    range: Range | None
    handle: int | None
    step: int


class CallMarks:
    """An observer of calls. While nobody listens, or inside a range that names the communication already, it writes nothing."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._recorder = session.recorder
        self._open: dict[int, _Open] = {}
        self.failed_calls: list[tuple[str, str, int, int]] = []
        """Kind, group, sequence and peer of those that raised: their ranges end with the error, not with a communication."""

    def posted(self, call: Call) -> None:
        recorder = self._recorder
        if not recorder.listening or recorder.communicating:
            return
        handle = recorder.new_handle() if call.is_async else None
        step = self._session.num_steps
        peer = call.peer if call.peer >= 0 else None
        mark = CallMark(call.kind, _group_word(call), call.sequence, call.num_bytes, step, peer, handle)
        opened = recorder.mark(mark)
        opened.__enter__()
        self._open[call.number] = _Open(opened, handle, step)

    def returned(self, call: Call) -> None:
        known = self._open.get(call.number)
        if known is not None:
            self._close(known)

    def waiting(self, call: Call) -> None:
        known = self._open.get(call.number)
        if known is None or known.handle is None or known.range is not None:
            return
        known.range = self._recorder.mark(AwaitMark(Axis.UNKNOWN, known.step, known.handle))
        known.range.__enter__()

    def completed(self, call: Call) -> None:
        known = self._open.pop(call.number, None)
        if known is not None:
            self._close(known)

    def failed(self, call: Call) -> None:
        if call.number in self._open and len(self.failed_calls) < _MOST_FAILED:
            self.failed_calls.append((call.kind, _group_word(call), call.sequence, call.peer))
        self.completed(call)

    def _close(self, known: _Open) -> None:
        if known.range is not None:
            known.range.__exit__(None, None, None)
            known.range = None


def _group_word(call: Call) -> str:
    """The group's name as a mark can hold it."""
    return "_".join(call.group.name.split()) or "-"
