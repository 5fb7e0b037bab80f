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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pptrace.intervals import NestedIntervals
from pptrace.model.tables import Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.labels import Label, LabelledAction
from pptrace.recognise.ops.label_columns import LabelTable, Ranges
from pptrace.schedule.actions import Kind

_SEND, _RECV = re.compile(r"^c10d::send\Z"), re.compile(r"^c10d::recv(?:_any_source)?_\Z")
ENGINE = "autograd::engine::evaluate_function"
_NODE = re.compile(f"^{ENGINE}")
_OPTIMIZER = re.compile(r"^Optimizer\.(?:step|zero_grad)#")
_COMMUNICATION = re.compile(r"^(?:c10d::|record_param_comms|gloo:|nccl:)")
_LEAST_FRACTION = 4
"""A forward has at least one n-th of the operators of the largest one; smaller segments are the schedule's own work between
ops.
"""
_TO_NEXT, _TO_PREVIOUS = (Kind.SEND_F, Kind.RECV_B), (Kind.SEND_B, Kind.RECV_F)
_TOLERATED = 10
"""One op in this many may lack its message or its counterpart: traces begin and end anywhere."""


class SegmentKind(Enum):
    """Kind of a segment of a thread's activity."""

    FORWARD = auto()
    BACKWARD = auto()
    SEND = auto()
    RECV = auto()
    MESSAGE = auto()  # of unknown direction
    OPTIMIZER = auto()


class Segment(Struct):
    """Consecutive operators or launches of one kind, or one message."""

    kind: SegmentKind
    start_ns: int
    end_ns: int
    count: int = 1
    peer: int = -1


_COMPUTE = (SegmentKind.FORWARD, SegmentKind.BACKWARD)


class Inference(Struct, frozen=True):
    """Inferred ops and messages of a thread in time order, of its rank's only stage; the number of messages, and the evidence in
    words.
    """

    ops: Sequence[tuple[Segment, LabelledAction]] = ()
    thread: int = -1
    num_messages: int = 0
    evidence: tuple[str, ...] = ()


def has_optimizer_ranges(events: Events) -> bool:
    return any(map(_OPTIMIZER.match, events.names))


def infer_ops(events: Events, optimizers: Sequence[tuple[int, int]] = (), steps: Sequence[int] = ()) -> Inference:
    """Ops and messages in time order; nothing where no thread both sends or receives and computes.

    ``optimizers`` are from when to when kernels of optimizers were launched, where no range says so; ``steps`` when steps begin
    that have ranges of their own: forwards before one that no backward follows are of none (evaluation).
    """
    thread = thread_of_most(events, message_rows(events))
    if thread is None or _mostly_inside_backwards(events):
        return Inference()
    boundaries = [Segment(SegmentKind.OPTIMIZER, begin, begin) for begin in sorted(steps)]
    every_segment = heapq.merge(_segments(events, thread, optimizers), boundaries, key=lambda each: each.start_ns)
    segments = merged(every_segment)
    chosen = drop_incidental_segments(segments)
    explained, total = (sum(each.count for each in part if each.kind in _COMPUTE) for part in (chosen, segments))
    ops = list(with_microbatches(chosen))
    kinds = Counter(action.kind for _, action in ops)
    messages = [(action, segment.peer) for segment, action in ops if action.kind.is_p2p]
    firsts: list[Kind] = []  # of the messages that are the first of their kind next to an op
    last: dict[Kind, LabelledAction] = {}
    for action, _ in messages:
        firsts += [action.kind] if last.get(action.kind) != action else []
        last[action.kind] = action
    peers = [(action.kind, peer) for action, peer in messages]
    agree = is_one_stage(peers, firsts, kinds[Kind.F], kinds[Kind.B])
    line = (
        f"{kinds[Kind.F]} forwards are what thread {thread} ran between {len(messages)} sends and receives, "
        f"{kinds[Kind.B]} backwards what autograd's engine ran "
        f"({confidence(explained, total, kinds[Kind.F], kinds[Kind.B], agree)})"
    )
    if not agree:
        ops = [(segment, action) for segment, action in ops if action.kind.is_compute]
        line += "; the messages are not those of one stage per rank: their directions are unknown"
    return Inference(ops, thread, len(messages), (line,))


_MESSAGES_OF = {Kind.F: (Kind.SEND_F, Kind.RECV_F), Kind.B: (Kind.SEND_B, Kind.RECV_B)}


