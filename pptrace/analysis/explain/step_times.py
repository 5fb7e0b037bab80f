"""Measured times of many steps of one plan as matrices: a row per step of a pipeline, a column per action of the plan.

Each rank's window is cut at its ops: before each op lies the *gap* since the ops before it, and after the last one the *tail*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.explain.inner_waits import collectives_in_ops
from pptrace.analysis.explain.rank_messages import (
    CALLS,
    NEVER,
    calls_of,
    longest_moved_with,
    received_messages,
    waits_for_peers,
    with_moved_times,
)
from pptrace.analysis.stragglers.outside import outside_of
from pptrace.intervals import EMPTY, Int64, clip, intersect, lengths_within, merge, subtract, times_by_group, union
from pptrace.model.tables import GARBAGE_COLLECTION, Bool
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import NONE, PlanTable
from pptrace.slices import Slice, compact
from pptrace.timeline.lanes import INNER_AXES, Lane, communication_inside_ops, exposed_inside_ops, is_inner
from pptrace.timeline.windows import StepWindow

UNKNOWN = np.iinfo(np.int64).min
"""The arrival of a message that was not matched."""


class StepTimes(Struct, frozen=True, eq=False):
    """Times of steps, ns. Matrices of ops have the shape (steps, rows of the table), of messages (steps, messages of the table).

    ``start`` and ``end`` of an op that the trace lacks are 0. ``communication`` is the part of an op's time in which it
    communicated and did not compute (``exposed``, (steps, rows, axes): was transfer along ``INNER_AXES``), ``host`` that in
    which its device was idle because the host had launched nothing, ``stalled`` the rest of what its kernels did not fill: where
    a device was recorded, an op computes while its kernels run.
    ``before`` is the row that ran before each on its rank (−1: none). ``gap_bubble`` and ``gap_exposed`` are the bubble and the
    exposed communication in the gap before each op, ``inner_bubble`` the bubble inside it, ``tail_bubble`` (steps, pp) that
    after the last op of each rank. ``arrival`` is when the reader of a message had it, ``transfer`` what the transfer cost it,
    ``sent`` when all that its kernel carries had been sent (a late time where that is not known), ``received`` the kernel's end,
    ``recorded`` what it would have cost if each of the messages posted together had been moved until it was seen complete;
    ``sender_is_last``: it began when the sender was ready, not when the reader was; ``is_early``: it had begun when the reader,
    which had posted its receive ahead, asked for it, so that it may have arrived before.
    ``moved_with`` are the peers of the messages that each op's rank waited longest to be moved (:func:`peer_bit`).
    ``collected`` is the part of an op's time that garbage collections took of it.
    ``is_whole``: the trace has every op of the plan; ``on_device``: a device of one of its ranks was recorded;
    ``knows_host``: of every rank it is known why its device was idle.
    ``waits``: the messages for which a rank waited because its peer came later, whatever it ran after them: in a ``window``,
    ``rank`` (of the pipeline) went on at ``freed``, ``peer`` was ready at ``ready``.
    """

    table: PlanTable
    windows: tuple[StepWindow, ...]
    start: Int64
    end: Int64
    communication: Int64
    host: Int64
    stalled: Int64
    before: Int64
    gap_bubble: Int64
    gap_exposed: Int64
    inner_bubble: Int64
    moved_with: Int64
    collected: Int64
    exposed: Int64
    tail_bubble: Int64
    arrival: Int64
    sent: Int64
    received: Int64
    transfer: Int64
    recorded: Int64
    sender_is_last: Bool
    is_early: Bool
    is_whole: Bool
    on_device: Bool
    knows_host: Bool
    waits: Slice

    @property
    def durations(self) -> Int64:
        return self.end - self.start

    @property
    def computing(self) -> Int64:
        """Time that each op computed, ns."""
        return self.durations - self.communication - self.host - self.stalled

    @property
    def knows_lateness(self) -> Bool:
        """Mask of the windows whose ops begin late because of hosts: no device tells why it was idle, and the transfer
        of every message is known, which would look the same.
        """
        known: Bool = ~self.on_device & (self.arrival != UNKNOWN).all(axis=1)
        return known

    def whole(self) -> StepTimes:
        """The windows that have every op of the plan."""
        if self.is_whole.all():
            return self
        kept = np.flatnonzero(self.is_whole)
        matrices = {name: getattr(self, name)[kept] for name in self.__struct_fields__ if name not in _NO_MATRIX}
        windows = tuple(self.windows[index] for index in kept.tolist())
        waits = self.waits.where(self.is_whole[self.waits["window"]])
        waits = waits.with_columns({"window": numbers_of_whole(self.is_whole)[waits["window"]]})
        return replace(self, windows=windows, waits=waits, **matrices)

    @property
    def begin(self) -> Int64:
        """The start of each window, shape (steps,)."""
        return np.array([window.start_ns for window in self.windows], dtype=np.int64)

    @property
    def finish(self) -> Int64:
        """The end of each window, shape (steps,)."""
        return np.array([window.end_ns for window in self.windows], dtype=np.int64)


_NO_MATRIX = ("table", "windows", "waits")


def numbers_of_whole(is_whole: Bool) -> Int64:
    """The number of each window among those that are whole; −1 of the others."""
    return np.where(is_whole, np.cumsum(is_whole) - 1, -1)


class IndexedWindows(Struct, frozen=True, eq=False):
    """Windows as arrays: begin and end, ns, and step of each, and the indices of the windows of each rank."""

    windows: Sequence[StepWindow]
    begin: Int64
    finish: Int64
    step: Int64
    of_rank: Mapping[int, Int64]

    @classmethod
    def of(cls, windows: Sequence[StepWindow]) -> IndexedWindows:
        times = np.array([(window.start_ns, window.end_ns, window.step) for window in windows], dtype=np.int64)
        of_rank: dict[int, list[int]] = {}
        for index, window in enumerate(windows):
            for rank in window.ranks:
                of_rank.setdefault(rank, []).append(index)
        indices = {rank: np.array(of_one, dtype=np.int64) for rank, of_one in of_rank.items()}
        begin, finish, step = times.reshape(-1, 3).T
        return cls(windows, begin, finish, step, indices)


class RankTimes(Struct, frozen=True, eq=False):
    """Measurements of one rank in windows: its ops, the ends of its steps, the messages that it received, those it waited for.

    Each table has the index of the window (``window``); ops and tails have the row of the plan, messages their number in it.
    ``starved`` is when its device was idle between ops because the host had launched nothing, ``exposed`` when transfers were
    exposed, ``collections`` when its host collected garbage and its device, if it has one, was idle for want of launches (see
    :mod:`pptrace.intervals`). ``inner`` are the collectives inside its ops
    (:mod:`pptrace.analysis.explain.inner_waits`).
    ``outside`` is what the rank did before and after its ops (:mod:`pptrace.analysis.stragglers.outside`), ``calls`` are its
    calls between them (:func:`pptrace.analysis.explain.rank_messages.calls_of`).
    """

    ops: Slice
    tails: Slice
    messages: Slice
    waits: Slice
    starved: Int64
    exposed: Int64
    collections: Int64
    inner: Slice
    outside: Slice
    calls: Slice

    @classmethod
    def of(
        cls, table: PlanTable, windows: IndexedWindows, rank: int, data: AlignedRun, *, with_calls: bool = True
    ) -> RankTimes:
        """The times in those of the windows that are of the rank's pipeline; without its calls where these are not asked for."""
        indices, begin, finish = windows.of_rank[rank], windows.begin, windows.finish
        pipeline, steps = windows.windows[int(indices[0])].ranks, windows.step[indices]
        first, last = int(begin[indices].min()), int(finish[indices].max())
        lane = data.lanes[rank]
        lane = replace(lane, compute=clip(lane.compute, first, last), exposed=clip(lane.exposed, first, last))
        rows = data.rows.of_rank(rank)
        measured, window = rows_in_steps(rows.ops, steps, indices)
        comms, window_of_comms = rows_in_steps(rows.comms, steps, indices)
        comms = with_moved_times(comms, window_of_comms)
        planned = planned_rows(table, measured)
        known = planned >= 0
        if not known.all():
            measured, window, planned = measured.where(known), window[known], planned[known]
        ops, tails = _cut(lane, begin, finish, window, planned, measured)
        collections = _collections(rows.spans, data.lanes[rank])
        inside = _inside_ops(comms, measured, lane)
        inside["collected"] = lengths_within(collections, measured["start_ns"], measured["end_ns"])
        peers = longest_moved_with(pipeline, comms, window_of_comms, ops)
        ops = Slice({**ops.columns, **inside, "moved_with": peers})
        spans, window_of_spans = rows_in_steps(rows.spans, steps, indices)
        outside = outside_of(
            (spans, window_of_spans), (comms, window_of_comms), (ops, len(begin)), pipeline.index(rank)
        )
        return cls(
            ops,
            tails,
            received_messages(table, comms, window_of_comms),
            waits_for_peers(rank, pipeline, comms, window_of_comms, measured),
            _starved_between(lane, measured),
            lane.exposed,
            collections,
            collectives_in_ops(comms, window_of_comms, ops, lane),
            outside,
            calls_of(table, comms, window_of_comms, ops, collections) if with_calls else Slice.empty(*CALLS),
        )

    def compact(self) -> RankTimes:
        """The same in about a third of the bytes, to be kept for :meth:`of_windows`: ops and messages in the smallest types."""
        ops, messages = (
            Slice({name: compact(part[name]) for name in part.columns}) for part in (self.ops, self.messages)
        )
        return replace(self, ops=ops, messages=messages)

    def of_windows(self, first: int, last: int) -> RankTimes:
        """The times in the windows from ``first`` to before ``last``, which are counted from 0; the rows are in their order."""
        tables: dict[str, Any] = {}
        for name in ("ops", "tails", "messages", "waits", "inner", "outside", "calls"):
            rows: Slice = getattr(self, name)
            inside = rows.where(slice(*np.searchsorted(rows["window"], (first, last))))
            tables[name] = inside.with_columns({"window": inside["window"].astype(np.int64) - first})
        return replace(self, **tables)


