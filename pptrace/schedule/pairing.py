"""The shape that all 1F1B schedules share: some forwards, forward-backward pairs, the rest of the backwards."""

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
    actions = [Action(Kind.F, *forward, Phase.WARMUP) for forward in forwards[:num_warmup]]
    for forward, backward in zip(forwards[num_warmup:], backwards[:num_steady], strict=True):
        actions.append(Action(Kind.F, *forward, Phase.STEADY))
        actions.append(Action(Kind.B, *backward, Phase.STEADY))
    actions += [Action(Kind.B, *backward, Phase.COOLDOWN) for backward in backwards[num_steady:]]
    return actions
