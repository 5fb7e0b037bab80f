"""Explanations of steps once more: op by op and hop by hop, in plain numbers, on random times that no plan explains."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.explain.blame import Typical
from pptrace.analysis.explain.causes import CauseCosts, costs_of_causes
from pptrace.analysis.explain.critical_path import Bindings
from pptrace.analysis.explain.inner_waits import InnerWaits
from pptrace.analysis.explain.rank_messages import NEVER
from pptrace.analysis.explain.step_times import UNKNOWN, StepTimes
from pptrace.model.tables import Int64
from pptrace.schedule.plan_table import NONE, PlanTable
from pptrace.schedule.registry import build
from pptrace.slices import Slice
from pptrace.timeline.lanes import INNER_AXES
from pptrace.timeline.windows import StepWindow
from tests.support.measured import measured_costs

PLANS = (
    ("gpipe", 1, 3),
    ("1f1b", 3, 3),
    ("zb-h1", 2, 4),
    ("interleaved-1f1b", 2, 4),
    ("zbv", 2, 4),
    ("dualpipe", 2, 4),
)
WINDOWS = 3


def random_times(rng: random.Random) -> StepTimes:
    """Times of some steps: ranks run their ops in order, whatever these need, after any gaps; messages arrive whenever."""
    table = build(*rng.choice(PLANS)).table
    shape, messages = (WINDOWS, len(table)), (WINDOWS, table.num_messages)

    def some(most: int, size: tuple[int, int] = shape) -> Int64:
        return np.array([[rng.choice((0, rng.randint(0, most))) for _ in range(size[1])] for _ in range(size[0])])

    gap, length = some(30), some(40)
    start, end = np.zeros_like(gap), np.zeros_like(gap)
    begin = [rng.randint(-50, 50) + pace * step for pace in (rng.choice((400, -400)),) for step in range(WINDOWS)]
    before = np.where(table.position > 0, np.arange(len(table)) - 1, NONE)
    for step in range(WINDOWS):
        for row in range(len(table)):
            idle_since = end[step, row - 1] if before[row] != NONE else begin[step]
            start[step, row] = idle_since + gap[step, row]
            end[step, row] = start[step, row] + length[step, row]
    finish = end.max(axis=1) + rng.choice((0, 5))
    sent = np.zeros(messages, dtype=np.int64)
    of_messages = np.flatnonzero(table.dep_is_message)
    sent[:, table.dep_message[of_messages]] = end[:, table.dep[of_messages]]
    arrival = np.where(some(3, messages) == 1, UNKNOWN, sent + some(40, messages) - 5)
    exposed = np.minimum(some(30), gap)
    host = np.minimum(some(10), length)
    inner = np.minimum(some(10), length - host)
    waits = [
        (rng.randrange(WINDOWS), rng.randrange(table.pp), rng.randrange(table.pp), rng.randint(0, 40))
        for _ in range(rng.randint(0, 12))
    ]
    step, rank, peer, later = (
        (np.array(column, dtype=np.int64) for column in zip(*waits, strict=True))
        if waits
        else (np.empty((4, 0), dtype=np.int64))
    )
    freed = np.array([rng.randint(begin[at], int(finish[at]) + 5) for at in step], dtype=np.int64)
    return StepTimes(
        table=table,
        windows=tuple(
            StepWindow(at, tuple(range(10 * at, 10 * at + table.pp)), begin[at], int(finish[at]))
            for at in range(WINDOWS)
        ),
        start=start,
        end=end,
        communication=inner,
        host=host,
        stalled=np.zeros_like(start),
        before=np.broadcast_to(before, shape).astype(np.int64),
        gap_bubble=gap - exposed,
        gap_exposed=exposed,
        inner_bubble=inner + some(5),
        moved_with=np.zeros_like(start),
        collected=np.zeros_like(start),
        exposed=np.zeros((*start.shape, len(INNER_AXES)), dtype=np.int64),
        tail_bubble=finish[:, np.newaxis] - end[:, table.rank_ptr[1:] - 1],
        arrival=arrival,
        sent=np.where(some(3, messages) == 1, NEVER, sent + some(40, messages) - 5),
        received=np.where(arrival == UNKNOWN, UNKNOWN, sent + some(60, messages)),
        transfer=some(20, messages),
        recorded=some(20, messages),
        sender_is_last=some(2, messages) < 2,
        is_early=some(rng.choice((2, 40)), messages) > rng.choice((0, -1)),
        is_whole=np.ones(WINDOWS, dtype=np.bool_),
        on_device=np.array([rng.random() < 0.7 for _ in range(WINDOWS)]),
        knows_host=np.array([rng.random() < 0.7 for _ in range(WINDOWS)]),
        waits=Slice({"window": step, "rank": rank, "freed": freed, "peer": peer, "ready": freed - later}),
    )


def random_waits(rng: random.Random, times: StepTimes) -> InnerWaits:
    """Waits in collectives, of one or two for each late op; ops wait for no longer than they take."""
    left = times.durations.copy()
    rows = []
    for match in range(rng.randint(0, 8)):
        late = rng.randrange(WINDOWS), rng.randrange(len(times.table))
        for _ in range(rng.randint(1, 2)):
            op = rng.randrange(WINDOWS), rng.randrange(len(times.table))
            ns = rng.randint(0, int(left[op]))
            left[op] -= ns
            if ns:
                rows.append((*op, ns, *late, rng.choice((0, ns, rng.randint(0, ns))), match))
    return InnerWaits(*np.array(rows, dtype=np.int64).reshape(-1, 7).T)


class Bound(NamedTuple):
    """Last event that an op waited for."""

    row: int
    ready: int
    is_message: bool
    moving: int


def bound_ops(times: StepTimes) -> dict[tuple[int, int], Bound]:
    """By step and row."""
    table = times.table
    found = {}
    nth_messages = [
        [
            entry
            for entry in range(*table.dep_ptr[row : row + 2])
            if table.dep_is_message[entry] and table.dep[entry] >= 0
        ]
        for row in range(len(table))
    ]
    usual = _usual_of_links(times, nth_messages)
    for step, row in np.ndindex(times.start.shape):
        last = int(times.before[step, row])
        ready, is_message = int(times.end[step, last]) if last != NONE else times.windows[step].start_ns, False
        for nth, entry in enumerate(nth_messages[row]):
            came = _arrival(times, step, entry, usual[nth, _link(times, entry)])
            if came > ready:
                last, ready, is_message = int(table.dep[entry]), came, True
        found[step, row] = Bound(last, ready, is_message, 0)
    found |= _late_peers(times, found)
    for (step, row), bound in found.items():
        start = int(times.start[step, row])
        ready = min(bound.ready, start)
        found[step, row] = bound._replace(ready=ready, moving=min(int(times.gap_exposed[step, row]), start - ready))
    return found


def _link(times: StepTimes, entry: int) -> tuple[int, int]:
    table = times.table
    return int(table.rank[table.dep[entry]]), int(table.rank[table.dep_reader[entry]])


def _taken(times: StepTimes, step: int, entry: int) -> tuple[int, bool]:
    """(time that a message took, whether that is all of it)."""
    message, sent = times.table.dep_message[entry], int(times.end[step, times.table.dep[entry]])
    arrival = int(times.arrival[step, message])
    if arrival != UNKNOWN and times.sender_is_last[step, message] and not times.is_early[step, message]:
        return max(arrival - sent, 0), True
    return int(times.transfer[step, message]), False


def _usual_of_links(times: StepTimes, nth_messages: list[list[int]]) -> dict[tuple[int, tuple[int, int]], int]:
    """The median of each link's messages, those that are the first of their readers apart from those that are the second."""
    taken: dict[tuple[int, tuple[int, int]], list[tuple[int, bool]]] = {}
    for entries in nth_messages:
        for nth, entry in enumerate(entries):
            taken.setdefault((nth, _link(times, entry)), []).extend(
                _taken(times, step, entry) for step in range(WINDOWS)
            )
    return {
        key: int(median([ns for ns, is_all in of_link if is_all] or [ns for ns, _ in of_link]))
        for key, of_link in taken.items()
    }


