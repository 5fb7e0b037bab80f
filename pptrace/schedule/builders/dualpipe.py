"""DualPipe: microbatches enter at both ends of the pipeline at once, and a forward of one direction overlaps a backward of
the other.

Every rank holds two model stages: rank r the r-th of the first direction and the (p−1−r)-th of the second. In the plan the
second direction is a separate chain, stages p … 2p−1, on the ranks in reverse; stage p+k is another copy of model stage k.
Microbatches 0 … m/2−1 go down the first chain, the others down the second.

Source: DeepSeek-V3 (arXiv 2412.19437), section 3.2.1; deepseek-ai/DualPipe, ``DualPipe.step``.
"""

from __future__ import annotations

from pptrace.errors import ShapeError
from pptrace.schedule.actions import Action
from pptrace.schedule.builders.counting import Row
from pptrace.schedule.builders.dualpipe_steps import append_steps
from pptrace.schedule.placement import zigzag
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape, require_two_chunks

NAME = "dualpipe"


def build(shape: Shape) -> Plan:
    require_two_chunks(NAME, shape)
    _require_legal(shape.pp, shape.num_microbatches)
    return make_plan(NAME, (_rank_actions(shape, rank) for rank in range(shape.pp)))


def _rank_actions(shape: Shape, rank: int) -> list[Action]:
    p, half = shape.pp, shape.num_microbatches // 2
    first, second = (zigzag(chunk, rank, p) for chunk in (0, 1))
    near, far = (first, second) if rank < p // 2 else (second, first)
    row = Row({first: 0, second: 1}, {second: half})
    append_steps(row, near, far, min(rank, p - 1 - rank), p // 2, half)
    return row.actions


def _require_legal(p: int, m: int) -> None:
    if p % 2:
        raise ShapeError(f"{NAME}: p={p}; expected an even number of ranks: try p={p + 1} (or dualpipe-v)")
    if m % 2 or m < 2 * p:
        legal = max(2 * p, m + m % 2)
        raise ShapeError(
            f"{NAME}: {m} microbatches over p={p}; expected an even number, at least 2p={2 * p}: try m={legal}"
        )
