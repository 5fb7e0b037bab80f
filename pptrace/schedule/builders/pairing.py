"""The order that all 1F1B schedules share: warmup forwards, forward-backward pairs, the remaining backwards."""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.schedule.actions import Action, Kind, Phase

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
