"""Measured times of many steps of one plan as matrices: a row per step of a pipeline, a column per action of the plan.

Each rank's window is cut at its ops: before each op lies the *gap* since the ops before it, and after the last one the *tail*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from pptrace.analysis.aligned import AlignedRun
from pptrace.intervals import Int64, clip, lengths_within
from pptrace.model.tables import MESSAGES
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import NONE, PlanTable
from pptrace.slices import Slice
from pptrace.timeline.lanes import Lane, communication_inside_ops, is_inner
from pptrace.timeline.windows import StepWindow

Bool = npt.NDArray[np.bool_]

UNKNOWN = np.iinfo(np.int64).min
"""The arrival of a message that was not matched."""


@dataclass(frozen=True, slots=True, eq=False)
class PeerWaits:
    """Messages for which a rank waited, because its peer came later: a row each.

    In step ``step``, ``rank`` (of the pipeline) went on at ``freed``; ``peer`` was ready at ``ready``; ns.
    """

    step: Int64
    rank: Int64
    freed: Int64
    peer: Int64
    ready: Int64


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Times of steps, ns. Matrices of ops have the shape (steps, rows of the table), of messages (steps, messages of the table).

    ``start`` and ``end`` of an op that the trace lacks are 0. ``communication`` is the part of an op's time in which it
    communicated and did not compute, ``before`` the row that ran before each on its rank (−1: none). ``gap_bubble`` and
    ``gap_exposed`` are the bubble and the exposed communication in the gap before each op, ``inner_bubble`` the bubble inside
    it, ``tail_bubble`` (steps, pp) that after the last op of each rank. ``arrival`` is when the reader of a message had it,
    ``transfer`` what the transfer cost it; ``sender_is_last``: it began when the sender was ready, not when the reader was.
    ``is_whole``: the trace has every op of the plan. ``waits``: the messages that held up a rank, whatever it ran after them.
    """

    table: PlanTable
    windows: tuple[StepWindow, ...]
    start: Int64
    end: Int64
    communication: Int64
    before: Int64
    gap_bubble: Int64
    gap_exposed: Int64
    inner_bubble: Int64
    tail_bubble: Int64
    arrival: Int64
    transfer: Int64
    sender_is_last: Bool
    is_whole: Bool
    waits: PeerWaits

    @property
    def durations(self) -> Int64:
        return self.end - self.start

    def whole(self) -> StepTimes:
        """The windows that have every op of the plan."""
        if self.is_whole.all():
            return self
        kept = np.flatnonzero(self.is_whole)
        number = np.cumsum(self.is_whole) - 1
        of_kept = self.is_whole[self.waits.step]
        waits = PeerWaits(*(getattr(self.waits, name)[of_kept] for name in PeerWaits.__slots__))
        matrices = {item.name: getattr(self, item.name)[kept] for item in fields(self) if item.name not in _NO_MATRIX}
        windows = tuple(self.windows[index] for index in kept.tolist())
        return replace(self, windows=windows, waits=replace(waits, step=number[waits.step]), **matrices)

    @property
    def begin(self) -> Int64:
        """The start of each window, shape (steps,)."""
        return np.array([window.start_ns for window in self.windows], dtype=np.int64)

    @property
    def finish(self) -> Int64:
        """The end of each window, shape (steps,)."""
        return np.array([window.end_ns for window in self.windows], dtype=np.int64)


_NO_MATRIX = ("table", "windows", "waits")


