"""ZB-auto: a zero-bubble schedule searched for given costs of F, I, W and a message, and a memory limit per rank.

The search is the heuristic of the paper. Warm up with as many forwards as memory allows before the first input gradient
arrives; then one F and one I per round, with W's put where a rank would wait for a W's time or longer, where waiting would
make it the rank that waits most, and where memory is full; what W's are left come at the end. Each rank stays a forward
ahead of the next one while it has any. Three yes-or-no choices of the heuristic are tried in all eight combinations; the
shortest step wins, and among equals the one whose slowest rank is busy for the shortest time (what counts without an
optimizer barrier), then the one with the least memory. Beside these drafts stand two of a list scheduler, which is shorter
where memory holds fewer microbatches than there are ranks, and ZB-H1 and ZB-H2 where they fit into memory.

Source: Qi et al. (arXiv 2401.10241), section 3; sail-sg/zero-bubble-pipeline-parallelism ``scheduler/zb.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.phases import phases_by_order
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.replay import Replay, replay
from pptrace.schedule.shape import OpCosts, Shape, require_one_chunk
from pptrace.schedule.zero_bubble import build_h1, build_h2

NAME = "zb-auto"


@dataclass(frozen=True, slots=True)
class Choices:
    """What the heuristic leaves open."""

    overfill: bool  # a last warmup forward even if it delays the first input gradient
    backward_first: bool  # leave a round's forward out when the next rank has no use for it yet
    fill_short_gaps: bool  # W into a gap shorter than W even if the rank is not the one that waits most


@dataclass(frozen=True, slots=True)
class Optimality:
    """A plan's makespan and the least that any plan of its shape could have, in the unit of the costs."""

    makespan: int
    lower_bound: int

    @property
    def excess(self) -> float:
        """How much longer than the lower bound, as a share of it."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0.0


def build(shape: Shape) -> Plan:
    require_one_chunk(NAME, shape)
    drafts = [draft(shape, Choices(*choices)) for choices in product((True, False), repeat=3)]
    drafts += [list_schedule(shape, patient) for patient in (True, False)]
    best = min(drafts, key=lambda found: (found.makespan, found.longest_rank, found.most_in_flight))
    plan, makespan = make_plan(NAME, (_tagged(rank, row) for rank, row in enumerate(best.rows))), best.makespan
    for fixed in _fixed_that_fit(shape):
        if (length := _replayed(fixed, shape.costs).makespan) < makespan:
            plan, makespan = replace(fixed, name=NAME), length
    return plan


def optimality(plan: Plan, shape: Shape) -> Optimality:
    """How far a plan is from the best that its shape allows."""
    return Optimality(_replayed(plan, shape.costs).makespan, lower_bound(shape))


def _fixed_that_fit(shape: Shape) -> Iterator[Plan]:
    plain = Shape(shape.pp, shape.num_microbatches)
    for fixed, held in ((build_h1, shape.pp), (build_h2, 2 * shape.pp - 1)):
        if shape.memory_limit is None or min(held, shape.num_microbatches) <= shape.memory_limit:
            yield fixed(plain)


def _replayed(plan: Plan, costs: OpCosts) -> Replay:
    cost = {Kind.F: costs.forward, Kind.I: costs.input_grad, Kind.W: costs.weight_grad}
    return replay(plan, lambda _rank, action: cost[action.kind], lambda _action, _source, _target: costs.p2p)


def _tagged(rank: int, row: list[tuple[Kind, int]]) -> list[Action]:
    phases = phases_by_order([kind for kind, _ in row])
    return [Action(kind, rank, mb, 0, phase) for (kind, mb), phase in zip(row, phases, strict=True)]


def lower_bound(shape: Shape) -> int:
    """No step of p ranks with one chunk each, whatever its order, is shorter than this; in the unit of the costs.

    Rank r cannot start before r forwards and messages. Its first I cannot start before the first microbatch has gone down
    and come back, and until then it can only run as many forwards as memory holds. After its last I the gradient goes up r
    ranks, and rank 0 has a W to run. A microbatch is in memory from its F to its W, at least for as long as it travels to the
    last rank and back.
    """
    p, m, costs = shape.pp, shape.num_microbatches, shape.costs
    f, i, w, c = costs.forward, costs.input_grad, costs.weight_grad, costs.p2p
    limit = shape.memory_limit or m
    num_early = min(m, limit)
    bounds = [0]
    for rank in range(p):
        start = rank * (f + c)
        first_input_grad = p * f + (p - 1) * c + (p - rank - 1) * (i + c)
        forwards_end = max(start + num_early * f, first_input_grad)
        bounds.append(forwards_end + (m - num_early) * f + m * (i + w))
        bounds.append(forwards_end + (m - num_early) * f + m * i + rank * (i + c) + w)
        lifespan = f + (p - 1 - rank) * (f + i + 2 * c) + i + w
        bounds.append(start + -(-m * lifespan // limit))
    return max(bounds)


class _Draft:
    """A schedule in the making: what each rank has run, until when, and how long it has waited since its first forward."""

    def __init__(self, pp: int, num_microbatches: int, costs: OpCosts, memory_limit: int) -> None:
        self.pp, self.m, self.costs, self.limit = pp, num_microbatches, costs, memory_limit
        self.rows: list[list[tuple[Kind, int]]] = [[] for _ in range(pp)]
        self.clock = [0] * pp
        self.begun = [0] * pp
        self.waited = [0] * pp
        self.most_in_flight = 0
        self.num = {kind: [0] * pp for kind in (Kind.F, Kind.I, Kind.W)}
        self.ended: dict[Kind, list[list[int]]] = {kind: [[] for _ in range(pp)] for kind in (Kind.F, Kind.I)}
        self._cost = {Kind.F: costs.forward, Kind.I: costs.input_grad, Kind.W: costs.weight_grad}

    @property
    def makespan(self) -> int:
        return max(self.clock)

    @property
    def longest_rank(self) -> int:
        """The longest time from a rank's first action to its last."""
        return max(end - begin for begin, end in zip(self.begun, self.clock, strict=True))

    def in_flight(self, rank: int) -> int:
        return self.num[Kind.F][rank] - self.num[Kind.W][rank]

    def owes_weight_grad(self, rank: int) -> bool:
        return self.num[Kind.W][rank] < self.num[Kind.I][rank]

    def arrival(self, kind: Kind, rank: int) -> int:
        """When the input of the rank's next F or I is there; 0 where it comes from no other rank."""
        other = rank - 1 if kind is Kind.F else rank + 1
        if not 0 <= other < self.pp:
            return 0
        return self.ended[kind][other][self.num[kind][rank]] + self.costs.p2p

    def put(self, kind: Kind, rank: int) -> None:
        microbatch = self.num[kind][rank]
        start = self.clock[rank]
        if kind is not Kind.W:
            start = max(start, self.arrival(kind, rank))
        if self.rows[rank]:
            self.waited[rank] += start - self.clock[rank]
        else:
            self.begun[rank] = start
        self.clock[rank] = start + self._cost[kind]
        if kind is not Kind.W:
            self.ended[kind][rank].append(self.clock[rank])
        self.num[kind][rank] += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight(rank))
        self.rows[rank].append((kind, microbatch))

    def fill_gap(self, kind: Kind, rank: int, fill_short_gaps: bool) -> None:
        """W's for as long as the rank waits for the input of its next F or I."""
        arrival = self.arrival(kind, rank)
        while self.owes_weight_grad(rank) and self.clock[rank] + self.costs.weight_grad <= arrival:
            self.put(Kind.W, rank)
        gap = arrival - self.clock[rank]
        if gap > 0 and self.owes_weight_grad(rank):
            waits_most = self.waited[rank] + gap > max(self.waited)
            if waits_most or fill_short_gaps:
                self.put(Kind.W, rank)


