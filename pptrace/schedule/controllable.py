"""V-half and V-min: two chunks on a V with the backward split, in about half and a third of the memory of 1F1B.

Each is one microbatch's pattern, repeated every six ticks: the four ops F, F, I, I of a rank fall on four different ticks of
the six, the two W's go into the others. That is the steady state, whose memory is the lifespan of the pattern. The fill and
the drain are then packed: whenever a rank would wait, it runs the first later op that is ready, a forward only if the memory
never grows beyond that of the steady state. W's are packed in two ways, in their place or behind everything else that is
ready, and the shorter plan is taken. All of this is for f = i = w: with other costs the pattern's ticks drift apart and ranks
wait in the steady state, the more the less memory there is.

Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362);
sail-sg/zero-bubble-pipeline-parallelism ``scheduler/zbv_greedy.py`` has the same patterns and another packing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.phases import phases_by_order
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape, require_two_chunks

HALF, MIN = "v-half", "v-min"
PERIOD = 6

Pattern = Callable[[int, int], tuple[int, int, int, int]]
"""(p, rank) → the ticks of F down, F up, I up and I down of microbatch 0."""


class _Op(NamedTuple):
    kind: Kind
    stage: int
    microbatch: int


def half_pattern(p: int, rank: int) -> tuple[int, int, int, int]:
    """Forwards take two ticks per rank down and one up, backwards two down and one up."""
    turn = 3 if p % 2 == 0 else 0
    return (2 * rank, 3 * p - rank - 2, 3 * p + turn + 2 * rank - 1, 6 * p + turn - rank - 2)


def min_pattern(p: int, rank: int) -> tuple[int, int, int, int]:
    """One tick per rank everywhere."""
    turn = 2 if p % 3 == 0 else 0
    return (rank, 2 * p - rank - 1, 2 * p + turn + rank, 4 * p + turn - rank - 1)


def build_half(shape: Shape) -> Plan:
    return _build(HALF, shape, half_pattern)


def build_min(shape: Shape) -> Plan:
    return _build(MIN, shape, min_pattern)


def _build(name: str, shape: Shape, pattern: Pattern) -> Plan:
    require_two_chunks(name, shape)
    orders = [_steady_order(shape, rank, pattern(shape.pp, rank)) for rank in range(shape.pp)]
    limit = max(map(_peak, orders))
    packed = min(
        (_pack(orders, shape, limit, weights_last) for weights_last in (False, True)), key=lambda found: found[0]
    )
    return make_plan(name, (_tagged(shape.pp, row) for row in packed[1]))


def _tagged(pp: int, row: list[_Op]) -> list[Action]:
    phases = phases_by_order([op.kind for op in row])
    return [Action(*op, op.stage // pp, phase) for op, phase in zip(row, phases, strict=True)]


def _steady_order(shape: Shape, rank: int, ticks: tuple[int, int, int, int]) -> list[_Op]:
    """The ops of a rank as the pattern places them, W's in the first free ticks after their I's."""
    down, up = rank, 2 * shape.pp - 1 - rank
    at: dict[int, _Op] = {}
    for tick, kind, stage in zip(ticks, (Kind.F, Kind.F, Kind.I, Kind.I), (down, up, up, down), strict=True):
        for mb in range(shape.num_microbatches):
            at[tick + PERIOD * mb] = _Op(kind, stage, mb)
    order: list[_Op] = []
    owed: deque[_Op] = deque()
    for tick in range(max(at) + 1):
        if op := at.get(tick):
            order.append(op)
            if op.kind is Kind.I:
                owed.append(op)
        elif owed:
            order.append(owed.popleft()._replace(kind=Kind.W))
    return order + [op._replace(kind=Kind.W) for op in owed]


_HOLDS = {Kind.F: 1, Kind.I: 0, Kind.W: -1}


def _peak(order: list[_Op]) -> int:
    held = peak = 0
    for op in order:
        held += _HOLDS[op.kind]
        peak = max(peak, held)
    return peak


def _pack(orders: list[list[_Op]], shape: Shape, limit: int, weights_last: bool) -> tuple[int, list[list[_Op]]]:
    """Run the orders in ticks of one op, ranks filling their waits; (ticks, what each rank ran)."""
    pending = [list(order) for order in orders]
    done: list[list[_Op]] = [[] for _ in orders]
    held = [0] * len(orders)
    ended: dict[_Op, int] = {}
    tick = 0
    while any(pending):
        for rank, ops in enumerate(pending):
            place = _next_place(ops, limit - held[rank], tick, ended, 2 * shape.pp - 1, weights_last)
            if place is not None:
                op = ops.pop(place)
                held[rank] += _HOLDS[op.kind]
                ended[op] = tick + 1
                done[rank].append(op)
        tick += 1
    return tick, done


def _next_place(
    ops: list[_Op], room: int, tick: int, ended: dict[_Op, int], last_stage: int, weights_last: bool
) -> int | None:
    """Where in ``ops`` the op is that runs now. ``room`` is how many activations still fit.

    Ops of one kind and stage keep their order, so only the first of each is looked at. A forward that overtakes others needs
    room at each of their moments too.
    """
    seen: set[tuple[Kind, int]] = set()
    held = most = 0
    weight: int | None = None
    for place, op in enumerate(ops):
        if (op.kind, op.stage) not in seen:
            seen.add((op.kind, op.stage))
            need = _need(op, last_stage)
            ready = need is None or ended.get(need, tick + 1) <= tick
            if ready and op.kind is Kind.W and weights_last:
                weight = place if weight is None else weight
            elif ready and (op.kind is not Kind.F or most + 1 <= room):
                return place
            if len(seen) == PERIOD:
                break
        held += _HOLDS[op.kind]
        most = max(most, held)
    return weight


def _need(op: _Op, last_stage: int) -> _Op | None:
    """What must have ended before ``op`` starts; None for the first stage's forward."""
    kind, stage, mb = op
    if kind is Kind.F:
        return _Op(Kind.F, stage - 1, mb) if stage else None
    if kind is Kind.W:
        return _Op(Kind.I, stage, mb)
    return _Op(Kind.I, stage + 1, mb) if stage < last_stage else _Op(Kind.F, stage, mb)
