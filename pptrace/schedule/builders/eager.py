"""Eager 1F1B: 1F1B with twice the warmup. The same time, more memory: a message may be late without anyone waiting for it.

Source: Zhuang et al., On Optimizing the Communication of Model Parallelism (arXiv 2211.05322), eager-1F1B.
"""

from __future__ import annotations

from pptrace.schedule.actions import Action
from pptrace.schedule.builders.pairing import one_forward_one_backward
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape, require_one_chunk

NAME = "eager-1f1b"


def build(shape: Shape) -> Plan:
    require_one_chunk(NAME, shape)
    return make_plan(NAME, (_rank_actions(shape, rank) for rank in range(shape.pp)))


def _rank_actions(shape: Shape, rank: int) -> list[Action]:
    order = [(rank, microbatch, 0) for microbatch in range(shape.num_microbatches)]
    num_warmup = min(2 * (shape.pp - rank - 1), shape.num_microbatches)
    return one_forward_one_backward(order, order, num_warmup)
