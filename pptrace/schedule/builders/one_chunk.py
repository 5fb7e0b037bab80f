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

All 1F1B schedules, interleaved ones too, share an order: warmup forwards, forward-backward pairs, the remaining backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pptrace.schedule.actions import Action, Kind, Phase
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape, require_one_chunk

Virtual = tuple[int, int, int]
"""(stage, microbatch, chunk) of one virtual microbatch."""


def one_forward_one_backward(
    forwards: Sequence[Virtual], backwards: Sequence[Virtual], num_warmup: int
) -> list[Action]:
    """``num_warmup`` forwards, then (forward, backward) pairs while forwards last, then the remaining backwards.

    The three parts are tagged warmup, steady and cooldown. When the warmup covers all forwards there is no steady phase.
    """
    num_steady = len(forwards) - num_warmup
    forward, backward, steady = Kind.F, Kind.B, Phase.STEADY
    actions = [Action(forward, stage, mb, chunk, Phase.WARMUP) for stage, mb, chunk in forwards[:num_warmup]]
    for pair in zip(forwards[num_warmup:], backwards[:num_steady], strict=True):
        (stage, mb, chunk), (backward_stage, backward_mb, backward_chunk) = pair
        actions.append(Action(forward, stage, mb, chunk, steady))
        actions.append(Action(backward, backward_stage, backward_mb, backward_chunk, steady))
    actions += [Action(backward, stage, mb, chunk, Phase.COOLDOWN) for stage, mb, chunk in backwards[num_steady:]]
    return actions


def overlapped_pairs(forwards: Sequence[Virtual], backwards: Sequence[Virtual], num_warmup: int) -> list[Action]:
    """:func:`one_forward_one_backward` with the forward and the backward of each pair as one action."""
    actions = one_forward_one_backward(forwards, backwards, num_warmup)
    end = num_warmup + 2 * (len(forwards) - num_warmup)
    pairs = zip(actions[num_warmup:end:2], actions[num_warmup + 1 : end : 2], strict=True)
    steady = [
        Action(Kind.OVERLAP_F_B, forward.stage, forward.microbatch, forward.chunk, forward.phase, (forward, backward))
        for forward, backward in pairs
    ]
    return [*actions[:num_warmup], *steady, *actions[end:]]


def one_forward_one_input_grad(
    forwards: Sequence[Virtual], backwards: Sequence[Virtual], num_warmup: int, weight_lag: int
) -> list[Action]:
    """Alternate as :func:`one_forward_one_backward` does, with each backward split: W of a microbatch follows ``weight_lag``
    I's later.

    The remaining W's come at the end. ``num_warmup`` and ``weight_lag`` are all that ZB-H1, ZB-H2 and their interleaved
    form differ in; a rank holds ``num_warmup + 1 + weight_lag`` activations at most.
    """
    num_steady = len(forwards) - num_warmup
    actions = [Action(Kind.F, *forward, Phase.WARMUP) for forward in forwards[:num_warmup]]
    for index, backward in enumerate(backwards):
        phase = Phase.STEADY if index < num_steady else Phase.COOLDOWN
        if index < num_steady:
            actions.append(Action(Kind.F, *forwards[num_warmup + index], phase))
        actions.append(Action(Kind.I, *backward, phase))
        if index >= weight_lag:
            actions.append(Action(Kind.W, *backwards[index - weight_lag], phase))
    first_left = max(0, len(backwards) - weight_lag)
    return actions + [Action(Kind.W, *backward, Phase.COOLDOWN) for backward in backwards[first_left:]]


GPIPE, ONE_F_ONE_B, EAGER, H1, H2 = "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"


def build_gpipe(shape: Shape) -> Plan:
    """m forwards, then m backwards on every rank. The forwards are the warmup, the backwards the cooldown."""
    return _build(GPIPE, shape, lambda _rank: shape.num_microbatches)


def build_1f1b(shape: Shape) -> Plan:
    return _build(ONE_F_ONE_B, shape, lambda rank: shape.pp - rank - 1)


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
