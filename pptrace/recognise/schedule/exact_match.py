"""Name a plan after the registered schedule with the same order."""

from __future__ import annotations

from pptrace.errors import ScheduleError
from pptrace.schedule import registry
from pptrace.schedule.plan import Plan


def match_registry(plan: Plan) -> Plan:
    """The registry's plan with the same actions in the same order, which has a name and exact phases; else the plan itself.

    One microbatch makes the same plan of several schedules; then the plan's own name decides.
    """
    wanted = [[action.key for action in plan.compute_actions(rank)] for rank in range(plan.pp)]
    variants: list[tuple[int | None, bool]]
    variants = [(None, False)]
    if plan.num_chunks > 1:
        variants += [(_first_group(plan), False), (None, True)]
    for entry in sorted(registry.SCHEDULES.values(), key=lambda entry: entry.name != plan.name):
        for group_size, lean in variants:
            try:
                built = registry.build(entry.name, plan.pp, plan.num_microbatches, plan.num_chunks, group_size, lean)
            except ScheduleError:
                continue
            if [[action.key for action in row] for row in built.ranks] == wanted:
                return built
    return plan


def _first_group(plan: Plan) -> int:
    """Number of actions that the first rank runs on its first stage before it turns to another."""
    first = plan.compute_actions(0)
    return next((index for index, action in enumerate(first) if action.stage != first[0].stage), len(first))