def messages_in_ranges(events: Events, ops: Ranges, framework: str) -> Ranges:
    """The messages posted inside labelled ops (ScheduleGPipe): of the op's own microbatch."""
    parts = []
    ordered = np.argsort(ops.start_ns, kind="stable")
    for index, pattern in enumerate((_SEND, _RECV)):
        rows = events.rows_named(pattern, Category.CPU_OP)
        around = np.full(len(rows), -1)  # the first op of its thread that begins before the event and ends after it
        for thread, thread_rows in events.rows_by_thread(rows).items():
            of_thread = ordered[ops.thread[ordered] == thread]
            if len(of_thread):
                intervals = NestedIntervals(ops.start_ns[of_thread], ops.end_ns[of_thread])
                outermost = intervals.outermost(events.start_ns[thread_rows], events.ends_of(thread_rows))
                around[events.thread[rows] == thread] = np.where(outermost < 0, -1, of_thread[outermost])
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
        times = (events.start_ns[rows], events.ends_of(rows), events.thread[rows])
        messages = Ranges(table, codes, *times, step=np.full(len(rows), -1))
        parts.append(messages.where(messages.has_actions))
    return Ranges.joined(parts)


def message_rows(events: Events) -> npt.NDArray[np.intp]:
    """The operators that post a send or a receive."""
    return np.union1d(*(events.rows_named(pattern, Category.CPU_OP) for pattern in (_SEND, _RECV)))


def engine_nodes(events: Events) -> npt.NDArray[np.intp]:
    """The nodes that autograd's engine ran, on any thread."""
    return events.rows_named(_NODE, Category.CPU_OP)


def thread_of_most(events: Events, messages: npt.NDArray[np.intp]) -> int | None:
    """The thread that posts most of the messages."""
    threads, counts = np.unique(events.thread[messages], return_counts=True)
    if not len(threads):
        return None
    return int(threads[counts.argmax()])


def _mostly_inside_backwards(events: Events) -> bool:
    """Return whether many of the messages are posted by autograd: those of a ring inside the ops (context parallelism)."""
    messages = message_rows(events)
    inside = 0
    for thread, thread_rows in events.rows_by_thread(engine_nodes(events)).items():
        times = events.start_ns[messages[events.thread[messages] == thread]]
        inside += int(np.count_nonzero(events.intervals_of(thread_rows).hold(times)))
    return _LEAST_FRACTION * inside > len(messages)


def _segments(events: Events, thread: int, optimizers: Sequence[tuple[int, int]]) -> Iterator[Segment]:
    """Outermost operators of the thread, the engine's of all threads, messages and optimizer steps, in time order."""
    engine, is_communication, optimizer, send, recv = (
        events.named(pattern)[events.name_id] for pattern in (_NODE, _COMMUNICATION, _OPTIMIZER, _SEND, _RECV)
    )
    is_op, on_thread = events.category == Category.CPU_OP, events.thread == thread
    is_step = optimizer & (events.category == Category.ANNOTATION)
    chosen = np.flatnonzero((is_op & (on_thread | engine) & (~is_communication | send | recv)) | is_step)
    if optimizers:  # in time order and apart
        starts, ends = (np.array(side, dtype=np.int64) for side in zip(*optimizers, strict=True))
        overlaps = np.searchsorted(ends, events.start_ns) < np.searchsorted(starts, events.end_ns)
        is_step |= is_op & on_thread & ~is_communication & ~engine & overlaps
    messages = message_rows(events)
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


def drop_incidental_segments(segments: Sequence[Segment]) -> list[Segment]:
    """Drop forwards too small to be one, such as the creation of a loss's gradient, and those not followed by a backward of the
    step, such as gradient scaling.
    """
    largest = max((segment.count for segment in segments if segment.kind is SegmentKind.FORWARD), default=0)
    chosen_segments: list[Segment] = []
    is_followed = False
    for segment in reversed(segments):
        if segment.kind is SegmentKind.OPTIMIZER:
            is_followed = False
        elif segment.kind is SegmentKind.BACKWARD:
            is_followed = True
        elif segment.kind is SegmentKind.FORWARD and not (is_followed and _LEAST_FRACTION * segment.count >= largest):
            continue
        chosen_segments.append(segment)
    return merged(chosen_segments[::-1])


