"""Blame: every nanosecond of bubble is charged to the op that caused it.

The bubble before an op is walked back along what the op waited for, over all ranks, until the walk returns to the op's own
rank. What of it the plan would not have, if everything took what is usual (the median of its kind and stage), is charged to
what took longer than usual, the nearest first; the rest goes to what the walk passed while the bubble lasted: the ops that
others were still computing, the transfers, and the time in which an op could have run and did not (of ranks that waited in a
message for one that had run nothing yet, the time before that one's first op). The bubble after a rank's last op is that of the
step's last op. Bubble inside an op is the op's, but for what it waits in collectives: that, and the part of an op's charges that
it makes up, goes to the member that came last (:mod:`pptrace.analysis.explain.inner_waits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.explain.critical_path import Bindings, Hop, Walks
from pptrace.analysis.explain.inner_waits import InnerWaits
from pptrace.analysis.explain.step_times import StepTimes
from pptrace.model.tables import Bool, Int64
from pptrace.schedule.message_graph import Graph
from pptrace.schedule.replay_table import replay_table
from pptrace.slices import group_medians


class Typical(Struct, frozen=True, eq=False):
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


def typical_of(times: StepTimes, bindings: Bindings, waits: InnerWaits, graph: Graph | None = None) -> Typical:
    """Find the usual durations of ops, messages and pauses of a kind and stage in each step.

    ``graph`` is that of the way in which messages hold up ranks, None where they cost their readers time alone.
    """
    table = times.table
    keys, group = np.unique(table.stage.astype(np.int64) * 256 + table.kind, return_inverse=True)
    sent = np.take_along_axis(times.end, np.maximum(bindings.row, 0), axis=1)
    transfer = np.where(bindings.is_message, np.maximum(bindings.ready - sent, 0), 0)
    held = waits.sums(times.start.shape)
    parts = (times.durations - held, held, transfer, times.start - bindings.ready)
    work, waiting, reading, idle = (group_medians(part, group, len(keys))[:, group] for part in parts)
    of_work = work + waiting
    messages = reading[:, table.messages[1]]
    end: Int64 = replay_table(table, of_work, messages).end if graph is None else graph.ends(of_work, messages)
    before = np.where(table.position > 0, np.roll(end, 1, axis=1), 0)
    last = table.rank_ptr[1:] - 1
    return Typical(
        work, waiting, reading, idle, *(end - of_work - before, end.max(axis=1, keepdims=True) - end[:, last])
    )


class _Bubbles(Struct, frozen=True, eq=False):
    """Bubbles, each before an op or at a rank's end (``is_tail``); ``cell`` (step × rows + row) is the op that was waited for
    or with, ``of_plan`` what of the bubble the plan would have anyway.
    """

    cell: Int64
    rank: Int64
    length: Int64
    exposed: Int64
    of_plan: Int64
    is_tail: Bool


def _bubbles_of(times: StepTimes, typical: Typical) -> _Bubbles:
    """All bubbles between ops and after the last one."""
    rows, pp = len(times.table), times.table.pp
    gaps, tails = np.flatnonzero(times.gap_bubble), np.flatnonzero(times.tail_bubble)
    last = times.end.argmax(axis=1) + np.arange(len(times.end)) * rows
    length = np.concatenate((times.gap_bubble.take(gaps), times.tail_bubble.take(tails)))
    return _Bubbles(
        np.concatenate((gaps, last[tails // pp])),
        np.concatenate((times.table.rank[gaps % rows], tails % pp)),
        length,
        np.concatenate((times.gap_exposed.take(gaps), np.zeros(len(tails), dtype=np.int64))),
        np.minimum(length, np.concatenate((typical.gap.take(gaps), typical.tail.take(tails)))),
        np.repeat([False, True], [len(gaps), len(tails)]),
    )


_Piece = tuple[Int64, str, Int64, Int64, Int64]
"""A piece of some walks: (walk, the matrix that it is charged to, cell, length, what of it is unusual)."""


def charge_bubbles(times: StepTimes, bindings: Bindings, typical: Typical, waits: InnerWaits) -> dict[str, Int64]:
    """Charge all bubble of some steps; the sum of the charges of a step is the sum of its ranks' bubbles.

    Returns:
        ns, shape (steps, rows): charged to ops (``work``), to what they sent (``transfer``), to the idle time before them
        (``idle``) and to waiting inside them (``wait``).
    """
    held = waits.sums(times.start.shape)
    charges = {name: np.zeros_like(times.start) for name in ("work", "transfer", "idle")} | {"held": held.copy()}
    bubbles = _bubbles_of(times, typical)
    walks = _BubbleWalks(bindings, times, typical, held, bubbles)
    beyond = bubbles.length - bubbles.of_plan
    """Part that exceeds the plan's bubble; then the part of it that no excess explains."""
    for walk, *_, excess in walks.pieces(lambda walk: beyond[walk] > 0):
        beyond[walk] -= np.minimum(excess, beyond[walk])
    usual = bubbles.of_plan + beyond
    unusual = bubbles.length - usual
    """Part that is still to be charged to excesses; ``usual`` to the rest."""

    for walk, to, cell, length, excess in walks.pieces(lambda walk: usual[walk] + unusual[walk] > 0):
        first = np.minimum(excess, unusual[walk])
        unusual[walk] -= first
        then = np.minimum(length - first, usual[walk])
        usual[walk] -= then
        _add(charges[to], cell, first + then)
    _add(charges["idle"], bubbles.cell, usual + unusual)
    _charge_late_members(charges, walks.walks, times, waits, held)
    return {**{name: charges[name] for name in ("work", "transfer", "idle")}, "wait": times.inner_bubble - held}


