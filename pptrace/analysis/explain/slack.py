"""Slack: how much longer an op could have taken, all else as measured, without its window ending later.

Ops depend on one another: each on the op before it on its rank and on the senders of its messages; and where a message held
both of its ranks until both had come, the ops that came after it on both on those before it on both. What lies between an op
and what came before it (transfers, idle time) stays as long as it was. The slack is found from the last ops back to the first,
all windows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from pptrace.analysis.explain.binding import Bindings, arrivals
from pptrace.analysis.explain.critical_path import Walks
from pptrace.analysis.explain.step_times import StepTimes
from pptrace.model.tables import UNKNOWN, Bool, Int64
from pptrace.schedule.plan_table import NONE
from pptrace.slices import Slice


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
    for hop in Walks(times, bindings).hops(window * len(times.table) + last, times.start[window, last]):
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


@dataclass(frozen=True, slots=True, eq=False)
class _RankOrder:
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
