"""V-half and V-min: two chunks on a V with the backward split, in about half and a third of the memory of 1F1B.

Each is one microbatch's pattern, repeated every six ticks: the four ops F, F, I, I of a rank fall on four different ticks of
the six, the two W's take the others. That is the steady state, whose memory is the lifespan of the pattern. The fill and
the drain are then packed: whenever a rank would wait, it runs the first later op that is ready, a forward only if the memory
never grows beyond that of the steady state. W's are packed in two ways, and the shorter plan is taken: all of them after
everything else that is ready; or in the pattern's order while microbatches come in, so that no forward waits for the memory
of a late W, and after everything else that is ready from then on, where the last backwards alone count. The patterns assume
f = i = w: with other costs the pattern's ticks drift apart and ranks wait in the steady state, the more the less memory
there is.

Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362);
sail-sg/zero-bubble-pipeline-parallelism ``scheduler/zbv_greedy.py`` has the same patterns and another packing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan, make_plan, phases_by_order
from pptrace.schedule.shape import Shape, require_two_chunks, zigzag

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
    limit = max(max(accumulate((_HOLDS[op.kind] for op in order), initial=0)) for order in orders)
    pending = [[_pending(op, shape) for op in order] for order in orders]
    packed = min(
        (_pack(list(map(list, pending)), shape, limit, always_last) for always_last in (False, True)),
        key=lambda candidate: candidate[0],
    )
    rows = []
    for row in packed[1]:
        phases = phases_by_order([op.kind for op in row])
        rows.append([Action(*op, op.stage // shape.pp, phase) for op, phase in zip(row, phases, strict=True)])
    return make_plan(name, rows)


def _steady_order(shape: Shape, rank: int, ticks: tuple[int, int, int, int]) -> list[_Op]:
    """The ops of a rank in the pattern's order, W's in the first free ticks after their I's."""
    down, up = (zigzag(chunk, rank, shape.pp) for chunk in (0, 1))
    op_at: dict[int, _Op] = {}
    for tick, kind, stage in zip(ticks, (Kind.F, Kind.F, Kind.I, Kind.I), (down, up, up, down), strict=True):
        for mb in range(shape.num_microbatches):
            op_at[tick + PERIOD * mb] = _Op(kind, stage, mb)
    order: list[_Op] = []
    pending_weight_grads: deque[_Op] = deque()
    for tick in range(max(op_at) + 1):
        if op := op_at.get(tick):
            order.append(op)
            if op.kind is Kind.I:
                pending_weight_grads.append(op)
        elif pending_weight_grads:
            order.append(pending_weight_grads.popleft()._replace(kind=Kind.W))
    return order + [op._replace(kind=Kind.W) for op in pending_weight_grads]


_HOLDS = {Kind.F: 1, Kind.I: 0, Kind.W: -1}
_LANES = {Kind.F: 0, Kind.I: 1, Kind.W: 2}
_ALL_LANES = 2**PERIOD - 1
_NOTHING = -1
"""The place of an end that has always been: what needs nothing is ready."""


class _Pending(NamedTuple):
    """An op that waits. ``lane`` is the bit of its kind and stage, ``holds`` how many activations more its rank has after it;
    ``own`` and ``needs`` are the places of its end, and of the end of the op before it, in a table of ends.
    """

    op: _Op
    lane: int
    holds: int
    own: int
    needs: int


def _pending(op: _Op, shape: Shape) -> _Pending:
    def place(kind: Kind, stage: int) -> int:
        return (_LANES[kind] * 2 * shape.pp + stage) * shape.num_microbatches + op.microbatch

    kind, stage, _ = op
    if kind is Kind.F:
        needs = place(Kind.F, stage - 1) if stage else _NOTHING
    elif kind is Kind.W:
        needs = place(Kind.I, stage)
    else:
        needs = place(Kind.I, stage + 1) if stage < 2 * shape.pp - 1 else place(Kind.F, stage)
    return _Pending(op, 1 << 2 * _LANES[kind] + (stage < shape.pp), _HOLDS[kind], place(kind, stage), needs)


def _pack(pending: list[list[_Pending]], shape: Shape, limit: int, always_last: bool) -> tuple[int, list[list[_Op]]]:
    """Run what is pending in ticks of one op, ranks filling their waits; returns (number of ticks, the ops of each rank).

    ``always_last``: W's come after everything else that is ready, and not only once the rank has all microbatches.
    """
    to_come = [shape.num_microbatches] * shape.pp
    done: list[list[_Op]] = [[] for _ in pending]
    held = [0] * shape.pp
    ends = [math.inf] * sum(map(len, pending)) + [0]
    tick = 0
    while any(pending):
        for rank, ops in enumerate(pending):
            weights_last = always_last or not to_come[rank]
            index = _next_index(ops, limit - held[rank], tick, ends, weights_last)
            if index is not None:
                op, _, holds, own, _ = ops.pop(index)
                held[rank] += holds
                to_come[rank] -= op.kind is Kind.F and op.stage < shape.pp
                ends[own] = tick + 1
                done[rank].append(op)
        tick += 1
    return tick, done


def _next_index(ops: list[_Pending], num_free: int, tick: int, ends: list[float], weights_last: bool) -> int | None:
    """The index in ``ops`` of the op that runs now, None for none. ``num_free`` more activations fit.

    Ops of one kind and stage keep their order, so only the first of each is a candidate. A forward that overtakes others needs
    memory at each of their moments too.
    """
    seen = held = most = 0
    weight_index: int | None = None
    for index, (_, lane, holds, _, needs) in enumerate(ops):
        if not seen & lane:
            seen |= lane
            if ends[needs] <= tick:
                if holds < 0 and weights_last:
                    weight_index = index if weight_index is None else weight_index
                elif holds <= 0 or most < num_free:
                    return index
            if seen == _ALL_LANES:
                break
        held += holds
        if held > most:
            most = held
    return weight_index
