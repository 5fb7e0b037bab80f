"""ZB-auto: a zero-bubble schedule searched for given costs of F, I, W and a message, and a memory limit per rank.

The search is the heuristic of the paper. Warm up with as many forwards as memory allows before the first input gradient
arrives; then one F and one I per round, with a W where a rank would wait for a W's time or longer, where waiting would
make it the rank that waits most, and where memory is full; the remaining W's come at the end. Each rank stays a forward
ahead of the next one while it has any. Three binary choices of the heuristic are tried in all eight combinations; the
shortest step wins, and among equals the one whose slowest rank is busy for the shortest time (what counts without an
optimizer barrier), then the one with the least memory. The other candidates are two orders of a list scheduler, which is
shorter where memory holds fewer microbatches than there are ranks, and ZB-H1 and ZB-H2 where they fit into memory.

Source: Qi et al. (arXiv 2401.10241), section 3; sail-sg/zero-bubble-pipeline-parallelism ``scheduler/zb.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.builders.one_chunk import build_h1, build_h2
from pptrace.schedule.plan import Plan, make_plan, phases_by_order
from pptrace.schedule.replay import replay
from pptrace.schedule.shape import OpCosts, Shape, require_one_chunk

NAME = "zb-auto"


@dataclass(frozen=True, slots=True)
class Choices:
    """The binary choices of the heuristic."""

    overfill: bool  # a last warmup forward even if it delays the first input gradient
    backward_first: bool  # skip a round's forward when the next rank cannot use it yet
    fill_short_gaps: bool  # W into a gap shorter than W even if the rank is not the one that waits most


def build(shape: Shape) -> Plan:
    require_one_chunk(NAME, shape)
    drafts = [run_heuristic(shape, Choices(*choices)) for choices in product((True, False), repeat=3)]
    drafts += [list_schedule(shape, weight_waits) for weight_waits in (True, False)]
    best = min(drafts, key=lambda draft: (draft.makespan, draft.longest_rank, draft.peak_in_flight))
    rows = []
    for rank, row in enumerate(best.rows):
        phases = phases_by_order([kind for kind, _ in row])
        rows.append([Action(kind, rank, mb, 0, phase) for (kind, mb), phase in zip(row, phases, strict=True)])
    plan, makespan = make_plan(NAME, rows), best.makespan
    for build_handmade, peak in ((build_h1, shape.pp), (build_h2, 2 * shape.pp - 1)):
        if shape.memory_limit is None or min(peak, shape.num_microbatches) <= shape.memory_limit:
            handmade = build_handmade(Shape(shape.pp, shape.num_microbatches))
            if (length := _makespan(handmade, shape.costs)) < makespan:
                plan, makespan = replace(handmade, name=NAME), length
    return plan


def excess_of(plan: Plan, shape: Shape) -> float:
    """The plan's makespan above the lower bound of its shape, as a share of the bound."""
    bound = lower_bound(shape)
    return _makespan(plan, shape.costs) / bound - 1 if bound else 0.0


def _makespan(plan: Plan, costs: OpCosts) -> int:
    of_ranks = _by_kind(costs, plan.pp)
    return replay(plan, lambda rank, action: of_ranks[rank][action.kind], costs.p2p).makespan


def _by_kind(costs: OpCosts, pp: int) -> list[dict[Kind, int]]:
    """The cost of each kind on each rank."""
    return [dict(zip((Kind.F, Kind.I, Kind.W), of_rank, strict=True)) for of_rank in costs.by_rank(pp)]


