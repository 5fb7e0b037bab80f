"""1F1B (PipeDream-flush): one forward, one backward, with at most p−r microbatches in flight on rank r.

Source: Narayanan et al. (arXiv 2104.04473); Megatron-LM ``forward_backward_pipelining_without_interleaving``.
"""

from __future__ import annotations

from pptrace.schedule.actions import Action
from pptrace.schedule.builders.pairing import one_forward_one_backward
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape, require_one_chunk

NAME = "1f1b"


def num_warmup_forwards(pp: int, rank: int, num_microbatches: int) -> int:
    """Megatron's rule: min(p − r − 1, m)."""
    return min(pp - rank - 1, num_microbatches)


def build(shape: Shape) -> Plan:
    require_one_chunk(NAME, shape)
    return make_plan(NAME, (_rank_actions(shape, rank) for rank in range(shape.pp)))


def _rank_actions(shape: Shape, rank: int) -> list[Action]:
    order = [(rank, microbatch, 0) for microbatch in range(shape.num_microbatches)]
    return one_forward_one_backward(order, order, num_warmup_forwards(shape.pp, rank, shape.num_microbatches))
