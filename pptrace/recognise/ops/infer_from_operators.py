"""Infer forwards and backwards of traces without op labels by the order of operators on the pipeline's host thread.

A pipeline's thread posts messages between its ops. What it computes from one message to the next is one op: a backward where
autograd's engine runs (in whatever thread), a forward otherwise. A send carries what the op before it made, a receive what
the op after it reads; the k-th forward of a step is that of microbatch k, and so is the k-th backward. That holds for every
schedule with one stage per rank (torch's Schedule1F1B, which has no labels). Where messages are not those of one stage per rank
(interleaved ones go both ways at once, and overlapped ones are posted ahead) the ops next to them do not show what they are: they
are left to their own records (:mod:`pptrace.recognise.calls.find_calls`). Steps are separated by their optimizer.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from pptrace.intervals import NestedIntervals
from pptrace.model.traces import Category, Events
from pptrace.recognise.labels import Label, LabelledAction
from pptrace.recognise.ops.confidence import confidence, is_one_stage, peers_of
from pptrace.recognise.ops.label_columns import LabelTable, Ranges
from pptrace.schedule.actions import Kind

_SENDS, _RECVS = "c10d::send", ("c10d::recv_", "c10d::recv_any_source_")
ENGINE = "autograd::engine::evaluate_function"
_OPTIMIZER = re.compile(r"Optimizer\.(?:step|zero_grad)#")
_COMMUNICATION = re.compile(r"c10d::|record_param_comms|gloo:|nccl:")
_LEAST_FRACTION = 4
"""A forward has at least one n-th of the operators of the largest one; smaller segments are the schedule's own work between
ops.
"""


@dataclass(frozen=True, slots=True)
class Inferred:
    """A stretch of the host's time that is an op or the posting of a message, of its rank's only stage."""

    action: LabelledAction
    start_ns: int
    end_ns: int
    thread: int


class SegmentKind(Enum):
    """Kind of a segment of a thread's activity."""

    FORWARD = auto()
    BACKWARD = auto()
    SEND = auto()
    RECV = auto()
    MESSAGE = auto()  # of unknown direction
    OPTIMIZER = auto()


@dataclass(slots=True)
class Segment:
    """Consecutive operators or launches of one kind, or one message."""

    kind: SegmentKind
    start_ns: int
    end_ns: int
    count: int = 1
    peer: int = -1


@dataclass(frozen=True, slots=True)
class Inference:
    """Inferred ops and messages in time order, the number of messages, and the evidence in words."""

    ranges: list[Inferred]
    num_messages: int = 0
    evidence: tuple[str, ...] = ()


def has_optimizer_ranges(events: Events) -> bool:
    return any(map(_OPTIMIZER.match, events.names))


def infer_ops(events: Events, optimizers: Sequence[tuple[int, int]] = (), steps: Sequence[int] = ()) -> Inference:
    """Ops and messages in time order; nothing where no thread both sends or receives and computes.

    ``optimizers`` are from when to when kernels of optimizers were launched, where no range says so; ``steps`` when steps begin
    that have ranges of their own: forwards before one that no backward follows are of none (evaluation).
    """
    thread = pipeline_thread(events)
    if thread is None or _mostly_inside_backwards(events):
        return Inference([])
    segments = _segments(events, thread, optimizers, steps)
    kept = drop_incidental_segments(segments)
    inferred = list(assign_microbatches(kept, thread))
    kinds = [entry.action.kind for entry in inferred]
    messages, forwards, backwards = sum(kind.is_p2p for kind in kinds), kinds.count(Kind.F), kinds.count(Kind.B)
    agree = is_one_stage(
        list(_kinds_by_adjacent_op(kept)), list(_kinds_of_first_messages(inferred)), forwards, backwards
    )
    confidence_text = confidence(_num_operators(kept), _num_operators(segments), forwards, backwards, agree)
    evidence_line = (
        f"{forwards} forwards are what thread {thread} ran between {messages} sends and receives, "
        f"{backwards} backwards what autograd's engine ran ({confidence_text})"
    )
    if not agree:
        inferred = [entry for entry in inferred if entry.action.kind.is_compute]
        evidence_line += "; the messages are not those of one stage per rank: their directions are unknown"
    return Inference(inferred, messages, (evidence_line,))


def _kinds_of_first_messages(inferred: Sequence[Inferred]) -> Iterator[Kind]:
    """Kinds of the messages that are the first of their kind next to an op."""
    last: dict[Kind, LabelledAction] = {}
    for action in (entry.action for entry in inferred if entry.action.kind.is_p2p):
        if last.get(action.kind) != action:
            yield action.kind
        last[action.kind] = action


def _num_operators(segments: Sequence[Segment]) -> int:
    return sum(segment.count for segment in segments if segment.kind in (SegmentKind.FORWARD, SegmentKind.BACKWARD))


