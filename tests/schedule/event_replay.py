"""A replay action by action, as an oracle: ranks run one after the other, each as far as it can go.

What an action needs comes from the messages of the plan and from what a backward reads on its own stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pptrace.schedule.actions import Action, Key, Kind
from pptrace.schedule.messages import message_of_op
from pptrace.schedule.plan import Plan

Span = tuple[int, int]


def replay_events(
    plan: Plan, duration: Callable[[int, Action], int], latency: Callable[[Action, int, int], int]
) -> list[list[Span]]:
    """(start, end) of every action that runs, rank by rank."""
    ended: dict[Key, int] = {}
    spans: list[list[Span]] = [[] for _ in plan.ranks]
    is_stuck = False
    while not is_stuck:
        is_stuck = True
        for rank, row in enumerate(spans):
            for action in plan.compute_actions(rank)[len(row) :]:
                arrivals = [_arrival(plan, keys, rank, ended, latency) for keys in needed_keys(plan, action)]
                if None in arrivals:
                    break
                start = max([row[-1][1] if row else 0, *(arrival for arrival in arrivals if arrival is not None)])
                row.append((start, start + duration(rank, action)))
                for half in action.halves:
                    ended.setdefault(half.key, row[-1][1])
                is_stuck = False
    return spans


def _arrival(
    plan: Plan,
    keys: list[Key],
    rank: int,
    ended: dict[Key, int],
    latency: Callable[[Action, int, int], int],
) -> int | None:
    key = next((key for key in keys if key in ended), None)
    if key is None:
        return None
    source = plan.placement[key[1]]
    return ended[key] + (latency(plan.by_key[key][1], source, rank) if source != rank else 0)


def needed_keys(plan: Plan, action: Action) -> Iterator[list[Key]]:
    """For each dependency the keys of which any one satisfies it."""
    for half in action.halves:
        if half.kind in (Kind.B, Kind.I):
            yield [(Kind.F, half.stage, half.microbatch)]
        if half.kind is Kind.W:
            yield [(Kind.I, half.stage, half.microbatch)]
        if message := message_of_op(plan, half, sends=False):
            yield [(kind, message.source_stage, half.microbatch) for kind in message.direction.producers]