def _charge_late_members(
    charges: Mapping[str, Int64], walks: Walks, times: StepTimes, waits: InnerWaits, held: Int64
) -> None:
    """Hand on what is charged to waits inside ops (``held``): to the late op as far as it computed longer, the rest to what it
    passed walking back from its start.
    """
    if not len(waits.ns):
        return
    cell = waits.late_step * times.start.shape[1] + waits.late_row
    # the parts of each wait in what is charged to its op's waits: ``charged`` has, for each wait, all of its op
    charged = charges["held"][waits.step, waits.row]
    order = np.lexsort((waits.row, waits.step))
    op = waits.step[order] * held.shape[1] + waits.row[order]
    first = np.searchsorted(op, op)
    before = np.cumsum(waits.ns[order]) - waits.ns[order]
    before -= before[first]
    total = held[waits.step[order], waits.row[order]]
    amount = np.empty_like(charged)
    amount[order] = part_of(charged[order], before + waits.ns[order], total) - part_of(charged[order], before, total)
    given, passed = part_of(amount, waits.longer, waits.ns), waits.longer.copy()
    _add(charges["work"], cell, given)
    late = np.flatnonzero(waits.ns > waits.longer)
    first_hop = walks.first(cell[late], times.start.take(cell[late]))
    for hop in walks.hops(first_hop, lambda hop: passed[late[hop.walk]] < waits.ns[late[hop.walk]]):
        wait = late[hop.walk]
        for to, at, length in (
            ("idle", hop.cell, hop.idle),
            ("transfer", hop.source, hop.transfer),
            ("work", hop.source, hop.work),
        ):
            passed[wait] = np.minimum(passed[wait] + length, waits.ns[wait])
            part = part_of(amount[wait], passed[wait], waits.ns[wait]) - given[wait]
            given[wait] += part
            _add(charges[to], at, part)
    _add(charges["idle"], cell, amount - given)


def part_of(amount: Int64, part: Int64, whole: Int64) -> Int64:
    """``amount · part / whole``, rounded down: never less for a larger part, and all of it for the whole."""
    divisor = np.maximum(whole, 1)
    part = np.minimum(part, divisor)
    near = np.floor(amount * (part / divisor)).astype(np.int64)
    near += (amount * part - near * divisor) // divisor  # both products may wrap around, their difference is small
    return np.where(part >= whole, amount, near)


