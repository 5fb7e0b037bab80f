"""ZB-V: two chunks on a V (stage r and stage 2p−1−r on rank r) with the backward split; no bubble when f = i = w.

Source: Qi et al. (arXiv 2401.10241, section 6); torch.distributed.pipelining.ScheduleZBVZeroBubble.
"""

from __future__ import annotations

from pptrace.schedule.actions import Action, Phase
from pptrace.schedule.builders.counting import Row
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape, require_two_chunks, zigzag

NAME = "zbv"


def build(shape: Shape) -> Plan:
    """Build the plan; for fewer than 2p−1 microbatches that for 2p−1 without the microbatches that do not exist, as torch
    does.
    """
    require_two_chunks(NAME, shape)
    return make_plan(NAME, (_rank_actions(shape.pp, rank, shape.num_microbatches) for rank in range(shape.pp)))


def _rank_actions(pp: int, rank: int, num_microbatches: int) -> list[Action]:
    down, up = (zigzag(chunk, rank, pp) for chunk in (0, 1))
    row = Row({down: 0, up: 1})
    total = max(2 * pp - 1, num_microbatches)
    _warm_up(row, pp, rank)
    row.phase = Phase.STEADY
    num_down_left = total - (2 * pp - 1 - rank)
    for index in range(total - pp):
        if index < num_down_left:
            row.forward(down)
        _backward(row, down)
        row.forward(up)
        _backward(row, up)
    row.phase = Phase.COOLDOWN
    _cool_down(row, pp, rank)
    return [action for action in row.actions if (action.microbatch or 0) < num_microbatches]


def _warm_up(row: Row, pp: int, rank: int) -> None:
    down, up = (zigzag(chunk, rank, pp) for chunk in (0, 1))
    for _ in range(2 * (pp - rank) - 1):
        row.forward(down)
    for _ in range(rank):
        row.forward(up)
        row.forward(down)
    for _ in range(pp - rank):
        row.forward(up)
        _backward(row, up)


def _cool_down(row: Row, pp: int, rank: int) -> None:
    down, up = (zigzag(chunk, rank, pp) for chunk in (0, 1))
    for _ in range(rank):
        row.input_grad(down)
        row.input_grad(up)
    for _ in range(pp - rank):
        row.input_grad(down)
        row.weight_grad(down)
    for stage in (up, down):
        for _ in range(rank):
            row.weight_grad(stage)


def _backward(row: Row, stage: int) -> None:
    row.input_grad(stage)
    row.weight_grad()