def step_times(table: PlanTable, windows: Sequence[StepWindow], ranks: Sequence[RankTimes]) -> StepTimes:
    """The measured times of windows whose steps have the plan of ``table``, from those of each of their ranks."""
    shape, messages = (len(windows), len(table)), (len(windows), table.num_messages)
    columns: dict[str, Any] = {name: np.zeros(shape, dtype=np.int64) for name in _OF_OPS}
    columns |= {name: np.full(messages, of_none) for name, of_none in _OF_MESSAGES.items()}
    times = StepTimes(
        table=table,
        windows=tuple(windows),
        before=np.full(shape, NONE, dtype=np.int64),
        exposed=np.zeros((*shape, len(INNER_AXES)), dtype=np.int64),
        tail_bubble=np.zeros((len(windows), table.pp), dtype=np.int64),
        is_whole=np.zeros(len(windows), dtype=np.bool_),
        on_device=np.zeros(len(windows), dtype=np.bool_),
        knows_host=np.ones(len(windows), dtype=np.bool_),
        waits=Slice.joined([rank.waits for rank in ranks]),
        **columns,
    )
    is_measured = np.zeros(shape, dtype=np.bool_)
    ops, received, tails = (
        Slice.joined([getattr(rank, name) for rank in ranks]) for name in ("ops", "messages", "tails")
    )
    cell, message = (ops["window"], ops["row"]), (received["window"], received["message"])
    is_measured[cell] = True
    for name in (*_OF_OPS, "before", "exposed"):
        getattr(times, name)[cell] = ops[name]
    for name in _OF_MESSAGES:
        getattr(times, name)[message] = received[name]
    window = tails["window"]
    times.tail_bubble[window, table.rank[tails["row"]]] = tails["bubble"]
    np.logical_or.at(times.on_device, window, tails["on_device"])
    np.logical_and.at(times.knows_host, window, tails["knows_host"])
    times.is_whole[:] = is_measured.all(axis=1)
    partial = ~times.knows_host
    times.stalled[partial] += times.host[partial]
    times.host[partial] = 0
    return times