def draft(shape: Shape, choices: Choices) -> _Draft:
    """One run of the heuristic."""
    found = _Draft(shape.pp, shape.num_microbatches, shape.costs, shape.memory_limit or shape.num_microbatches)
    _warm_up(found, choices.overfill)
    for _ in range(1, found.m):
        _forward_round(found, choices)
        for rank in reversed(range(found.pp)):
            found.fill_gap(Kind.I, rank, choices.fill_short_gaps)
            found.put(Kind.I, rank)
    for rank in range(found.pp):
        while found.owes_weight_grad(rank):
            found.put(Kind.W, rank)
    return found


_ORDER = (Kind.I, Kind.F, Kind.W)


def list_schedule(shape: Shape, patient: bool) -> _Draft:
    """Every rank runs what it can start first, an I before an F before a W; never more forwards than memory holds.

    ``patient``: a W waits where an input that is on its way comes before the W would end.
    """
    found = _Draft(shape.pp, shape.num_microbatches, shape.costs, shape.memory_limit or shape.num_microbatches)
    ready = [_next(found, rank, patient) for rank in range(found.pp)]
    while (chosen := min((entry for entry in ready if entry is not None), default=None)) is not None:
        _, place, rank = chosen
        found.put(_ORDER[place], rank)
        for near in range(max(0, rank - 1), min(found.pp, rank + 2)):
            ready[near] = _next(found, near, patient)
    return found


