"""Blame: every nanosecond of bubble is charged to the op that caused it.

The bubble before an op is walked back along what the op waited for, over all ranks, until the walk returns to the op's own
rank. What of it the plan would not have, if everything took what is usual (the median of its kind and stage), is charged to
what took longer than usual, the nearest first; the rest goes to what the walk passed while the bubble lasted: the ops that
others were still computing, the transfers, and the time in which an op could have run and did not. The bubble after a rank's
last op is that of the step's last op. Bubble inside an op is the op's, but for what it waits in collectives: that, and the part
of an op's charges that it makes up, goes to the member that came last (:mod:`pptrace.analysis.explain.inner_waits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pptrace.analysis.explain.binding import Bindings
from pptrace.analysis.explain.inner_waits import InnerWaits, no_inner_waits
from pptrace.analysis.explain.step_times import Bool, StepTimes
from pptrace.analysis.explain.walk import walk_back
from pptrace.model.tables import Int64
from pptrace.schedule.plan_table import NONE, PlanTable
from pptrace.schedule.replay_table import replay_table
from pptrace.slices import group_medians


@dataclass(frozen=True, slots=True, eq=False)
class Charges:
    """Bubble charged, ns, shape (steps, rows): to ops (``work``), to what they sent (``transfer``), to the idle time before
    them (``idle``) and to waiting inside them (``inner``).
    """

    work: Int64
    transfer: Int64
    idle: Int64
    inner: Int64

    @property
    def total(self) -> Int64:
        return self.work + self.transfer + self.idle + self.inner


@dataclass(frozen=True, slots=True, eq=False)
class Typical:
    """Usual durations in each step, ns, shape (steps, rows): the median of all ops of the row's kind and stage.

    ``work`` is without what ops wait for in collectives, ``held`` that. ``gap`` (steps, rows) and ``tail`` (steps, pp) are the
    bubbles that the plan has where everything takes what is usual.
    """

    work: Int64
    held: Int64
    transfer: Int64
    idle: Int64
    gap: Int64
    tail: Int64


def typical_of(times: StepTimes, bindings: Bindings, waits: InnerWaits | None = None) -> Typical:
    """Find the usual durations of ops, messages and pauses of a kind and stage in each step."""
    table = times.table
    keys, group = np.unique(table.stage.astype(np.int64) * 256 + table.kind, return_inverse=True)
    sent = np.take_along_axis(times.end, np.maximum(bindings.row, 0), axis=1)
    transfer = np.where(bindings.is_message, np.maximum(bindings.ready - sent, 0), 0)
    held = (waits or no_inner_waits()).sums(times.start.shape)
    parts = (times.durations - held, held, transfer, times.start - bindings.ready)
    work, waiting, reading, idle = (group_medians(part, group, len(keys))[:, group] for part in parts)
    return Typical(work, waiting, reading, idle, *_bubbles_of_plan(table, work + waiting, reading))


def _bubbles_of_plan(table: PlanTable, work: Int64, reading: Int64) -> tuple[Int64, Int64]:
    """(the gap before each row, the tail of each rank): ops take ``work``, messages that a row reads ``reading``."""
    entries = np.flatnonzero(table.dep_is_message)
    replay = replay_table(table, work, reading[:, table.dep_reader[entries]])
    before = np.where(table.position > 0, np.roll(replay.end, 1, axis=1), 0)
    last = table.rank_ptr[1:] - 1
    return replay.start - before, replay.end.max(axis=1, keepdims=True) - replay.end[:, last]


@dataclass(frozen=True, slots=True, eq=False)
class _Bubbles:
    """Bubbles, each before an op or at a rank's end (``is_tail``); ``row`` is the op that was waited for or with."""

    step: Int64
    row: Int64
    rank: Int64
    length: Int64
    exposed: Int64
    is_tail: Bool