def _kinds_by_adjacent_op(segments: Sequence[Segment]) -> Iterator[tuple[Kind, int]]:
    """The kind of each message by the op before or after it, and its peer."""
    after = list(_ops_before(reversed(segments)))[::-1]
    for segment, op_before, op_after in zip(segments, _ops_before(segments), after, strict=True):
        if segment.kind in (SegmentKind.SEND, SegmentKind.RECV):
            sends = segment.kind is SegmentKind.SEND
            message = _message(sends, op_before if sends else op_after, 0, 0)
            if message is not None:
                yield message.kind, segment.peer


_MESSAGES_OF = {Kind.F: (Kind.SEND_F, Kind.RECV_F), Kind.B: (Kind.SEND_B, Kind.RECV_B)}


def messages_in_ranges(events: Events, ops: Ranges, framework: str) -> Ranges:
    """The messages posted inside labelled ops (ScheduleGPipe): of the op's own microbatch."""
    parts = []
    for names, index in (((_SENDS,), 0), (_RECVS, 1)):
        rows = np.flatnonzero(_named(events, names))
        around = _outermost_around(ops, events, rows)
        rows, around = rows[around >= 0], around[around >= 0]
        labels, codes = np.unique(ops.label[around], return_inverse=True)
        actions = [ops.table.labels[code].actions[0] for code in labels.tolist()]
        table = LabelTable(
            tuple(
                Label(framework, (LabelledAction(_MESSAGES_OF[action.kind][index], microbatch=action.microbatch),))
                if action.kind in _MESSAGES_OF
                else Label(framework)
                for action in actions
            )
        )
        messages = Ranges(table, codes, events.start_ns[rows], events.ends_of(rows), events.thread[rows])
        parts.append(messages.where(messages.has_actions))
    return Ranges.joined(parts)