def _next(found: _Draft, rank: int, patient: bool) -> tuple[int, int, int] | None:
    """(start, place of its kind in the order, rank) of what a rank can start first, as far as is known; None: nothing yet."""
    clock = found.clock[rank]
    starts = [
        (max(clock, found.arrival(kind, rank)), _ORDER.index(kind))
        for kind in (Kind.I, Kind.F)
        if _has_input(found, kind, rank)
    ]
    soonest = min(starts, default=None)
    if found.owes_weight_grad(rank):
        ends = clock + found.costs.weight_grad
        if soonest is None or (soonest[0] > clock and not (patient and soonest[0] < ends)):
            soonest = (clock, _ORDER.index(Kind.W))
    return None if soonest is None else (*soonest, rank)


def _has_input(found: _Draft, kind: Kind, rank: int) -> bool:
    """Whether the rank's next F or I is due, fits into memory, and has an input that was made."""
    number = found.num[kind][rank]
    if kind is Kind.F:
        made = rank == 0 or number < len(found.ended[kind][rank - 1])
        return number < found.m and made and found.in_flight(rank) < found.limit
    return number < found.num[Kind.F][rank] and (rank == found.pp - 1 or number < len(found.ended[kind][rank + 1]))


def _warm_up(found: _Draft, overfill: bool) -> None:
    """The first forward of every rank, more where they fit, and the first input gradients."""
    costs, pp = found.costs, found.pp
    for rank in range(pp):
        found.put(Kind.F, rank)
    extra = [0] * pp
    input_grad_ends = found.clock[-1] + costs.input_grad
    for rank in reversed(range(pp - 1)):
        arrival, clock = input_grad_ends + costs.p2p, found.clock[rank]
        while extra[rank] + 1 < min(found.m, found.limit):
            if clock >= arrival or (not overfill and clock + costs.forward > arrival):
                break
            clock += costs.forward
            extra[rank] += 1
        input_grad_ends = max(clock, arrival) + costs.input_grad
    for rank in range(1, pp):
        ahead = extra[rank - 1] if extra[rank - 1] + 1 == found.m else max(0, extra[rank - 1] - 1)
        extra[rank] = min(extra[rank], ahead)
    for rank in range(pp):
        for _ in range(extra[rank]):
            found.put(Kind.F, rank)
    for rank in reversed(range(pp)):
        found.put(Kind.I, rank)


def _forward_round(found: _Draft, choices: Choices) -> None:
    """At most one forward per rank, and none on a rank whose follower runs none."""
    forwards = found.num[Kind.F]
    wanted = [forwards[rank] < found.m for rank in range(found.pp)]
    if choices.backward_first:
        wanted = [wants and not _can_wait(found, rank) for rank, wants in enumerate(wanted)]
    for rank in reversed(range(found.pp - 1)):
        wanted[rank] = wanted[rank] and wanted[rank + 1]
    for rank in range(found.pp):
        if not wanted[rank] or (rank > 0 and forwards[rank] == forwards[rank - 1]):
            continue
        while found.in_flight(rank) >= found.limit and found.owes_weight_grad(rank):
            found.put(Kind.W, rank)
        if found.in_flight(rank) < found.limit:
            found.fill_gap(Kind.F, rank, choices.fill_short_gaps)
            found.put(Kind.F, rank)


def _can_wait(found: _Draft, rank: int) -> bool:
    """Whether the next rank has forwards in hand, and this one would run the forward too early or at too high a price."""
    forwards, costs = found.num[Kind.F], found.costs
    if rank + 1 == found.pp or forwards[rank] < forwards[rank + 1] + 2:
        return False
    input_grad_arrives = found.clock[rank + 1] + costs.forward + costs.input_grad + costs.p2p
    if found.clock[rank] >= input_grad_arrives:
        return True
    num_to_free = max(0, found.in_flight(rank) + 1 - found.limit)
    num_owed = found.num[Kind.I][rank] - found.num[Kind.W][rank]
    needed = costs.forward + min(num_to_free, num_owed) * costs.weight_grad
    if found.clock[rank] + needed <= input_grad_arrives:
        return False
    return input_grad_arrives - found.clock[rank] <= max(found.waited) - found.waited[rank]