def before_ops(
    ranks: Sequence[RankTimes], name: Literal["starved", "exposed", "collections"], is_whole: Bool, ready: Int64
) -> Int64:
    """Lengths of some times of ranks between when ops could have run and their starts, ns, shape (whole windows, rows).

    Args:
        ranks, name: which times.
        is_whole: which of all windows are.
        ready: when each op of whole windows could have run.
    """
    before, numbers = np.zeros(ready.shape, dtype=np.int64), numbers_of_whole(is_whole)
    for ops, of_rank in ((rank.ops, getattr(rank, name)) for rank in ranks):
        if not len(of_rank):
            continue
        rows = ops if is_whole.all() else ops.where(numbers[ops["window"]] >= 0)
        at = numbers[rows["window"]], rows["row"]
        before[at] = lengths_within(of_rank, ready[at], rows["start"])
    return before


_OF_MESSAGES: Mapping[str, int | bool] = {
    **{"arrival": UNKNOWN, "sent": NEVER, "received": UNKNOWN, "transfer": 0, "recorded": 0},
    **{"sender_is_last": False, "is_early": False},
}
"""Columns of messages, with the value of one that was not matched."""
_OF_OPS = (
    "start",
    "end",
    "communication",
    "host",
    "stalled",
    "gap_bubble",
    "gap_exposed",
    "inner_bubble",
    "moved_with",
    "collected",
)


