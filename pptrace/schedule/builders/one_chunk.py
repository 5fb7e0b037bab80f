"""Schedules of one stage per rank: GPipe, 1F1B, eager 1F1B, ZB-H1 and ZB-H2. They differ in how many forwards a rank starts with,
and in whether the backward is split.

GPipe is all forwards, then all backwards (all-forward-all-backward, FthenB). 1F1B (PipeDream-flush) has at most p−r microbatches
in flight on rank r; eager 1F1B starts with twice as many: the same time, more memory, and a message may be late without anyone
waiting for it. ZB-H1 and ZB-H2 move the W's to where 1F1B would wait. H1 keeps the memory of 1F1B (p microbatches on every rank);
H2 starts with 2(p−r)−1 forwards and holds up to 2p−1: when f = i = w no rank waits between its first and its last action. Ranks
then start and end staggered by f, so the gain over H1 needs an optimizer step without a barrier (the paper's post-validation).

Sources: Huang et al., GPipe (arXiv 1811.06965); Narayanan et al. (arXiv 2104.04473) and Megatron-LM
``forward_backward_pipelining_without_interleaving``; Zhuang et al. (arXiv 2211.05322), eager-1F1B; Qi et al. (arXiv 2401.10241),
sections 2.1 and 2.2; torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Callable

from pptrace.schedule.builders.pairing import one_forward_one_backward, one_forward_one_input_grad
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape, require_one_chunk

GPIPE, ONE_F_ONE_B, EAGER, H1, H2 = "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"


def num_warmup_forwards(pp: int, rank: int, num_microbatches: int) -> int:
    """Megatron's rule of 1F1B: min(p − r − 1, m)."""
    return min(pp - rank - 1, num_microbatches)


def build_gpipe(shape: Shape) -> Plan:
    """m forwards, then m backwards on every rank. The forwards are the warmup, the backwards the cooldown."""
    return _build(GPIPE, shape, lambda _rank: shape.num_microbatches)


def build_1f1b(shape: Shape) -> Plan:
    return _build(ONE_F_ONE_B, shape, lambda rank: num_warmup_forwards(shape.pp, rank, shape.num_microbatches))


def build_eager(shape: Shape) -> Plan:
    return _build(EAGER, shape, lambda rank: 2 * (shape.pp - rank - 1))


def build_h1(shape: Shape) -> Plan:
    return _build(H1, shape, lambda rank: shape.pp - rank - 1, weight_lag=1)


def build_h2(shape: Shape) -> Plan:
    return _build(H2, shape, lambda rank: 2 * (shape.pp - rank - 1), weight_lag=2)


def _build(name: str, shape: Shape, num_warmup: Callable[[int], int], weight_lag: int = 0) -> Plan:
    """A plan of at most ``num_warmup`` of a rank forwards first. With a ``weight_lag`` the backward is split, and the W of a
    microbatch follows so many I's later for each rank before this one.
    """
    require_one_chunk(name, shape)
    rows = []
    for rank in range(shape.pp):
        order = [(rank, microbatch, 0) for microbatch in range(shape.num_microbatches)]
        warmup = min(num_warmup(rank), shape.num_microbatches)
        if weight_lag:
            rows.append(one_forward_one_input_grad(order, order, warmup, weight_lag * rank))
        else:
            rows.append(one_forward_one_backward(order, order, warmup))
    return make_plan(name, rows)