def step_times(table: PlanTable, windows: Sequence[StepWindow], data: AlignedRun) -> StepTimes:
    """The measured times of windows whose steps have the plan of ``table``."""
    shape, messages = (len(windows), len(table)), (len(windows), table.num_messages)
    names = ("start", "end", "communication", "gap_bubble", "gap_exposed", "inner_bubble")
    times = StepTimes(
        table=table,
        windows=tuple(windows),
        before=np.full(shape, NONE, dtype=np.int64),
        tail_bubble=np.zeros((len(windows), table.pp), dtype=np.int64),
        sender_is_last=np.zeros(messages, dtype=np.bool_),
        arrival=np.full(messages, UNKNOWN, dtype=np.int64),
        transfer=np.zeros(messages, dtype=np.int64),
        is_whole=np.zeros(len(windows), dtype=np.bool_),
        waits=PeerWaits(*(np.empty(0, dtype=np.int64) for _ in range(5))),
        **{name: np.zeros(shape, dtype=np.int64) for name in names},
    )
    is_measured = np.zeros(shape, dtype=np.bool_)
    of_rank: dict[int, list[int]] = {}
    for index, window in enumerate(windows):
        for rank in window.ranks:
            of_rank.setdefault(rank, []).append(index)
    waits = [
        _fill_rank(times, is_measured, rank, np.array(indices, dtype=np.int64), data)
        for rank, indices in of_rank.items()
    ]
    times.is_whole[:] = is_measured.all(axis=1)
    columns = (np.concatenate([getattr(part, name) for part in waits]) for name in PeerWaits.__slots__)
    return replace(times, waits=PeerWaits(*columns)) if waits else times


def _fill_rank(times: StepTimes, is_measured: Bool, rank: int, indices: Int64, data: AlignedRun) -> PeerWaits:
    """Fill in what one rank measured in the windows ``indices``; return for which messages it waited."""
    rows = data.rows.of_rank(rank)
    windows = [times.windows[index] for index in indices.tolist()]
    steps = np.array([window.step for window in windows], dtype=np.int64)
    compute, exposed = (
        clip(part, min(window.start_ns for window in windows), max(window.end_ns for window in windows))
        for part in (data.lanes[rank].compute, data.lanes[rank].exposed)
    )
    lane = replace(data.lanes[rank], compute=compute, exposed=exposed)
    ops, index = _in_steps(rows.ops, steps, indices)
    comms, index_of_comms = _in_steps(rows.comms, steps, indices)
    planned = _planned_rows(times.table, ops)
    known = planned >= 0
    ops, index, planned = (ops, index, planned) if known.all() else (ops.where(known), index[known], planned[known])
    is_measured[index, planned] = True
    times.start[index, planned], times.end[index, planned] = ops["start_ns"], ops["end_ns"]
    times.communication[index, planned] = _inside_ops(comms, ops, lane)
    _fill_bubbles(times, lane, index, planned, ops)
    _fill_messages(times, comms, index_of_comms)
    return _peer_waits(rank, windows[0].ranks, comms, index_of_comms)


def _fill_messages(times: StepTimes, comms: Slice, index: Int64) -> None:
    """Fill in the messages that a rank received."""
    is_received = (comms["kind"] == "recv") & (comms["match"] >= 0)
    received, index = comms.where(is_received), index[is_received]
    message = _planned_messages(times.table, received)
    known = message >= 0
    at = index[known], message[known]
    times.transfer[at] = _transfer_ns(received)[known]
    times.arrival[at] = received["transfer_end_ns"][known]
    times.sender_is_last[at] = (received["transfer_start_ns"] > received["start_ns"])[known]


def _peer_waits(rank: int, pipeline: Sequence[int], comms: Slice, index: Int64) -> PeerWaits:
    """The messages between the ranks of a pipeline for which one of them waited, until its peer was ready."""
    is_held = (comms["axis"] == "pp") & comms.among("kind", MESSAGES) & (comms["match"] >= 0)
    is_held &= (comms["transfer_start_ns"] > comms["start_ns"]) & (comms["end_ns"] > comms["asked_ns"])
    held, index = comms.where(is_held), index[is_held]
    ranks = np.array(pipeline, dtype=np.int64)
    order = np.argsort(ranks)
    peer = order[np.minimum(np.searchsorted(ranks[order], held["peer"]), len(ranks) - 1)]
    known = ranks[peer] == held["peer"]
    position = np.full(int(known.sum()), pipeline.index(rank), dtype=np.int64)
    return PeerWaits(index[known], position, held["end_ns"][known], peer[known], held["transfer_start_ns"][known])


