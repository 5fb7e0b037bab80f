"""DualPipe and DualPipe-V: a forward of one direction overlaps a backward of the other, as one action.

In DualPipe microbatches enter at both ends of the pipeline at once. Every rank holds two model stages: rank r the r-th of the
first direction and the (p−1−r)-th of the second. In the plan the second direction is a separate chain, stages p … 2p−1, on the
ranks in reverse; stage p+k is another copy of model stage k. Microbatches 0 … m/2−1 go down the first chain, the others down the
second.
DualPipe-V is DualPipe cut in half: both chunks of a V on each rank.

Sources: DeepSeek-V3 (arXiv 2412.19437), section 3.2.1; deepseek-ai/DualPipe, ``DualPipe.step`` and ``DualPipeV.step``;
torch.distributed.pipelining.ScheduleDualPipeV.
"""

from __future__ import annotations

from pptrace.errors import ShapeError
from pptrace.schedule.actions import Action, Phase
from pptrace.schedule.builders.counting import Row
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape, require_two_chunks, zigzag

DUALPIPE, DUALPIPE_V = "dualpipe", "dualpipe-v"


def build(shape: Shape) -> Plan:
    require_two_chunks(DUALPIPE, shape)
    p, m = shape.pp, shape.num_microbatches
    if p % 2:
        raise ShapeError(f"{DUALPIPE}: p={p}; expected an even number of ranks: try p={p + 1} (or dualpipe-v)")
    if m % 2 or m < 2 * p:
        legal = max(2 * p, m + m % 2)
        raise ShapeError(
            f"{DUALPIPE}: {m} microbatches over p={p}; expected an even number, at least 2p={2 * p}: try m={legal}"
        )
    half, rows = m // 2, []
    for rank in range(p):
        first, second = (zigzag(chunk, rank, p) for chunk in (0, 1))
        near, far = (first, second) if rank < p // 2 else (second, first)
        row = Row({first: 0, second: 1}, {second: half})
        rows.append(_steps(row, near, far, min(rank, p - 1 - rank), p // 2, half))
    return make_plan(DUALPIPE, rows)


def build_v(shape: Shape) -> Plan:
    require_two_chunks(DUALPIPE_V, shape)
    p, m = shape.pp, shape.num_microbatches
    if m < 2 * p:
        raise ShapeError(f"{DUALPIPE_V}: {m} microbatches over p={p}; expected at least 2p = {2 * p}")
    rows = []
    for rank in range(p):
        near, far = (zigzag(chunk, rank, p) for chunk in (0, 1))
        rows.append(_steps(Row({near: 0, far: 1}), near, far, rank, p, m))
    return make_plan(DUALPIPE_V, rows)


def _steps(row: Row, near: int, far: int, position: int, num_positions: int, num_microbatches: int) -> list[Action]:
    """The eight steps of one rank between two ends of a V, appended to ``row``.

    ``near`` is the stage that the rank's first microbatch reaches first, ``far`` the one that it (DualPipe-V) or the other
    direction (DualPipe) reaches later. ``position`` counts ranks from the end of the V that is fed, 0 to ``num_positions`` − 1.
    ``num_microbatches`` is that of one stage. Steps 1 to 3 are the warmup, 4 is steady, 5 to 8 the cooldown.
    """
    behind = num_positions - position - 1
    _warm_up(row, near, far, position, behind)
    row.phase = Phase.STEADY
    for index in range(num_microbatches - 2 * num_positions + position + 1):  # step 4
        if index == 0 and behind == 0:
            row.forward(near)  # not overlapped: a smaller bubble
            row.backward(far)
        else:
            row.overlapped(near, far)
        row.overlapped(far, near)
    row.phase = Phase.COOLDOWN
    _cool_down(row, near, far, position, behind)
    return row.actions


def _warm_up(row: Row, near: int, far: int, position: int, behind: int) -> None:
    for _ in range(2 * behind):  # step 1
        row.forward(near)
    for _ in range(position + 1):  # step 2
        row.forward(near)
        row.forward(far)
    for _ in range(behind):  # step 3
        row.input_grad(far)
        row.weight_grad()
        row.forward(far)


def _cool_down(row: Row, near: int, far: int, position: int, behind: int) -> None:
    for _ in range(behind):  # step 5
        row.backward(far)
        row.overlapped(far, near)
    order = [stage for _ in range(position + 1) for stage in (far, near)]
    for index, stage in enumerate(order):  # step 6: the second half splits the backward
        if index <= position:
            row.backward(stage)
        else:
            row.input_grad(stage)
    for _ in range(behind):  # step 7
        row.weight_grad()
        row.input_grad(near)
    for _ in range(position + 1):  # step 8
        row.weight_grad()