def _outermost_around(ops: Ranges, events: Events, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """First op of each event's thread that begins before the event and ends after it; −1 without one."""
    around = np.full(len(rows), -1)
    ordered = np.argsort(ops.start_ns, kind="stable")
    for thread, thread_rows in events.rows_by_thread(rows).items():
        of_thread = ordered[ops.thread[ordered] == thread]
        if len(of_thread):
            intervals = NestedIntervals(ops.start_ns[of_thread], ops.end_ns[of_thread])
            index = intervals.outermost(events.start_ns[thread_rows], events.ends_of(thread_rows))
            around[events.thread[rows] == thread] = np.where(index < 0, -1, of_thread[index])
    return around


def is_message(events: Events) -> npt.NDArray[np.bool_]:
    """Mark the operators that post a send or a receive."""
    return _named(events, (_SENDS, *_RECVS))


def pipeline_thread(events: Events) -> int | None:
    """The thread that posts most sends and receives."""
    rows = np.flatnonzero(is_message(events))
    if not len(rows):
        return None
    threads, counts = np.unique(events.thread[rows], return_counts=True)
    return int(threads[counts.argmax()])


def _mostly_inside_backwards(events: Events) -> bool:
    """Return whether many of the messages are posted by autograd: those of a ring inside the ops (context parallelism)."""
    messages = np.flatnonzero(is_message(events))
    engine = np.array([name.startswith(ENGINE) for name in events.names], dtype=bool)[events.name_id]
    rows = np.flatnonzero(engine & (events.category == Category.CPU_OP))
    inside = 0
    for thread, thread_rows in events.rows_by_thread(rows).items():
        times = events.start_ns[messages[events.thread[messages] == thread]]
        inside += int(np.count_nonzero(events.intervals_of(thread_rows).hold(times)))
    return _LEAST_FRACTION * inside > len(messages)


def _named(events: Events, names: Sequence[str]) -> npt.NDArray[np.bool_]:
    wanted = np.array([name in names for name in events.names], dtype=bool)
    chosen: npt.NDArray[np.bool_] = wanted[events.name_id] & (events.category == Category.CPU_OP)
    return chosen


def _segments(
    events: Events, thread: int, optimizers: Sequence[tuple[int, int]], steps: Sequence[int]
) -> list[Segment]:
    """Activity of the thread: an entry per message and per unbroken run of operators."""
    segments: list[Segment] = []
    boundaries = [Segment(SegmentKind.OPTIMIZER, begin, begin) for begin in sorted(steps)]
    for segment in heapq.merge(
        _unmerged_segments(events, thread, optimizers), boundaries, key=lambda segment: segment.start_ns
    ):
        last = segments[-1] if segments else None
        if (
            last is not None
            and last.kind is segment.kind
            and segment.kind in (SegmentKind.FORWARD, SegmentKind.BACKWARD)
        ):
            last.end_ns, last.count = max(last.end_ns, segment.end_ns), last.count + 1
        else:
            segments.append(segment)
    return segments


def _unmerged_segments(events: Events, thread: int, optimizers: Sequence[tuple[int, int]]) -> Iterator[Segment]:
    """Outermost operators of the thread, the engine's of all threads, messages and optimizer steps, in time order."""
    engine = np.array([name.startswith(ENGINE) for name in events.names], dtype=bool)[events.name_id]
    optimizer = np.array([bool(_OPTIMIZER.match(name)) for name in events.names], dtype=bool)[events.name_id]
    is_communication = np.array([bool(_COMMUNICATION.match(name)) for name in events.names], dtype=bool)[events.name_id]
    send, recv = _named(events, (_SENDS,)), _named(events, _RECVS)
    is_op = events.category == Category.CPU_OP
    on_thread = events.thread == thread
    is_step = optimizer & (events.category == Category.ANNOTATION)
    chosen = np.flatnonzero((is_op & (on_thread | engine) & (~is_communication | send | recv)) | is_step)
    is_step |= is_op & on_thread & ~is_communication & ~engine & _overlap(events, optimizers)
    messages = np.flatnonzero(send | recv)
    peers = dict(zip(messages.tolist(), peers_of(events, messages), strict=True))
    latest_end = -1
    for row, end in zip(chosen.tolist(), events.ends_of(chosen).tolist(), strict=True):
        start = int(events.start_ns[row])
        if start < latest_end:
            continue  # inside another
        latest_end = end
        if is_step[row]:
            yield Segment(SegmentKind.OPTIMIZER, start, end)
        elif send[row] or recv[row]:
            yield Segment(SegmentKind.SEND if send[row] else SegmentKind.RECV, start, end, peer=peers[row])
        else:
            yield Segment(SegmentKind.BACKWARD if engine[row] else SegmentKind.FORWARD, start, end)


def _overlap(events: Events, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Mark the events that share time with any of the spans, which are in time order and apart."""
    if not spans:
        return np.zeros(len(events), dtype=bool)
    starts, ends = (np.array(side, dtype=np.int64) for side in zip(*spans, strict=True))
    shared: npt.NDArray[np.bool_] = np.searchsorted(ends, events.start_ns) < np.searchsorted(starts, events.end_ns)
    return shared


def drop_incidental_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Drop forwards too small to be one, such as the creation of a loss's gradient, and those not followed by a backward of the
    step, such as gradient scaling.
    """
    largest = max((segment.count for segment in segments if segment.kind is SegmentKind.FORWARD), default=0)
    kept: list[Segment] = []
    is_followed = False
    for segment in reversed(segments):
        if segment.kind is SegmentKind.OPTIMIZER:
            is_followed = False
        elif segment.kind is SegmentKind.BACKWARD:
            is_followed = True
        elif segment.kind is SegmentKind.FORWARD and not (is_followed and _LEAST_FRACTION * segment.count >= largest):
            continue
        kept.append(segment)
    return _merge_backwards(kept[::-1])


def _merge_backwards(segments: Sequence[Segment]) -> list[Segment]:
    """Merge backwards that only dropped segments separated."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if last is not None and last.kind is segment.kind is SegmentKind.BACKWARD:
            last.end_ns, last.count = max(last.end_ns, segment.end_ns), last.count + segment.count
        else:
            joined.append(segment)
    return joined


def assign_microbatches(segments: Sequence[Segment], thread: int) -> Iterator[Inferred]:
    """Ops and messages with microbatches by order; an op may have several messages (the tensors of one activation)."""
    forwards = backwards = 0
    after = list(_ops_before(reversed(segments)))[::-1]
    for segment, op_before, op_after in zip(segments, _ops_before(segments), after, strict=True):
        if segment.kind is SegmentKind.OPTIMIZER:
            if forwards <= backwards:  # no optimizer runs while a forward waits for its backward
                forwards = backwards = 0
            continue
        if segment.kind is SegmentKind.FORWARD:
            action = LabelledAction(Kind.F, microbatch=forwards)
            forwards += 1
        elif segment.kind is SegmentKind.BACKWARD:
            action = LabelledAction(Kind.B, microbatch=backwards)
            backwards += 1
        elif segment.kind is SegmentKind.MESSAGE:
            continue
        else:
            sends = segment.kind is SegmentKind.SEND
            message = _message(sends, op_before if sends else op_after, forwards, backwards)
            if message is None:
                continue
            action = message
        yield Inferred(action, segment.start_ns, segment.end_ns, thread)


def _ops_before(segments: Iterable[Segment]) -> Iterator[SegmentKind]:
    """Yield the forward, backward or optimizer that came last before each run; the optimizer where there was none."""
    last = SegmentKind.OPTIMIZER
    for segment in segments:
        yield last
        if segment.kind in (SegmentKind.FORWARD, SegmentKind.BACKWARD, SegmentKind.OPTIMIZER):
            last = segment.kind


def _message(sends: bool, op: SegmentKind, forwards: int, backwards: int) -> LabelledAction | None:
    """The message of an op: of the one before it where it is a send, of the one after it where it is a receive."""
    if op is SegmentKind.OPTIMIZER:
        return None
    if op is SegmentKind.FORWARD:
        kind, number = (Kind.SEND_F, forwards - 1) if sends else (Kind.RECV_F, forwards)
    else:
        kind, number = (Kind.SEND_B, backwards - 1) if sends else (Kind.RECV_B, backwards)
    return LabelledAction(kind, microbatch=number)