def lower_bound(shape: Shape) -> int:
    """A lower bound on the makespan of any order for p ranks with one chunk each, in the unit of the costs.

    Rank r cannot start before r forwards and messages. Its first I cannot start before the first microbatch has gone down
    and come back, and until then it can only run as many forwards as memory holds. After its last I the gradient goes up r
    ranks, and rank 0 has a W to run. A microbatch is in memory from its F to its W, at least for as long as it travels to the
    last rank and back. Each rank may have costs of its own.
    """
    m, c = shape.num_microbatches, shape.costs.p2p
    of_ranks = shape.costs.by_rank(shape.pp)
    down, up = sum(f + c for f, _, _ in of_ranks), 0
    limit = shape.memory_limit or m
    num_early = min(m, limit)
    bounds, start, back = [0], 0, sum(i + c for _, i, _ in of_ranks)
    for f, i, w in of_ranks:
        back -= i + c  # the way of a gradient from the last rank
        forwards_end = max(start + num_early * f, down - c + back)
        bounds.append(forwards_end + (m - num_early) * f + m * (i + w))
        bounds.append(forwards_end + (m - num_early) * f + m * i + up + of_ranks[0][2])
        lifespan = down - start - c + back + i + w
        bounds.append(start + -(-m * lifespan // limit))
        start += f + c
        up += i + c
    return max(bounds)


class _Draft:
    """A partial schedule: per rank its actions, its clock, and its waiting time since its first forward."""

    def __init__(self, shape: Shape) -> None:
        self.pp, self.m, self.costs = shape.pp, shape.num_microbatches, shape.costs
        self.limit = shape.memory_limit or self.m
        self.rows: list[list[tuple[Kind, int]]] = [[] for _ in range(self.pp)]
        self.clock, self.first_start, self.wait_time = ([0] * self.pp for _ in range(3))
        self.peak_in_flight = 0
        self.num = {kind: [0] * self.pp for kind in (Kind.F, Kind.I, Kind.W)}
        self.ended: dict[Kind, list[list[int]]] = {kind: [[] for _ in range(self.pp)] for kind in (Kind.F, Kind.I)}
        self.cost = _by_kind(self.costs, self.pp)

    @property
    def makespan(self) -> int:
        return max(self.clock)

    @property
    def longest_rank(self) -> int:
        """The longest time from a rank's first action to its last."""
        return max(end - begin for begin, end in zip(self.first_start, self.clock, strict=True))

    def in_flight(self, rank: int) -> int:
        return self.num[Kind.F][rank] - self.num[Kind.W][rank]

    def has_pending_weight_grad(self, rank: int) -> bool:
        return self.num[Kind.W][rank] < self.num[Kind.I][rank]

    def arrival(self, kind: Kind, rank: int) -> int:
        """The time at which the input of the rank's next F or I arrives; 0 where no other rank sends it."""
        other = rank - 1 if kind is Kind.F else rank + 1
        if not 0 <= other < self.pp:
            return 0
        return self.ended[kind][other][self.num[kind][rank]] + self.costs.p2p

    def append(self, kind: Kind, rank: int) -> None:
        microbatch = self.num[kind][rank]
        start = self.clock[rank]
        if kind is not Kind.W:
            start = max(start, self.arrival(kind, rank))
        if self.rows[rank]:
            self.wait_time[rank] += start - self.clock[rank]
        else:
            self.first_start[rank] = start
        self.clock[rank] = start + self.cost[rank][kind]
        if kind is not Kind.W:
            self.ended[kind][rank].append(self.clock[rank])
        self.num[kind][rank] += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight(rank))
        self.rows[rank].append((kind, microbatch))

    def fill_gap(self, kind: Kind, rank: int, fill_short_gaps: bool) -> None:
        """Append W's while the rank waits for the input of its next F or I."""
        arrival = self.arrival(kind, rank)
        while self.has_pending_weight_grad(rank) and self.clock[rank] + self.cost[rank][Kind.W] <= arrival:
            self.append(Kind.W, rank)
        gap = arrival - self.clock[rank]
        if gap > 0 and self.has_pending_weight_grad(rank):
            waits_most = self.wait_time[rank] + gap > max(self.wait_time)
            if waits_most or fill_short_gaps:
                self.append(Kind.W, rank)


def run_heuristic(shape: Shape, choices: Choices) -> _Draft:
    """Run the heuristic once."""
    draft = _Draft(shape)
    _warm_up(draft, choices.overfill)
    for _ in range(1, draft.m):
        _forward_round(draft, choices)
        for rank in reversed(range(draft.pp)):
            draft.fill_gap(Kind.I, rank, choices.fill_short_gaps)
            draft.append(Kind.I, rank)
    for rank in range(draft.pp):
        while draft.has_pending_weight_grad(rank):
            draft.append(Kind.W, rank)
    return draft


_ORDER = (Kind.I, Kind.F, Kind.W)


def list_schedule(shape: Shape, weight_waits: bool) -> _Draft:
    """List scheduling: each rank runs what it can start first, I before F before W, within the memory limit.

    ``weight_waits``: a W is delayed where a pending input arrives before the W would end.
    """
    draft = _Draft(shape)
    ready = [_next(draft, rank, weight_waits) for rank in range(draft.pp)]
    while (earliest := min((entry for entry in ready if entry is not None), default=None)) is not None:
        _, order_index, rank = earliest
        draft.append(_ORDER[order_index], rank)
        for neighbour in range(max(0, rank - 1), min(draft.pp, rank + 2)):
            ready[neighbour] = _next(draft, neighbour, weight_waits)
    return draft


def _next(draft: _Draft, rank: int, weight_waits: bool) -> tuple[int, int, int] | None:
    """(start, index of its kind in :data:`_ORDER`, rank) of the action that a rank can start first; None: nothing yet."""
    clock = draft.clock[rank]
    starts = [
        (max(clock, draft.arrival(kind, rank)), _ORDER.index(kind))
        for kind in (Kind.I, Kind.F)
        if _has_input(draft, kind, rank)
    ]
    soonest = min(starts, default=None)
    if draft.has_pending_weight_grad(rank):
        ends = clock + draft.cost[rank][Kind.W]
        if soonest is None or (soonest[0] > clock and not (weight_waits and soonest[0] < ends)):
            soonest = (clock, _ORDER.index(Kind.W))
    return None if soonest is None else (*soonest, rank)


def _has_input(draft: _Draft, kind: Kind, rank: int) -> bool:
    """Return whether the rank has a next F or I that fits into memory and whose input has been computed."""
    number = draft.num[kind][rank]
    if kind is Kind.F:
        is_available = rank == 0 or number < len(draft.ended[kind][rank - 1])
        return number < draft.m and is_available and draft.in_flight(rank) < draft.limit
    return number < draft.num[Kind.F][rank] and (rank == draft.pp - 1 or number < len(draft.ended[kind][rank + 1]))


def _warm_up(draft: _Draft, overfill: bool) -> None:
    """Append the first forward of every rank, more where they fit, and the first input gradients."""
    cost, pp = draft.cost, draft.pp
    for rank in range(pp):
        draft.append(Kind.F, rank)
    extra = [0] * pp
    input_grad_ends = draft.clock[-1] + cost[-1][Kind.I]
    for rank in reversed(range(pp - 1)):
        arrival, clock = input_grad_ends + draft.costs.p2p, draft.clock[rank]
        while extra[rank] + 1 < min(draft.m, draft.limit):
            if clock >= arrival or (not overfill and clock + cost[rank][Kind.F] > arrival):
                break
            clock += cost[rank][Kind.F]
            extra[rank] += 1
        input_grad_ends = max(clock, arrival) + cost[rank][Kind.I]
    for rank in range(1, pp):
        most_extra = extra[rank - 1] if extra[rank - 1] + 1 == draft.m else max(0, extra[rank - 1] - 1)
        extra[rank] = min(extra[rank], most_extra)
    for rank in range(pp):
        for _ in range(extra[rank]):
            draft.append(Kind.F, rank)
    for rank in reversed(range(pp)):
        draft.append(Kind.I, rank)


def _forward_round(draft: _Draft, choices: Choices) -> None:
    """Append at most one forward per rank, and none on a rank whose next rank runs none."""
    forwards = draft.num[Kind.F]
    runs_forward = [forwards[rank] < draft.m for rank in range(draft.pp)]
    if choices.backward_first:
        runs_forward = [runs and not _can_wait(draft, rank) for rank, runs in enumerate(runs_forward)]
    for rank in reversed(range(draft.pp - 1)):
        runs_forward[rank] = runs_forward[rank] and runs_forward[rank + 1]
    for rank in range(draft.pp):
        if not runs_forward[rank] or (rank > 0 and forwards[rank] == forwards[rank - 1]):
            continue
        while draft.in_flight(rank) >= draft.limit and draft.has_pending_weight_grad(rank):
            draft.append(Kind.W, rank)
        if draft.in_flight(rank) < draft.limit:
            draft.fill_gap(Kind.F, rank, choices.fill_short_gaps)
            draft.append(Kind.F, rank)


def _can_wait(draft: _Draft, rank: int) -> bool:
    """Return whether the next rank has inputs for more forwards, and a forward here would be too early or delay an input
    gradient.
    """
    forwards, cost = draft.num[Kind.F], draft.cost[rank]
    if rank + 1 == draft.pp or forwards[rank] < forwards[rank + 1] + 2:
        return False
    of_next = draft.cost[rank + 1]
    input_grad_arrives = draft.clock[rank + 1] + of_next[Kind.F] + of_next[Kind.I] + draft.costs.p2p
    if draft.clock[rank] >= input_grad_arrives:
        return True
    num_to_free = max(0, draft.in_flight(rank) + 1 - draft.limit)
    num_pending = draft.num[Kind.I][rank] - draft.num[Kind.W][rank]
    needed = cost[Kind.F] + min(num_to_free, num_pending) * cost[Kind.W]
    if draft.clock[rank] + needed <= input_grad_arrives:
        return False
    return input_grad_arrives - draft.clock[rank] <= max(draft.wait_time) - draft.wait_time[rank]