def _add(matrix: Int64, cell: Int64, ns: Int64) -> None:
    """Add to cells, of which some may be named several times."""
    np.add.at(matrix.reshape(-1), cell, ns)


class _BubbleWalks:
    """The walks back from all bubbles; their first hop, which is more than half of the work, is made once."""

    def __init__(self, bindings: Bindings, times: StepTimes, typical: Typical, held: Int64, bubbles: _Bubbles) -> None:
        walks = Walks(times, bindings)
        self.walks, self._rank, self._held = walks, bubbles.rank, held.reshape(-1)
        self._for_starts, self._started_by = bindings.held.reshape(-1), bindings.held_by.reshape(-1)
        self._waits_for_starts = bool(self._for_starts.any())
        self._has_held = bool(self._held.any())
        self._num_rows, self._rank_of_cell = len(times.table), np.tile(times.table.rank, len(times.start))
        self._typical = {name: getattr(typical, name).reshape(-1) for name in ("work", "held", "transfer", "idle")}
        self._first = self.walks.first(bubbles.cell, times.start.take(bubbles.cell))
        tails = np.flatnonzero(bubbles.is_tail)
        ends = bubbles.cell[tails]
        of_ends = self._pieces_of_ops(tails, ends, times.durations.take(ends))
        # What of the first idle time and transfer is exposed communication is no bubble.
        transfer = np.maximum(self._first.transfer - bubbles.exposed, 0)
        rest = np.maximum(bubbles.exposed - self._first.transfer, 0)
        hop = replace(self._first, idle=np.maximum(self._first.idle - rest, 0), transfer=transfer)
        self._first_continues = self._continues(hop)
        self._first_pieces = (*of_ends, *self._pieces_of(hop, self._first_continues))

    def pieces(self, is_open: Callable[[Int64], Bool]) -> Iterator[_Piece]:
        """The pieces of the walks, until ``is_open`` of a walk is false or it is back on its own rank."""
        yield from self._first_pieces
        continues = self._first_continues
        hops = self.walks.hops(self._first, lambda hop: continues & is_open(hop.walk))
        next(hops, None)
        for hop in hops:
            continues = self._continues(hop)
            yield from self._pieces_of(hop, continues)

    def _continues(self, hop: Hop) -> Bool:
        continues: Bool = hop.has_source & (self._rank_of_cell.take(hop.source) != self._rank[hop.walk])
        return continues

    def _pieces_of(self, hop: Hop, continues: Bool) -> tuple[_Piece, ...]:
        on = np.flatnonzero(continues)
        return (
            *self._pieces_of_idle(hop),
            self._piece(hop.walk, "transfer", hop.source, hop.transfer, hop.cell),
            *self._pieces_of_ops(hop.walk[on], hop.source[on], hop.work[on]),
        )

    def _pieces_of_idle(self, hop: Hop) -> tuple[_Piece, ...]:
        """Idle time, in what ranks waited in messages for one that began late, which is that one's, and the rest."""
        if not self._waits_for_starts:
            return (self._piece(hop.walk, "idle", hop.cell, hop.idle, hop.cell),)
        waiting = np.minimum(self._for_starts.take(hop.cell), hop.idle)
        late = hop.cell - hop.cell % self._num_rows + self._started_by.take(hop.cell)
        waits = self._piece(hop.walk, "idle", late, waiting, late)
        return (waits, self._piece(hop.walk, "idle", hop.cell, hop.idle - waiting, hop.cell))

    def _pieces_of_ops(self, walk: Int64, cell: Int64, length: Int64) -> tuple[_Piece, ...]:
        """Ops, in what they waited for in collectives and the rest."""
        if not self._has_held:
            return (self._piece(walk, "work", cell, length, cell),)
        waiting = np.minimum(self._held.take(cell), length)
        waits = self._piece(walk, "held", cell, waiting, cell)
        return (waits, self._piece(walk, "work", cell, length - waiting, cell))

    def _piece(self, walk: Int64, to: str, cell: Int64, length: Int64, usual_of: Int64) -> _Piece:
        return walk, to, cell, length, np.maximum(length - self._typical[to].take(usual_of), 0)
