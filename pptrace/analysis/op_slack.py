"""Slack and critical path of every op of a run, as further columns of its table of ops.

Slack is how much longer an op could have taken, all else as measured, without its window ending later.

Ops depend on one another: each on the op before it on its rank and on the senders of its messages; and where a message held
both of its ranks until both had come, the ops that came after it on both on those before it on both. What lies between an op
and what came before it (transfers, idle time) stays as long as it was. The slack is found from the last ops back to the first,
all windows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from msgspec import Struct

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.explain.critical_path import Bindings, Walks, arrivals, bindings_of
from pptrace.analysis.explain.rank_messages import MOVED, with_moved_times
from pptrace.analysis.explain.step_times import (
    IndexedWindows,
    RankTimes,
    StepTimes,
    numbers_of_whole,
    planned_rows,
    rows_in_steps,
    step_times,
)
from pptrace.analysis.steps.steps import PlannedStep
from pptrace.model.tables import COMPUTE_KINDS, UNKNOWN, Bool, Int8, Int64
from pptrace.schedule.plan_table import NONE, PlanTable
from pptrace.slices import Slice, rows_among, slices_by_rank
from pptrace.timeline.lanes import is_message
from pptrace.timeline.windows import StepWindow


def slacks_of(times: StepTimes, bindings: Bindings, meetings: Slice) -> tuple[Int64, Bool]:
    """(the slack of every op of whole windows, ns, whether it is on the critical path of its window), shape (windows, rows).

    A slack is −1 where clocks contradict each other so that an op seems to depend on itself. ``meetings`` are those of
    :func:`meetings_of`.
    """
    window, row = np.nonzero(times.before != NONE)
    before = times.before[window, row]
    of_ranks = _edges(times, window, before, row, bindings.ready[window, row] - times.end[window, before])
    window, row = np.nonzero(bindings.is_message)  # ops of other ranks that ops waited for: without slack
    of_peers = _edges(times, window, bindings.row[window, row], row, np.zeros(len(row), dtype=np.int64))
    edges = Slice.joined([of_ranks, _of_messages(times, bindings), of_peers, _of_meetings(times, bindings, meetings)])
    to_the_end = times.finish[:, np.newaxis] - times.end
    window, last = np.arange(len(times.windows)), times.end.argmax(axis=1)
    on_path = np.zeros(times.start.shape, dtype=np.bool_)
    on_path[window, last] = True
    walks = Walks(times, bindings)
    for hop in walks.hops(walks.first(window * len(times.table) + last, times.start[window, last])):
        on_path.reshape(-1)[hop.source[hop.has_source]] = True
    return _least(edges, to_the_end.ravel()).reshape(to_the_end.shape), on_path


def _edges(times: StepTimes, window: Int64, source: Int64, reader: Int64, slack: Int64) -> Slice:
    """Dependencies: op ``source`` could have ended ``slack`` ns later, and ``reader`` would have begun when it did.

    Ops are numbered through all windows: window · rows + row.
    """
    first = window * len(times.table)
    return Slice({"source": first + source, "reader": first + reader, "slack": np.maximum(slack, 0)})


def _of_messages(times: StepTimes, bindings: Bindings) -> Slice:
    """Dependencies on the messages of the plan."""
    table = times.table
    entries = np.flatnonzero(table.dep_is_message & (table.dep >= 0))
    columns = (table.dep, table.dep_reader, table.dep_message)
    sender, reader, message = (column[entries].astype(np.int64) for column in columns)
    slack = bindings.ready[:, reader] - arrivals(times, sender, message)
    window = np.repeat(np.arange(len(slack)), len(entries))
    return _edges(times, window, np.tile(sender, len(slack)), np.tile(reader, len(slack)), slack.ravel())


def _of_meetings(times: StepTimes, bindings: Bindings, meetings: Slice) -> Slice:
    """Dependencies through messages that held their ranks: what came after them on a rank, on what came before on both."""
    window, met, order = meetings["window"], meetings["met_ns"], _RankOrder.of(times)
    needed, sides = bindings.ready.ravel().copy(), []
    for side in _SIDES:
        rank, ready, asked, done, moved = (meetings[f"{side}_{name}"] for name in _OF_SIDE)
        # A side did not wait for what it had handed over before the other came, by longer than that took (clocks may be off by
        # less).
        has_waited = met - done <= done - asked
        reader = np.where(has_waited, order.held_up(window, rank, asked, done), NONE)
        reader[times.start.ravel()[reader] < met] = NONE
        held = reader != NONE
        np.maximum.at(needed, reader[held], moved[held])
        sides.append((reader, moved, order.last_ended(window, rank, ready), met - ready))
    parts = []
    for (reader, moved, *_), (*_, source, slack) in product(sides, sides):
        known = (reader != NONE) & (source != NONE)
        of_reader = np.maximum(needed[reader[known]] - moved[known], 0)
        slack = np.maximum(slack[known], 0) + of_reader
        parts.append(Slice({"source": source[known], "reader": reader[known], "slack": slack}))
    return Slice.joined(parts)


_SIDES = ("send", "recv")
_OF_SIDE = ("rank", "ready", "asked", "done", "moved_ns")


def meetings_of(sides: Slice) -> Slice:
    """Messages between ranks of a window, each with both of its ends, a row each.

    Args:
        sides: the ends, of columns ``window``, ``rank`` (of the pipeline), ``is_send``, ``match``, ``ready`` (posted), ``asked``,
            ``done``, ``met_ns`` (both sides were ready) and ``moved_ns`` (the transfer was over, or the last one of its batch).
    """
    order = np.lexsort((~sides["is_send"], sides["match"], sides["window"]))
    rows = sides.where(order)
    window, match, is_send = rows["window"], rows["match"], rows["is_send"]
    first = (window[1:] == window[:-1]) & (match[1:] == match[:-1]) & is_send[:-1] & ~is_send[1:]
    send = np.flatnonzero(first)
    ends = {"send": rows.where(send), "recv": rows.where(send + 1)}
    columns = {name: ends["recv"][name] for name in ("window", "met_ns")}
    return Slice(columns | {f"{side}_{name}": ends[side][name] for side in _SIDES for name in _OF_SIDE})


class _RankOrder(Struct, frozen=True, eq=False):
    """Ops of each window and rank in the order of their starts: ``op`` numbers them, ``first`` is the first of each of these.

    ``start`` and ``end`` are keys, which ascend: times within the window, after those of all earlier windows and ranks.
    """

    times: StepTimes
    extent: int
    op: Int64
    start: Int64
    end: Int64

    @classmethod
    def of(cls, times: StepTimes) -> _RankOrder:
        table, begin = times.table, times.begin
        extent = int((times.finish - begin).max(initial=0)) + 3
        place = (np.arange(len(begin))[:, np.newaxis] * table.pp + table.rank) * extent
        start, end = (
            (place + np.clip(part - begin[:, np.newaxis], 0, extent - 3) + 1).ravel()
            for part in (times.start, times.end)
        )
        op = np.argsort(start, kind="stable")
        return cls(times, extent, op, start[op], np.maximum.accumulate(end[op]))

    def last_ended(self, window: Int64, rank: Int64, at: Int64) -> Int64:
        """The last op of a rank that had ended by a time; −1 where none had."""
        index = np.searchsorted(self.end, self._key(window, rank, at), side="right") - 1
        return self._op(index, window, rank)

    def held_up(self, window: Int64, rank: Int64, asked: Int64, done: Int64) -> Int64:
        """The next op of a rank that did nothing from when it asked for a message until that was done; −1 where it did."""
        index = np.searchsorted(self.start, self._key(window, rank, done), side="left")
        ended = np.searchsorted(self.end, self._key(window, rank, asked), side="right")
        return np.where(index == ended, self._op(index, window, rank), NONE)

    def _key(self, window: Int64, rank: Int64, at: Int64) -> Int64:
        inside = np.clip(at - self.times.begin[window], -1, self.extent - 2)
        key: Int64 = (window * self.times.table.pp + rank) * self.extent + inside + 1
        return key

    def _op(self, index: Int64, window: Int64, rank: Int64) -> Int64:
        """Ops at places of the order; −1 where these are of another window or rank."""
        op = self.op[np.clip(index, 0, len(self.op) - 1)]
        of_window, row = np.divmod(op, len(self.times.table))
        is_of_it = (index >= 0) & (index < len(self.op)) & (of_window == window)
        return np.where(is_of_it & (self.times.table.rank[row] == rank), op, NONE)


def _least(edges: Slice, slack: Int64) -> Int64:
    """The slack of each op: the least of its own and of each edge's with that of the reader; −1 where edges form a circle.

    Ops whose readers are all known are gone through together, from the last ones back.
    """
    slack = slack.copy()
    edges = edges.in_order_of("reader")
    source, late = edges["source"], edges["slack"]
    first = np.searchsorted(edges["reader"], np.arange(len(slack) + 1))
    unknown_readers = np.bincount(source, minlength=len(slack))
    is_known = np.zeros(len(slack), dtype=np.bool_)
    ops = np.flatnonzero(unknown_readers == 0)
    while len(ops):
        is_known[ops] = True
        count = first[ops + 1] - first[ops]
        at = np.repeat(first[ops] - np.cumsum(count) + count, count) + np.arange(int(count.sum()))
        sources = source[at]
        np.minimum.at(slack, sources, np.repeat(slack[ops], count) + late[at])
        np.subtract.at(unknown_readers, sources, 1)
        ops = np.unique(sources[unknown_readers[sources] == 0])
    return np.where(is_known, slack, UNKNOWN)


_CELLS = 1 << 19
"""Ops of windows that are gone through together: more would take much memory."""


class OpSlack(Struct, frozen=True, eq=False):
    """``slack_ns`` and ``on_critical_path`` (1, 0) of each row of the run's ops, −1 where unknown."""

    slack_ns: Int64
    on_critical_path: Int8