def _arrival(times: StepTimes, step: int, entry: int, usual: int) -> int:
    message, sent = times.table.dep_message[entry], int(times.end[step, times.table.dep[entry]])
    arrival = int(times.arrival[step, message])
    if arrival == UNKNOWN or not times.sender_is_last[step, message]:
        return sent
    came = max(arrival, sent)
    return min(came, sent + usual) if times.is_early[step, message] else came


def _late_peers(times: StepTimes, found: dict[tuple[int, int], Bound]) -> dict[tuple[int, int], Bound]:
    """The ops whose ranks waited for a peer as long as for what they read, or longer than for anything that they need."""
    table, waits = times.table, times.waits
    bound = {}
    for index in np.argsort(waits["freed"], kind="stable").tolist():
        step, freed = int(waits["window"][index]), int(waits["freed"][index])
        own = range(*table.rank_ptr[waits["rank"][index] : waits["rank"][index] + 2])
        after = [row for row in own if times.start[step, row] >= freed]
        root = _root(times, index)
        if not after or root == NONE:
            continue
        plain = found[step, after[0]]
        if freed > plain.ready or (freed == plain.ready and plain.is_message):
            bound[step, after[0]] = Bound(root, freed, True, 0)
    return bound


def held_by_starts(times: StepTimes, bound: dict[tuple[int, int], Bound]) -> dict[tuple[int, int], tuple[int, int]]:
    """Time for which an op's rank waited for one that had run nothing yet, and that one's first op; of the ops that did."""
    table, waits = times.table, times.waits
    held: dict[tuple[int, int], tuple[int, int]] = {}
    roots = [_root_wait(times, index) for index in range(len(waits))]
    known = [index for index, root in enumerate(roots) if root is not None and _busy_with(times, root) == NONE]
    for index in sorted(known, key=lambda index: int(waits["ready"][roots[index] or 0])):
        step, root = int(waits["window"][index]), roots[index] or 0
        own = range(*table.rank_ptr[waits["rank"][index] : waits["rank"][index] + 2])
        after = [row for row in own if times.start[step, row] >= waits["freed"][index]]
        if after:
            op = bound[step, after[0]]
            idle = int(times.start[step, after[0]]) - op.ready - op.moving
            ns = min(max(int(waits["ready"][root]) - op.ready, 0), idle)
            held[step, after[0]] = ns, int(table.rank_ptr[waits["peer"][root]])
    return held


