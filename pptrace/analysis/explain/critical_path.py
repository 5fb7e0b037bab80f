"""The critical path of a step: the chain of ops, transfers and idle times that ends with its last op.

Walks back in time along what ops waited for, many at once.

A walk begins at the start of an op and goes back through pieces that follow one another without gap or overlap: the time in
which the op could have run and did not (*idle*), the time that what it waited for took to reach it, or that fetching it took
(*transfer*), and the op that it waited for. Clocks that are a little off shorten a piece, to 0 at least; the pieces always add
up to the time walked.

An op started no earlier for the op before it on its rank, a message, or a peer that its rank waited for. A peer that was late
because it waited in a message of its own passes the reason on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from msgspec import Struct

from pptrace.analysis.explain.step_times import UNKNOWN, StepTimes
from pptrace.analysis.whole_run import CriticalPath, PathOps
from pptrace.intervals import times_by_group
from pptrace.model.tables import Bool, Int64
from pptrace.schedule.actions import KINDS
from pptrace.schedule.plan_table import NONE
from pptrace.slices import group_sums


class Bindings(Struct, frozen=True, eq=False):
    """Last event that let each op (steps, rows) start.

    ``row`` is the op whose end it was: the one before it on its rank or, where ``is_message``, one of another rank: the
    sender of the message that came last, or what made a peer late for whom the rank waited. −1 where it is
    the first of its rank and needs nothing. ``ready`` is when that was over and, of a message, had arrived, never after the
    op's own start; ``moving`` how long, from then on, exposed transfers kept its rank from it: a receive that its rank was the
    last to post, or a send that blocked it; ns. ``held`` is how long, from ``ready`` on, its rank waited in a
    message for one that had run nothing in the step yet, whose first op is ``held_by`` (0 where it did not wait so).
    """

    row: Int64
    ready: Int64
    is_message: Bool
    moving: Int64
    held: Int64
    held_by: Int64


def bindings_of(times: StepTimes, exposed_before: Callable[[Int64], Int64] | None = None) -> Bindings:
    """The last of what each op needs: its rank, and the messages that it reads.

    ``exposed_before`` returns how much of the time from ``ready`` to each op's start transfers were exposed, ns; without it, as
    much as in the whole gap before the op, at most.
    """
    table = times.table
    row = times.before.copy()
    steps = np.arange(len(row))[:, np.newaxis]
    ready = np.where(row != NONE, times.end[steps, row], times.begin[:, np.newaxis])
    is_message = np.zeros(row.shape, dtype=np.bool_)
    entries = np.flatnonzero(table.dep_is_message & (table.dep >= 0))
    readers, senders = table.dep_reader[entries], table.dep[entries]
    nth = np.arange(len(entries)) - np.searchsorted(readers, readers)
    for number in range(int(nth.max(initial=-1)) + 1):
        of_number = nth == number
        reader, sender, message = readers[of_number], senders[of_number], table.dep_message[entries[of_number]]
        came = arrivals(times, sender, message)
        later = came > ready[:, reader]
        row[:, reader] = np.where(later, sender, row[:, reader])
        ready[:, reader] = np.where(later, came, ready[:, reader])
        is_message[:, reader] |= later
    op, busy_with = _ops_at_waits(times)
    cause, late_rank, late_ready, is_known = _causes_of_waits(times, busy_with)
    # ops whose rank had waited for a peer, with a message of whatever op, are bound to the op that made the peer late
    step, freed = times.waits["window"], times.waits["freed"]
    later = (op != NONE) & (cause != NONE)
    order = np.flatnonzero(later)[np.argsort(freed[later], kind="stable")]
    # As late as the message that an op reads is that message: its sender may have posted it long after having made it.
    since = ready[step[order], op[order]]
    order = order[(freed[order] > since) | ((freed[order] == since) & is_message[step[order], op[order]])]
    at = step[order], op[order]  # of several, the last one stands
    row[at], ready[at], is_message[at] = cause[order], freed[order], True
    ready = np.minimum(ready, times.start)
    moving = times.gap_exposed if exposed_before is None else exposed_before(ready)
    moving = np.minimum(moving, times.start - ready)
    # the part of the ``idle`` time before each op for which its rank waited for one that had run nothing yet; that one's first
    # op
    idle = times.start - ready - moving
    kept, held_by = np.zeros_like(idle), np.zeros_like(idle)
    late = np.flatnonzero((op != NONE) & (cause == NONE) & is_known)
    late = late[np.argsort(late_ready[late], kind="stable")]
    at = step[late], op[late]
    kept[at] = np.clip(late_ready[late] - ready[at], 0, idle[at])  # of several, the last one stands
    held_by[at] = times.table.rank_ptr[late_rank[late]]
    return Bindings(row, ready, is_message, moving, kept, held_by)


def arrivals(times: StepTimes, sender: Int64, message: Int64) -> Int64:
    """Arrivals of messages that their readers waited for, ns; for those that a reader found waiting, the end of the sending
    op, and for those that came before their reader asked for them, that and what messages of their link typically take.
    """
    sent, arrival = times.end[:, sender], times.arrival[:, message]
    is_waited_for = (arrival != UNKNOWN) & times.sender_is_last[:, message]
    came = np.where(is_waited_for, np.maximum(arrival, sent), sent)
    is_early = is_waited_for & times.is_early[:, message]
    if is_early.any():
        taken = np.where(is_waited_for & ~is_early, came - sent, times.transfer[:, message])
        usual = _usual_of_links(times, sender, message, taken, is_waited_for & ~is_early)
        came = np.where(is_early, np.minimum(came, sent + usual), came)
    return came


def _usual_of_links(times: StepTimes, sender: Int64, message: Int64, taken: Int64, is_known: Bool) -> Int64:
    """Typical time of messages between the two pipeline ranks of each message, ns, by those whose readers waited all of it.

    Where there is none, by what readers waited for: messages took as much or more.
    """
    table = times.table
    link = table.rank[sender] * np.int64(table.pp) + table.rank[table.messages[1][message]]
    usual = np.zeros(len(link), dtype=np.int64)
    for key in np.unique(link).tolist():
        of_link = link == key
        known = is_known[:, of_link]
        values = taken[:, of_link]
        usual[of_link] = np.median(values[known] if known.any() else values)
    return usual


def _ops_at_waits(times: StepTimes) -> tuple[Int64, Int64]:
    """(the op that the waiting rank ran after each wait, the one that its peer had ended last when it was ready); −1 for none."""
    waits, table = times.waits, times.table
    op = np.full(len(waits), NONE, dtype=np.int64)
    busy_with = op.copy()
    for rank in np.unique(np.concatenate((waits["rank"], waits["peer"]))).tolist():
        rows = np.arange(*table.rank_ptr[rank : rank + 2])
        if not len(rows):
            continue
        of_rank, of_peer = waits["rank"] == rank, waits["peer"] == rank
        after = _count(times.start[:, rows], waits["window"][of_rank], waits["freed"][of_rank])
        op[of_rank] = np.where(after < len(rows), rows[np.minimum(after, len(rows) - 1)], NONE)
        until = _count(times.end[:, rows], waits["window"][of_peer], waits["ready"][of_peer] + 1)
        busy_with[of_peer] = np.where(until > 0, rows[np.maximum(until - 1, 0)], NONE)
    return op, busy_with


def _causes_of_waits(times: StepTimes, busy_with: Int64) -> tuple[Int64, Int64, Int64, Bool]:
    """Causes of the waits: (what the rank that all waited for had ended last, −1 for nothing, that rank, when it was ready, ns,
    whether that is known). It is the peer or, where that had waited since it ended an op, what that wait was for; not known
    where clocks contradict each other, so that waits seem to wait for themselves.
    """
    names = ("window", "rank", "freed", "peer", "ready")
    window, rank, ended_at, peer, ready = (times.waits[name] for name in names)
    place = window * np.int64(times.table.pp)
    freed, until = times_by_group((place + rank, ended_at), (place + peer, ready))
    order = np.argsort(freed, kind="stable")
    index = np.searchsorted(freed[order], until, side="right") - 1
    before = order[np.maximum(index, 0)]
    ended = np.where(busy_with != NONE, times.end[window, np.maximum(busy_with, 0)], UNKNOWN)
    is_of_peer = (index >= 0) & (window[before] == window) & (rank[before] == peer)
    own = np.arange(len(before))
    next_wait = np.where(is_of_peer & (ended_at[before] > ended), before, own)
    first = next_wait
    for _ in range(len(first).bit_length()):
        first = first[first]
    is_root = next_wait[first] == first
    root = np.where(is_root, first, own)
    return busy_with[root], peer[root], ready[root], is_root


def _count(times: Int64, step: Int64, limit: Int64) -> Int64:
    """Count the times of each step (ascending in each row) that are before a limit."""
    all_keys, limits = times_by_group((np.arange(len(times))[:, np.newaxis], times), (step, limit))
    counts: Int64 = np.searchsorted(all_keys.ravel(), limits) - step * times.shape[1]
    return counts


class Hop(Struct, frozen=True, eq=False):
    """One hop of those walks that go on: ``walk`` numbers them.

    Each is at the op of ``cell`` (step × rows + row), which waited for that of ``source``; where it waited for none, not
    ``has_source``, that is the step's first cell. ``idle`` and ``transfer`` are the lengths of the pieces between them,
    ``work`` that of the source, which began at ``begin``; ns.
    """

    walk: Int64
    cell: Int64
    source: Int64
    has_source: Bool
    idle: Int64
    transfer: Int64
    work: Int64
    begin: Int64

    def __len__(self) -> int:
        return len(self.walk)


class Walks:
    """Walks back through some steps, hop by hop.

    A walk ends where its op waited for nothing. What is not idle there (the time before the window) is in no piece.
    """

    def __init__(self, times: StepTimes, bindings: Bindings) -> None:
        self._most_hops = len(times.table) + 1
        """No more ops than there are, whatever wrong clocks make of their order."""
        first = np.arange(len(times.start))[:, np.newaxis] * len(times.table)
        self._source = (np.maximum(bindings.row, 0) + first).reshape(-1)
        self._has_source = (bindings.row != NONE).reshape(-1)
        self._ready, self._is_message = bindings.ready.reshape(-1), bindings.is_message.reshape(-1)
        self._start, self._end, self._moving = (
            matrix.reshape(-1) for matrix in (times.start, times.end, bindings.moving)
        )

    def hops(self, hop: Hop, continues: Callable[[Hop], Bool] | None = None) -> Iterator[Hop]:
        """The first hop of some walks, and all behind it of those that waited for something and that ``continues`` marks."""
        for _ in range(self._most_hops):
            if not len(hop):
                return
            yield hop
            on = np.flatnonzero(hop.has_source if continues is None else hop.has_source & continues(hop))
            hop = self._hop(hop.walk[on], hop.source[on], hop.begin[on])

    def first(self, cell: Int64, cursor: Int64) -> Hop:
        """The first hop of walks from the ops of some cells, at the times ``cursor``."""
        return self._hop(np.arange(len(cell)), cell, cursor)

    def _hop(self, walk: Int64, cell: Int64, cursor: Int64) -> Hop:
        source, has_source = self._source.take(cell), self._has_source.take(cell)
        begun, is_message = np.minimum(cursor, self._ready.take(cell)), self._is_message.take(cell)
        ended = np.where(has_source, self._end.take(source), begun)
        sent = np.where(is_message, np.minimum(begun, ended), begun)
        begin = np.where(has_source, np.minimum(sent, self._start.take(source)), sent)
        moving = np.where(is_message, 0, np.minimum(self._moving.take(cell), cursor - begun))
        idle, transfer = cursor - begun - moving, begun - sent + moving
        return Hop(walk, cell, source, has_source, idle, transfer, sent - begin, begin)


def critical_paths(
    times: StepTimes, bindings: Bindings, windows: Int64, host_before: Int64
) -> tuple[list[CriticalPath], Int64]:
    """The critical path of each of some windows, and how much of it lies in each op, shape (windows, rows).

    ``host_before`` (steps, rows) is what of the idle time before each op is the host's; with the host's part of ops it is the
    path's ``host``.
    The parts of a path sum to the span. A transfer counts for the stage that sent it, an idle time for that of the op after it.
    """
    table = times.table
    last = times.end[windows].argmax(axis=1)
    work, transfer, idle, host = (np.zeros((len(windows), len(table)), dtype=np.int64) for _ in range(4))
    start = times.start[windows, last]
    work[np.arange(len(windows)), last] = times.end[windows, last] - start
    walks = Walks(times, bindings)
    for hop in walks.hops(walks.first(windows * len(table) + last, start)):
        number, row, source = hop.walk, hop.cell % len(table), hop.source % len(table)
        of_host = np.minimum(host_before.reshape(-1)[hop.cell], hop.idle)
        idle[number, row] += hop.idle - of_host
        host[number, row] += of_host
        transfer[number, source] += hop.transfer
        work[number, source] += hop.work
    inside = np.minimum(times.host[windows], work)
    work, host = work - inside, host + inside
    codes = np.unique(table.kind).tolist()
    parts = {KINDS[code].value: work[:, table.kind == code].sum(axis=1) for code in codes}
    parts |= {"transfer": transfer.sum(axis=1), "idle": idle.sum(axis=1)}
    if times.knows_host[windows].any() or host.any():
        parts["host"] = host.sum(axis=1)
    by_stage = group_sums(work + transfer + idle + host, table.stage, table.num_stages).tolist()
    stage_and_kind, of_row = np.unique(table.stage * np.int64(len(KINDS)) + table.kind, return_inverse=True)
    ops = [(number // len(KINDS), KINDS[number % len(KINDS)].value) for number in stage_and_kind.tolist()]
    of_ops = group_sums(work, of_row.ravel(), len(ops)).tolist()
    spans = (times.finish - times.begin)[windows].tolist()
    return [
        CriticalPath(
            span,
            {name: int(ns[index]) for name, ns in parts.items()},
            dict(enumerate(by_stage[index])),
            tuple(PathOps(*op, ns) for op, ns in zip(ops, of_ops[index], strict=True) if ns),
        )
        for index, span in enumerate(spans)
    ], work + inside
