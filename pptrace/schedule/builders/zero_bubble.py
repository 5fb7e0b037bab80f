"""ZB-H1 and ZB-H2: 1F1B with the backward split into I and W, the W's moved to where 1F1B would wait.

H1 keeps the memory of 1F1B (p microbatches on every rank). H2 starts with 2(p−r)−1 forwards and holds up to 2p−1: when
f = i = w no rank waits between its first and its last action. Ranks then start and end staggered by f, so the gain over H1
needs an optimizer step without a barrier (see the paper's post-validation).

Source: Qi et al. (arXiv 2401.10241), sections 2.1 and 2.2.
"""

from __future__ import annotations

from pptrace.schedule.actions import Action
from pptrace.schedule.builders.pairing import one_forward_one_input_grad
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape, require_one_chunk

H1, H2 = "zb-h1", "zb-h2"


def build_h1(shape: Shape) -> Plan:
    require_one_chunk(H1, shape)
    return make_plan(H1, (_rank_actions(shape, rank, shape.pp - rank - 1, rank) for rank in range(shape.pp)))


def build_h2(shape: Shape) -> Plan:
    require_one_chunk(H2, shape)
    return make_plan(H2, (_rank_actions(shape, rank, 2 * (shape.pp - rank - 1), 2 * rank) for rank in range(shape.pp)))


def _rank_actions(shape: Shape, rank: int, num_warmup: int, weight_lag: int) -> list[Action]:
    order = [(rank, microbatch, 0) for microbatch in range(shape.num_microbatches)]
    return one_forward_one_input_grad(order, order, min(num_warmup, shape.num_microbatches), weight_lag)
