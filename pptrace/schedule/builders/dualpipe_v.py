"""DualPipe-V: DualPipe cut in half; both chunks of a V on each rank, a forward and a backward overlapped as one action.

Source: deepseek-ai/DualPipe, ``DualPipeV``; torch.distributed.pipelining.ScheduleDualPipeV.
"""

from __future__ import annotations

from pptrace.errors import ShapeError
from pptrace.schedule.actions import Action
from pptrace.schedule.builders.counting import Row
from pptrace.schedule.builders.dualpipe_steps import append_steps
from pptrace.schedule.placement import zigzag
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape, require_two_chunks

NAME = "dualpipe-v"


def build(shape: Shape) -> Plan:
    require_two_chunks(NAME, shape)
    if shape.num_microbatches < 2 * shape.pp:
        raise ShapeError(
            f"{NAME}: {shape.num_microbatches} microbatches over p={shape.pp}; expected at least 2p = {2 * shape.pp}"
        )
    return make_plan(NAME, (_rank_actions(shape, rank) for rank in range(shape.pp)))


def _rank_actions(shape: Shape, rank: int) -> list[Action]:
    near, far = (zigzag(chunk, rank, shape.pp) for chunk in (0, 1))
    row = Row({near: 0, far: 1})
    append_steps(row, near, far, rank, shape.pp, shape.num_microbatches)
    return row.actions