def _fill_bubbles(times: StepTimes, lane: Lane, index: Int64, planned: Int64, ops: Slice) -> None:
    """Cut the rank's windows at its ops, which are in order of step and start, and fill in the bubble of every part."""
    if not len(index):
        return
    start, end = ops["start_ns"], ops["end_ns"]
    is_first = np.concatenate(([True], index[1:] != index[:-1]))
    busy_until = _latest_before(np.cumsum(is_first), end, times.begin[index], is_first)
    times.before[index, planned] = np.where(is_first, NONE, np.roll(planned, 1))
    gap_begin = np.minimum(busy_until, start)
    compute, exposed = (lengths_within(part, gap_begin, start) for part in (lane.compute, lane.exposed))
    times.gap_exposed[index, planned] = exposed
    times.gap_bubble[index, planned] = start - gap_begin - compute - exposed
    inner = np.maximum(start, busy_until), np.maximum(end, busy_until)
    times.inner_bubble[index, planned] = _bubble(lane, *inner)
    last = np.flatnonzero(np.concatenate((is_first[1:], [True])))
    tail = inner[1][last], times.finish[index[last]]
    times.tail_bubble[index[last], times.table.rank[planned[last]]] = _bubble(lane, *tail)


def _bubble(lane: Lane, begin: Int64, end: Int64) -> Int64:
    return end - begin - lengths_within(lane.compute, begin, end) - lengths_within(lane.exposed, begin, end)


def _latest_before(group: Int64, end: Int64, begin: Int64, is_first: Bool) -> Int64:
    """For each op the latest end of those before it in its group, or the begin of its window."""
    low = int(min(end.min(), begin.min()))
    extent = int(max(end.max(), begin.max())) - low + 1
    offset = group * extent - low
    before = np.where(is_first, begin, np.roll(end, 1)) + offset
    latest: Int64 = np.maximum.accumulate(before) - offset
    return latest


def _in_steps(rows: Slice, steps: Int64, indices: Int64) -> tuple[Slice, Int64]:
    """(rows of these steps, for each of them the index that belongs to its step); ``rows`` are in the order of steps."""
    order = np.argsort(steps, kind="stable")
    first, last = np.searchsorted(rows["step"], (steps[order[0]], steps[order[-1]] + 1))
    rows = rows.where(slice(first, last))
    position = np.searchsorted(steps[order], rows["step"])
    inside = position < len(steps)
    inside[inside] = steps[order][position[inside]] == rows["step"][inside]
    return rows.where(inside), indices[order][position[inside]]


def _planned_rows(table: PlanTable, ops: Slice) -> Int64:
    """The row of the plan that each op is; −1 where it is none."""
    kind, kinds = ops.codes("kind")
    code = np.array([Kind(name).code for name in kinds], dtype=np.int64)[kind]
    rows = table.rows_of(code, ops["stage"], ops["microbatch"])
    return np.where((rows >= 0) & (table.kind[rows] == code), rows, NONE)


def _planned_messages(table: PlanTable, received: Slice) -> Int64:
    """The message of the plan that each received one is; −1 where it is none."""
    is_forward = received["direction"] == "F"
    producer = np.where(is_forward, Kind.F.code, Kind.B.code)
    stage = received["stage"] + np.where(is_forward, -1, 1)
    slots = table.slots_of(producer, stage, received["microbatch"])
    return np.where(slots >= 0, table.slot_to_message[slots], NONE)


def _transfer_ns(received: Slice) -> Int64:
    """What each transfer cost its reader; one posted ahead is seen complete when its reader asks for it."""
    begins = np.maximum(received["transfer_start_ns"], received["asked_ns"])
    durations: Int64 = np.maximum(received["transfer_end_ns"] - begins, 0)
    return durations


def _inside_ops(comms: Slice, ops: Slice, lane: Lane) -> Int64:
    """Time in which each op communicated without compute, in order of step, from the communication of its own step, ns."""
    inside = np.zeros(len(ops), dtype=np.int64)
    if not is_inner(comms).any():
        return inside
    for step in np.unique(ops["step"]).tolist():
        of_step, communication = ops["step"] == step, comms.where(comms["step"] == step)
        inside[of_step] = communication_inside_ops(ops.where(of_step), communication, lane)
    return inside