def _root(times: StepTimes, index: int) -> int:
    """The op behind a wait, the one that its own peer was busy with if it waits for itself."""
    root = _root_wait(times, index)
    return _busy_with(times, index if root is None else root)


def _root_wait(times: StepTimes, index: int) -> int | None:
    """The first of the waits of peers behind a wait, each over when the one before it was posted; None for a circle."""
    at = index
    for _ in range(len(times.waits) + 1):
        before = _wait_before(times, at)
        if before == at:
            return at
        at = before
    return None


def _busy_with(times: StepTimes, index: int) -> int:
    waits, table = times.waits, times.table
    theirs = range(*table.rank_ptr[waits["peer"][index] : waits["peer"][index] + 2])
    over = [row for row in theirs if times.end[waits["window"][index], row] <= waits["ready"][index]]
    return over[-1] if over else NONE


def _wait_before(times: StepTimes, index: int) -> int:
    """The wait that held up the peer of a wait since it ended its last op; the wait itself if none did."""
    waits, busy_with = times.waits, _busy_with(times, index)
    ended = [
        (int(freed), other)
        for other, (step, rank, freed) in enumerate(zip(waits["window"], waits["rank"], waits["freed"], strict=True))
        if (step, rank) == (waits["window"][index], waits["peer"][index]) and freed <= waits["ready"][index]
    ]
    last, before = max(ended, default=(0, index))
    is_since = busy_with == NONE or last > times.end[waits["window"][index], busy_with]
    return before if is_since else index


class Step(NamedTuple):
    """One hop back: from the op of ``row`` to its ``source``, −1 at the end."""

    row: int
    source: int
    idle: int
    transfer: int
    work: int
    begin: int


def hop_back(times: StepTimes, bindings: Bindings, step: int, row: int, cursor: int) -> Step:
    bound = Bound(*(getattr(bindings, name)[step, row].item() for name in Bound._fields))
    begun = min(cursor, bound.ready)
    moving = 0 if bound.is_message else min(bound.moving, cursor - begun)
    if bound.row == NONE:
        return Step(row, NONE, cursor - begun - moving, moving, 0, begun)
    sent = min(begun, int(times.end[step, bound.row])) if bound.is_message else begun
    begin = min(sent, int(times.start[step, bound.row]))
    return Step(row, bound.row, cursor - begun - moving, begun - sent + moving, sent - begin, begin)


def hops_back(times: StepTimes, bindings: Bindings, step: int, row: int) -> Iterator[Step]:
    """All hops from the start of an op; no more than ops, whatever clocks make of their order."""
    hop = hop_back(times, bindings, step, row, int(times.start[step, row]))
    for _ in range(len(times.table) + 1):
        yield hop
        if hop.source == NONE:
            return
        hop = hop_back(times, bindings, step, hop.source, hop.begin)


