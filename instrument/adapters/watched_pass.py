"""One pass of a pipeline that pptrace watches: the ranges of its ops and of its messages.

An adapter says what runs; this opens and closes the ranges. Several tensors of one activation are one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from instrument.adapters.hooks import Watch
from instrument.adapters.tensor_bytes import num_bytes
from instrument.adapters.works import Works, is_work
from instrument.recorder import Range, Recorder, null_range
from instrument.session import Session
from pptrace.marks import Axis, ExchangeMark, Link, OpMark, P2PMark, SpanKind, Transfer, WaitMark
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan


@dataclass(slots=True)
class WatchedPass:
    """The pass that runs now. Outside a pass, and in one without backwards, no op and no message is named.

    Microbatches are numbered on through the passes of a step, which each count theirs from 0: ``_before`` of it came before this
    one, which has ``_own`` so far.
    """

    listener: Session
    works: Works
    runs: bool = False
    """True if a pass with backwards runs."""
    pairs: dict[tuple[int, int | None], Action] = field(default_factory=dict)
    """Overlapped pairs of the plan by stage and microbatch of their forward."""
    _planned: dict[tuple[Kind, int, int | None], Action] = field(default_factory=dict)
    _evaluation: Range | None = None
    _op: Range | None = None
    _before: int = 0
    _own: int = 0

    def begin(self, plan: Plan | None, pp_rank: int) -> None:
        """A pass with backwards begins; ``plan`` None where no plan is known."""
        self.end()
        self._before = self._before + self._own if self.listener.begin_pass() else 0
        self._own = 0
        actions = plan.compute_actions(pp_rank) if plan is not None else ()
        self._planned = {action.key: action for entry in actions for action in (entry, *entry.halves)}
        self.pairs = {(pair.stage, pair.microbatch): pair for pair in actions if pair.parts}
        self.runs = True

    def begin_evaluation(self) -> None:
        self.end()
        self._evaluation = self.listener.recorder.span(SpanKind.EVAL, self.listener.num_steps)
        self._evaluation.__enter__()

    def end(self) -> None:
        """The pass is over, or was given up by an error."""
        self.end_op()
        self.runs = False
        if self._evaluation is not None:
            self._evaluation.__exit__(None, None, None)
            self._evaluation = None

    def begin_op(self, op: Action) -> None:
        """An op begins, with the plan's phase where that has it; one that was left open ends."""
        self.end_op()
        self._own = max(self._own, 1 + (op.microbatch or 0))
        if self.runs and self.listener.recorder.listening:
            planned = self._planned.get(op.key)
            action = (planned or op).later(self._before)
            self._op = self.listener.recorder.mark(OpMark(action, self.listener.num_steps, planned is not None))
            self._op.__enter__()

    def begin_pair(self, forward: Action, backward: Action) -> bool:
        """A forward and a backward begin together; return whether the plan has them as a pair, as which alone they are named."""
        pair = self.pairs.get((forward.stage, forward.microbatch))
        is_planned = pair is not None and pair.parts[1].key == backward.key
        if pair is not None and is_planned:
            self.begin_op(pair)
        return is_planned

    def end_op(self) -> None:
        if self._op is not None:
            self._op.__exit__(None, None, None)
            self._op = None

    def post(self, transfers: Sequence[Transfer]) -> Range | None:
        """The range of a call that posts messages together; None where nobody listens."""
        recorder = self.listener.recorder
        if not transfers or not self.runs or not recorder.listening:
            return None
        return recorder.mark(P2PMark(tuple(map(self._numbered, transfers)), Axis.PP, self.listener.num_steps))

    def exchange(self, links: Sequence[Link]) -> Range:
        """The range of an exchange of messages without a microbatch, such as the shapes of the next ones."""
        recorder = self.listener.recorder
        if not links or not self.runs or not recorder.listening:
            return null_range()
        return recorder.mark(ExchangeMark(tuple(links), Axis.PP, self.listener.num_steps))

    def watch(self, work: Any, transfers: Sequence[Transfer]) -> None:
        """Mark the waits for a handle that these messages complete with."""
        step = self.listener.num_steps
        named = map(self._numbered, transfers)
        self.works.watch(work, tuple(TransferWait(self.listener.recorder, transfer, step) for transfer in named))

    def watch_batch(self, ops: Sequence[Any]) -> Watch:
        """Watch a call that posts P2P ops together, whose messages :func:`name_messages` named."""
        posted = self.post(transfers_of(ops)) if self.listener.recorder.listening else None
        if posted is None:
            return
        with posted:
            result = yield
        works = [work for work in (result if isinstance(result, list) else [result]) if is_work(work)]
        if len(works) == len(ops):
            for op, work in zip(ops, works, strict=True):
                self.watch(work, transfers_of([op]))
        elif works:
            self.watch(works[-1], transfers_of(ops))

    def _numbered(self, transfer: Transfer) -> Transfer:
        return replace(transfer, action=transfer.action.later(self._before)) if self._before else transfer


_TAG = "_pptrace_message"


def name_messages(ops: Iterable[Any], action: Action) -> None:
    """Write on P2P ops of one activation or gradient which message they carry."""
    for op in ops:
        setattr(op, _TAG, action)


def transfers_of(ops: Sequence[Any]) -> list[Transfer]:
    """The messages of P2P ops whose stage named them, [] if any is not named; several tensors of one activation are one."""
    size_by_transfer: dict[tuple[Action, int], int] = {}
    for op in ops:
        action = getattr(op, _TAG, None)
        if action is None:
            return []
        key = (action, int(op.peer))
        size_by_transfer[key] = size_by_transfer.get(key, 0) + num_bytes(op.tensor)
    return [Transfer(action, peer, size) for (action, peer), size in size_by_transfer.items()]


def watch_optimizer(listener: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
    """Watch the step of a wrapper of optimizers, a method."""
    listener.begin_optimizer(args[0])
    stepped = False
    try:
        yield
        stepped = True
    finally:
        listener.end_optimizer(args[0], stepped=stepped)


def watch_span(listener: Session, kind: SpanKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
    """Watch a function whose time is a span, such as the synchronisation of gradients."""
    with listener.recorder.span(kind, listener.num_steps):
        yield


@dataclass(slots=True)
class TransferWait:
    """One message as its handle knows it."""

    recorder: Recorder
    transfer: Transfer
    step: int
    open: Range | None = None

    def waiting(self) -> None:
        if self.open is None and self.recorder.listening:
            self.open = self.recorder.mark(WaitMark(self.transfer, self.step))
            self.open.__enter__()

    def completed(self) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None

    def failed(self) -> None:
        self.completed()