def _bubbles_of(times: StepTimes) -> _Bubbles:
    """All bubbles between ops and after the last one."""
    table = times.table
    step, row = np.nonzero(times.gap_bubble)
    tail_step, tail_rank = np.nonzero(times.tail_bubble)
    last = times.end.argmax(axis=1)
    return _Bubbles(
        np.concatenate((step, tail_step)),
        np.concatenate((row, last[tail_step])),
        np.concatenate((table.rank[row], tail_rank)),
        np.concatenate((times.gap_bubble[step, row], times.tail_bubble[tail_step, tail_rank])),
        np.concatenate((times.gap_exposed[step, row], np.zeros(len(tail_step), dtype=np.int64))),
        np.repeat([False, True], [len(step), len(tail_step)]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A piece of some walks: ``to`` is the matrix that it is charged to, ``excess`` what of it is unusual."""

    walk: Int64
    to: str
    step: Int64
    row: Int64
    length: Int64
    excess: Int64


def charge_bubbles(times: StepTimes, bindings: Bindings, typical: Typical, waits: InnerWaits | None = None) -> Charges:
    """Charge all bubble of some steps; the sum of the charges of a step is the sum of its ranks' bubbles."""
    waits = waits or no_inner_waits()
    held = waits.sums(times.start.shape)
    work, transfer, idle = (np.zeros_like(times.start) for _ in range(3))
    charges = _Open(work, transfer, idle, times.inner_bubble - held, held.copy())
    bubbles = _bubbles_of(times)
    of_plan = np.where(
        bubbles.is_tail, typical.tail[bubbles.step, bubbles.rank], typical.gap[bubbles.step, bubbles.row]
    )
    beyond = bubbles.length - np.minimum(bubbles.length, of_plan)
    """Part that exceeds the plan's bubble; then the part of it that no excess explains."""
    for piece in _pieces(times, bindings, typical, bubbles, held, lambda walk: beyond[walk] > 0):
        beyond[piece.walk] -= np.minimum(piece.excess, beyond[piece.walk])
    usual = np.minimum(bubbles.length, of_plan) + beyond
    unusual = bubbles.length - usual
    """Part that is still to be charged to excesses; ``usual`` to the rest."""

    def is_open(walk: Int64) -> Bool:
        is_left: Bool = usual[walk] + unusual[walk] > 0
        return is_left

    for piece in _pieces(times, bindings, typical, bubbles, held, is_open):
        first = np.minimum(piece.excess, unusual[piece.walk])
        unusual[piece.walk] -= first
        then = np.minimum(piece.length - first, usual[piece.walk])
        usual[piece.walk] -= then
        _add(getattr(charges, piece.to), piece.step, piece.row, first + then)
    _add(charges.idle, bubbles.step, bubbles.row, usual + unusual)
    _charge_late_members(charges, times, bindings, waits, held)
    return Charges(charges.work, charges.transfer, charges.idle, charges.inner)


@dataclass(frozen=True, slots=True, eq=False)
class _Open(Charges):
    """Charges of which ``held`` is what ops waited for in collectives: it goes to the members that came last."""

    held: Int64


def _charge_late_members(charges: _Open, times: StepTimes, bindings: Bindings, waits: InnerWaits, held: Int64) -> None:
    """Hand on what is charged to waits inside ops: to the late op as far as it computed longer, the rest to what it passed
    walking back from its start.
    """
    if not len(waits.ns):
        return
    amount = _in_parts(charges.held[waits.step, waits.row], waits, held)
    rest = waits.ns - waits.longer
    given = _part_of(amount, waits.longer, waits.ns)
    _add(charges.work, waits.late_step, waits.late_row, given)
    passed, cursor = waits.longer.copy(), times.start[waits.late_step, waits.late_row]
    late = np.flatnonzero(rest > 0)
    walks = walk_back(times, bindings, waits.late_step[late], waits.late_row[late], cursor[late])
    hop = next(walks, None)
    while hop is not None:
        wait, source = late[hop.walk], np.maximum(hop.source, 0)
        pieces = (("idle", hop.row, hop.idle), ("transfer", source, hop.transfer), ("work", source, hop.work))
        for to, row, length in pieces:
            passed[wait] = np.minimum(passed[wait] + length, waits.ns[wait])
            part = _part_of(amount[wait], passed[wait], waits.ns[wait]) - given[wait]
            given[wait] += part
            _add(getattr(charges, to), hop.step, row, part)
        try:
            hop = walks.send((hop.source != NONE) & (passed[wait] < waits.ns[wait]))
        except StopIteration:
            break
    _add(charges.idle, waits.late_step, waits.late_row, amount - given)


def _in_parts(charged: Int64, waits: InnerWaits, held: Int64) -> Int64:
    """The parts of each wait in what is charged to its op's waits: ``charged`` has, for each wait, all of its op."""
    order = np.lexsort((waits.row, waits.step))
    op = waits.step[order] * held.shape[1] + waits.row[order]
    first = np.searchsorted(op, op)
    before = np.cumsum(waits.ns[order]) - waits.ns[order]
    before -= before[first]
    total = held[waits.step[order], waits.row[order]]
    parts = np.empty_like(charged)
    parts[order] = _part_of(charged[order], before + waits.ns[order], total) - _part_of(charged[order], before, total)
    return parts


def _part_of(amount: Int64, part: Int64, whole: Int64) -> Int64:
    """``amount · part / whole``, rounded down: never less for a larger part, and all of it for the whole."""
    parts: Int64 = np.where(part >= whole, amount, np.floor(amount * (part / whole)).astype(np.int64))
    return np.minimum(parts, amount)


def _add(matrix: Int64, step: Int64, row: Int64, ns: Int64) -> None:
    """Add to cells, of which some may be named several times."""
    np.add.at(matrix.reshape(-1), step * matrix.shape[1] + row, ns)


def _pieces(
    times: StepTimes,
    bindings: Bindings,
    typical: Typical,
    bubbles: _Bubbles,
    held: Int64,
    is_open: Callable[[Int64], Bool],
) -> Iterator[_Piece]:
    """The pieces of the walks back from all bubbles, until ``is_open`` of a walk is false or it is back on its own rank."""
    table = times.table
    tails = np.flatnonzero(bubbles.is_tail)
    if len(tails):
        step, row = bubbles.step[tails], bubbles.row[tails]
        yield from _op_pieces(tails, step, row, times.durations[step, row], typical, held)
    cursor = times.start[bubbles.step, bubbles.row]
    walks = walk_back(times, bindings, bubbles.step, bubbles.row, cursor)
    exposed = bubbles.exposed
    hop, number = next(walks, None), 0
    while hop is not None:
        walk, source = hop.walk, np.maximum(hop.source, 0)
        idle, transfer = hop.idle, hop.transfer
        if number == 0:  # what of it is exposed communication is no bubble
            transfer, rest = np.maximum(transfer - exposed, 0), np.maximum(exposed - transfer, 0)
            idle = np.maximum(idle - rest, 0)
        yield _piece(walk, "idle", hop.step, hop.row, idle, typical.idle[hop.step, hop.row])
        yield _piece(walk, "transfer", hop.step, source, transfer, typical.transfer[hop.step, hop.row])
        continues = (hop.source != NONE) & (table.rank[source] != bubbles.rank[walk])
        on = continues if continues.all() else np.flatnonzero(continues)
        yield from _op_pieces(walk[on], hop.step[on], source[on], hop.work[on], typical, held)
        try:
            hop, number = walks.send(continues & is_open(walk)), number + 1
        except StopIteration:
            return


def _op_pieces(walk: Int64, step: Int64, row: Int64, length: Int64, typical: Typical, held: Int64) -> Iterator[_Piece]:
    """An op, in what it waited for in collectives and the rest."""
    waiting = np.minimum(held[step, row], length)
    if waiting.any():
        yield _piece(walk, "held", step, row, waiting, typical.held[step, row])
    yield _piece(walk, "work", step, row, length - waiting, typical.work[step, row])


def _piece(walk: Int64, to: str, step: Int64, row: Int64, length: Int64, usual: Int64) -> _Piece:
    """A piece of the given lengths, of which ``usual`` is none of its excess."""
    return _Piece(walk, to, step, row, length, np.maximum(length - usual, 0))