def charged(times: StepTimes, bindings: Bindings, typical: Typical, waits: InnerWaits) -> dict[str, Int64]:
    """The charges of :func:`charge_bubbles`, one bubble after the other."""
    held = waits.sums(times.start.shape)
    charges = {name: np.zeros_like(times.start) for name in ("work", "transfer", "idle")}
    charges |= {"wait": times.inner_bubble - held, "held": held.copy()}
    table = times.table
    last = times.end.argmax(axis=1)
    gaps = [
        (step, row, int(table.rank[row]), int(times.gap_bubble[step, row]), int(typical.gap[step, row]), False)
        for step, row in np.ndindex(times.start.shape)
    ]
    tails = [
        (step, int(last[step]), rank, int(times.tail_bubble[step, rank]), int(typical.tail[step, rank]), True)
        for step, rank in np.ndindex(times.tail_bubble.shape)
    ]
    for step, row, rank, length, of_plan, is_tail in gaps + tails:
        pieces = list(_pieces(times, bindings, typical, held, step, row, rank, is_tail))
        of_plan = min(of_plan, length)
        unusual = min(sum(excess for *_, excess in pieces), length - of_plan)
        usual = length - unusual
        for to, at, ns, excess in pieces:
            first = min(excess, unusual)
            unusual -= first
            then = min(ns - first, usual)
            usual -= then
            charges[to][step, at] += first + then
        charges["idle"][step, row] += usual + unusual
    _hand_on(charges, times, bindings, waits, held)
    return charges


def _pieces(
    times: StepTimes, bindings: Bindings, typical: Typical, held: Int64, step: int, row: int, rank: int, is_tail: bool
) -> Iterator[tuple[str, int, int, int]]:
    """(charge, row, length, excess) of the walk back from one bubble, until it is on its own rank again."""

    def piece(to: str, at: int, ns: int, usual_of: int) -> tuple[str, int, int, int]:
        return to, at, ns, max(ns - int(getattr(typical, to)[step, usual_of]), 0)

    def op(at: int, ns: int) -> Iterator[tuple[str, int, int, int]]:
        waiting = min(int(held[step, at]), ns)
        yield piece("held", at, waiting, at)
        yield piece("work", at, ns - waiting, at)

    if is_tail:
        yield from op(row, int(times.durations[step, row]))
    exposed = 0 if is_tail else int(times.gap_exposed[step, row])
    for number, hop in enumerate(hops_back(times, bindings, step, row)):
        idle, transfer = hop.idle, hop.transfer
        if number == 0:
            idle, transfer = max(idle - max(exposed - transfer, 0), 0), max(transfer - exposed, 0)
        if number > len(times.table):
            return
        waiting = min(int(bindings.held[step, hop.row]), idle)
        late = int(bindings.held_by[step, hop.row])
        yield piece("idle", late, waiting, late)
        yield piece("idle", hop.row, idle - waiting, hop.row)
        yield piece("transfer", max(hop.source, 0), transfer, hop.row)
        if hop.source == NONE or times.table.rank[hop.source] == rank:
            return
        yield from op(hop.source, hop.work)


def _hand_on(charges: dict[str, Int64], times: StepTimes, bindings: Bindings, waits: InnerWaits, held: Int64) -> None:
    """Charge what waits in collectives were charged to the members that came last."""
    before = dict.fromkeys(np.ndindex(held.shape), 0)
    columns = (waits.step, waits.row, waits.ns, waits.late_step, waits.late_row, waits.longer)
    for step, row, ns, late_step, late_row, longer in zip(*(column.tolist() for column in columns), strict=True):
        charge, whole = int(charges["held"][step, row]), int(held[step, row])
        amount = part_of(charge, before[step, row] + ns, whole) - part_of(charge, before[step, row], whole)
        before[step, row] += ns
        given, passed = part_of(amount, longer, ns), longer
        charges["work"][late_step, late_row] += given
        for hop in hops_back(times, bindings, late_step, late_row):
            lengths = {
                "idle": (hop.row, hop.idle),
                "transfer": (hop.source, hop.transfer),
                "work": (hop.source, hop.work),
            }
            for to, (at, length) in lengths.items():
                passed = min(passed + length, ns)
                part = part_of(amount, passed, ns) - given
                given += part
                charges[to][late_step, max(at, 0)] += part
            if passed >= ns:
                break
        charges["idle"][late_step, late_row] += amount - given


def part_of(amount: int, part: int, whole: int) -> int:
    return amount if part >= whole else min(amount * part // whole, amount)


def costs_by_cause(
    table: PlanTable,
    levels: Sequence[Int64],
    inner: Int64,
    transfers: Int64,
    moving: Int64,
    host: Int64,
    routing: Int64,
    late: Int64 | None = None,
) -> CauseCosts:
    """Costs of windows without a graph; the levels are those of kinds, stages, ranks and ops."""
    matrix = replace(measured_costs(table, levels[-1][:, np.newaxis], transfers[:, np.newaxis]), moving=moving)
    return costs_of_causes(matrix, levels, inner, host, routing, np.zeros_like(host) if late is None else late, None)