def _cut(lane: Lane, begin: Int64, finish: Int64, window: Int64, row: Int64, ops: Slice) -> tuple[Slice, Slice]:
    """Cut a rank's windows at its ops, which are in order of step and start: the ops with their bubbles, and the tails."""
    start, end = ops["start_ns"], ops["end_ns"]
    is_first = np.ones(len(window), dtype=np.bool_)
    is_first[1:] = window[1:] != window[:-1]
    busy_until = _latest_before(np.cumsum(is_first), end, begin[window], is_first)
    gap_begin = np.minimum(busy_until, start)
    busy = merge(lane.compute, lane.exposed)
    inner_begin, inner_end = np.maximum(start, busy_until), np.maximum(end, busy_until)
    cut = {
        "window": window,
        "row": row,
        "start": start,
        "end": end,
        "before": np.where(is_first, NONE, np.roll(row, 1)),
        "gap_exposed": lengths_within(lane.exposed, gap_begin, start),
        "gap_bubble": start - gap_begin - lengths_within(busy, gap_begin, start),
        "inner_bubble": inner_end - inner_begin - lengths_within(busy, inner_begin, inner_end),
    }
    last = np.flatnonzero(np.append(is_first[1:], [True] * (len(window) > 0)))
    bubble = finish[window[last]] - inner_end[last] - lengths_within(busy, inner_end[last], finish[window[last]])
    knows_host = np.zeros(len(last), dtype=np.bool_)
    if lane.idle is not None:
        knows_host = lengths_within(lane.idle.unknown, begin[window[last]], finish[window[last]]) == 0
    known = {"on_device": np.full(len(last), lane.on_device), "knows_host": knows_host}
    return Slice(cut), Slice({"window": window[last], "row": row[last], "bubble": bubble, **known})


def _starved_between(lane: Lane, ops: Slice) -> Int64:
    """Times at which the rank's device was idle between ops because the host had launched nothing."""
    if lane.idle is None or not len(ops):
        return EMPTY
    return subtract(lane.idle.launch_starved, union(ops["start_ns"], ops["end_ns"]))


def _collections(spans: Slice, lane: Lane) -> Int64:
    """Times in which garbage collections kept a rank from computing: a device goes on with what had been launched before."""
    of_collections = spans.where(spans.among("kind", (GARBAGE_COLLECTION,)))
    if not len(of_collections):
        return EMPTY
    collections = union(of_collections["start_ns"], of_collections["end_ns"])
    if not lane.on_device:
        return collections
    return EMPTY if lane.idle is None else intersect(collections, lane.idle.launch_starved)


def _latest_before(group: Int64, end: Int64, begin: Int64, is_first: Bool) -> Int64:
    """Latest end of the ops before each op in its group, or the begin of its window."""
    if not len(end):
        return end
    before = np.where(is_first, begin, np.roll(end, 1))
    (key,) = times_by_group((group, before))
    return before + np.maximum.accumulate(key) - key


def rows_in_steps(rows: Slice, steps: Int64, indices: Int64) -> tuple[Slice, Int64]:
    """(rows of these steps, for each of them the index that belongs to its step); ``rows`` are in the order of steps."""
    order = np.argsort(steps, kind="stable")
    first, last = np.searchsorted(rows["step"], (steps[order[0]], steps[order[-1]] + 1))
    rows = rows.where(slice(first, last))
    position = np.searchsorted(steps[order], rows["step"])
    position = np.minimum(position, len(steps) - 1)
    inside = steps[order][position] == rows["step"]
    if not inside.all():
        rows, position = rows.where(inside), position[inside]
    return rows, indices[order][position]


def planned_rows(table: PlanTable, ops: Slice) -> Int64:
    """The row of the plan that each op is; −1 where it is none."""
    kind, kinds = ops.codes("kind")
    code = np.array([Kind(name).code for name in kinds], dtype=np.int64)[kind]
    rows = table.rows_of(code, ops["stage"], ops["microbatch"])
    return np.where((rows >= 0) & (table.kind[rows] == code), rows, NONE)


def _inside_ops(comms: Slice, ops: Slice, lane: Lane) -> dict[str, Int64]:
    """Time of each op that is no compute, ns, by the names of :class:`StepTimes`; ``comms`` are those of its own step."""
    start, end = ops["start_ns"], ops["end_ns"]
    communication = np.zeros(len(ops), dtype=np.int64)
    exposed = np.zeros((len(ops), len(INNER_AXES)), dtype=np.int64)
    if is_inner(comms).any():
        axes = set(INNER_AXES).intersection(comms.codes("axis")[1])
        for step in np.unique(ops["step"]).tolist():
            of_step, of_comms = ops["step"] == step, comms.where(comms["step"] == step)
            communication[of_step] = communication_inside_ops(ops.where(of_step), of_comms, lane)
            for axis in axes:
                of_axis = exposed_inside_ops(ops.where(of_step), of_comms, lane, axis)
                exposed[of_step, INNER_AXES.index(axis)] = of_axis
    if not lane.on_device:
        nothing = dict.fromkeys(("host", "stalled"), np.zeros_like(communication))
        return {"communication": communication, **nothing, "exposed": exposed}
    starved = EMPTY if lane.idle is None else subtract(lane.idle.launch_starved, lane.compute)
    host = lengths_within(starved, start, end)
    compute = lengths_within(lane.compute, start, end)
    communication = np.minimum(communication, end - start - compute - host)
    stalled = end - start - compute - host - communication
    return {"communication": communication, "host": host, "stalled": stalled, "exposed": exposed}
