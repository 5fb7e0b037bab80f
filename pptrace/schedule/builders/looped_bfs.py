"""Looped BFS (breadth-first pipeline): each chunk runs all its microbatches before the next chunk starts.

The backward takes the chunks from last to first, and within a chunk the microbatches from last to first: the paper draws
them in order, torch runs them in reverse, and this is torch's order.

Source: Lamy-Poirier (arXiv 2211.05953); torch.distributed.pipelining.ScheduleLoopedBFS.
"""

from __future__ import annotations

from pptrace.errors import ShapeError
from pptrace.schedule.actions import Action, Kind, Phase
from pptrace.schedule.placement import loop
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape

NAME = "looped-bfs"


def build(shape: Shape) -> Plan:
    """m forwards per chunk, then m backwards per chunk. The forwards are the warmup, the backwards the cooldown."""
    _require_legal(shape)
    return make_plan(NAME, (_rank_actions(shape, rank) for rank in range(shape.pp)))


def _rank_actions(shape: Shape, rank: int) -> list[Action]:
    chunks, microbatches = range(shape.num_chunks), range(shape.num_microbatches)
    return [
        Action(Kind.F, loop(chunk, rank, shape.pp), mb, chunk, Phase.WARMUP) for chunk in chunks for mb in microbatches
    ] + [
        Action(Kind.B, loop(chunk, rank, shape.pp), mb, chunk, Phase.COOLDOWN)
        for chunk in reversed(chunks)
        for mb in reversed(microbatches)
    ]


def _require_legal(shape: Shape) -> None:
    m = shape.num_microbatches
    if shape.num_chunks < 2:
        raise ShapeError(f"{NAME}: {shape.num_chunks} chunk per rank; expected at least 2 (or use gpipe)")
    if shape.group_size not in (None, m):
        raise ShapeError(f"{NAME}: group size {shape.group_size} with m={m}; breadth-first has one group of all m={m}")
    if shape.lean:
        raise ShapeError(f"{NAME}: the lean warmup belongs to interleaved-1f1b")