def merged(segments: Iterable[Segment]) -> list[Segment]:
    """Join forwards and backwards that follow on another of their kind."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if last is not None and last.kind is segment.kind and segment.kind in _COMPUTE:
            last.end_ns, last.count = max(last.end_ns, segment.end_ns), last.count + segment.count
        else:
            joined.append(segment)
    return joined


def with_microbatches(segments: Sequence[Segment]) -> Iterator[tuple[Segment, LabelledAction]]:
    """Ops and messages with microbatches by order; an op may have several messages (the tensors of one activation).

    A message is that of the op before it where it is a send, of the op after it where it is a receive.
    """
    forwards = backwards = 0
    after = list(_ops_before(reversed(segments)))[::-1]
    for segment, op_before, op_after in zip(segments, _ops_before(segments), after, strict=True):
        if segment.kind is SegmentKind.OPTIMIZER:
            if forwards <= backwards:  # no optimizer runs while a forward waits for its backward
                forwards = backwards = 0
        elif segment.kind is SegmentKind.FORWARD:
            yield segment, LabelledAction(Kind.F, microbatch=forwards)
            forwards += 1
        elif segment.kind is SegmentKind.BACKWARD:
            yield segment, LabelledAction(Kind.B, microbatch=backwards)
            backwards += 1
        elif segment.kind is not SegmentKind.MESSAGE:
            sends = segment.kind is SegmentKind.SEND
            op = op_before if sends else op_after
            if op is not SegmentKind.OPTIMIZER:
                kind, number = (Kind.F, forwards) if op is SegmentKind.FORWARD else (Kind.B, backwards)
                message_kind = _MESSAGES_OF[kind][0 if sends else 1]
                yield segment, LabelledAction(message_kind, microbatch=number - 1 if sends else number)


def _ops_before(segments: Iterable[Segment]) -> Iterator[SegmentKind]:
    """Yield the forward, backward or optimizer that came last before each run; the optimizer where there was none."""
    last = SegmentKind.OPTIMIZER
    for segment in segments:
        yield last
        if segment.kind in (*_COMPUTE, SegmentKind.OPTIMIZER):
            last = segment.kind


def peers_of(events: Events, rows: Int64) -> list[int]:
    """The peer of each call by its own communication record or one inside it; -1 without one."""
    args = events.comm_args[(events.comm_args["src"] >= 0) | (events.comm_args["dst"] >= 0)]
    rows_with_peer = args["event"].to_numpy()
    order = np.argsort(events.start_ns[rows_with_peer], kind="stable")
    rows_with_peer, peers = rows_with_peer[order], args[["src", "dst"]].max(axis=1).to_numpy()[order]
    low = np.searchsorted(events.start_ns[rows_with_peer], events.start_ns[rows])
    high = np.searchsorted(events.start_ns[rows_with_peer], events.ends_of(rows))
    peers_of_rows = []
    for row, first, last in zip(rows.tolist(), low.tolist(), high.tolist(), strict=True):
        peers_inside = {
            int(peers[at]) for at in range(first, last) if events.thread[rows_with_peer[at]] == events.thread[row]
        }
        peers_of_rows.append(peers_inside.pop() if len(peers_inside) == 1 else -1)
    return peers_of_rows


def is_one_stage(messages: Sequence[tuple[Kind, int]], sent: Sequence[Kind], forwards: int, backwards: int) -> bool:
    """Return whether messages are those of a rank with one stage of a pipeline, so that the ops next to them give their
    directions.

    Such a rank has one neighbour before it and another one behind it, and a message of each kind for all of its ops or none.

    Args:
        messages: what each message is by the op next to it, and its peer (-1: unknown).
        sent: the kinds of those that are some op's first.
        forwards, backwards: how many ops there are.
    """
    after = {peer for kind, peer in messages if kind in _TO_NEXT and peer >= 0}
    before = {peer for kind, peer in messages if kind in _TO_PREVIOUS and peer >= 0}
    if len(after) > 1 or len(before) > 1 or after & before:
        return False
    counts = Counter(sent)
    expected = {Kind.SEND_F: forwards, Kind.RECV_F: forwards, Kind.SEND_B: backwards, Kind.RECV_B: backwards}
    return all(
        not counts[kind] or expected[kind] - counts[kind] <= max(1, expected[kind] // _TOLERATED) for kind in expected
    )


def confidence(explained: int, total: int, forwards: int, backwards: int, agree: bool) -> str:
    """A word for the reliability of inferred ops.

    low: less than three quarters of the operators (or kernels) lie in them, or forwards and backwards are not about equally
    many. high: nine tenths lie in them, and the messages agree. medium: all others, such as those of ranks with several chunks,
    and those of kernels, which have no directions.
    """
    if 4 * explained < 3 * total or abs(forwards - backwards) > max(1, forwards // _TOLERATED):
        return "low confidence"
    return "high confidence" if agree and 10 * explained >= 9 * total else "medium confidence"