def slack_of_ops(steps: Sequence[PlannedStep], data: AlignedRun) -> OpSlack:
    """Find the slack of the ops in those windows that have every op of their plan, and whose ranks' times compare."""
    found = OpSlack(np.full(len(data.ops), UNKNOWN, np.int64), np.full(len(data.ops), UNKNOWN, np.int8))
    if not data.lanes:
        return found
    windows_of_plan: dict[int, tuple[PlanTable, list[StepWindow]]] = {}
    for step in steps:
        if step.plan is not None:
            _, windows = windows_of_plan.setdefault(id(step.plan), (step.plan.table, []))
            windows.extend(window for window in step.windows if data.is_comparable(window))
    columns = ("rank", "step", "kind", "stage", "microbatch", "start_ns")
    ops = data.ops[list(columns)].assign(at=np.arange(len(data.ops)))
    rows = slices_by_rank(ops[rows_among(ops["kind"], COMPUTE_KINDS)], ("step", "start_ns"))
    for table, windows in windows_of_plan.values():
        most = max(1, _CELLS // max(1, len(table)))
        for first in range(0, len(windows), most):
            _fill(found, table, IndexedWindows.of(windows[first : first + most]), data, rows)
    return found


def _fill(found: OpSlack, table: PlanTable, windows: IndexedWindows, data: AlignedRun, rows: dict[int, Slice]) -> None:
    """Fill in the ops of some windows of one plan."""
    ranks = [RankTimes.of(table, windows, rank, data) for rank in windows.of_rank]
    times = step_times(table, windows.windows, ranks)
    if not times.is_whole.any():
        return
    number, whole = numbers_of_whole(times.is_whole), times.whole()
    slack, on_path = slacks_of(whole, bindings_of(whole), meetings_of(_ends(windows, data, number)))
    for rank, indices in windows.of_rank.items():
        ops, window = rows_in_steps(rows[rank], windows.step[indices], indices)
        planned, of_whole = planned_rows(table, ops), number[window]
        known = (planned >= 0) & (of_whole >= 0)
        cells = of_whole[known], planned[known]
        found.slack_ns[ops["at"][known]] = slack[cells]
        found.on_critical_path[ops["at"][known]] = on_path[cells]


def _ends(windows: IndexedWindows, data: AlignedRun, number: Int64) -> Slice:
    """The ends of messages between ranks of one pipeline in its windows, as :func:`meetings_of` takes them."""
    parts = []
    for rank, indices in windows.of_rank.items():
        comms, window = rows_in_steps(data.rows.of_rank(rank).comms, windows.step[indices], indices)
        comms = with_moved_times(comms, window)
        is_end = is_message(comms) & (comms["match"] >= 0) & (number[window] >= 0)
        ends, place = comms.where(is_end), windows.windows[int(indices[0])].ranks.index(rank)
        columns = {name: ends[of] for name, of in _OF_ENDS.items()}
        columns |= {"window": number[window[is_end]], "is_send": ends["kind"] == "send"}
        parts.append(Slice(columns | {"rank": np.full(len(ends), place, dtype=np.int64)}))
    return Slice.joined(parts)


_OF_ENDS = {
    "match": "match",
    "ready": "start_ns",
    "asked": "asked_ns",
    "done": "end_ns",
    "met_ns": "transfer_start_ns",
    "moved_ns": MOVED,
}
