"""Name a plan after the registered schedule with the same order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pptrace.errors import ScheduleError
from pptrace.schedule import registry
from pptrace.schedule.actions import Action, Key, Kind
from pptrace.schedule.plan import Plan


def match_registry(plan: Plan) -> Plan:
    """The registry's plan with the same actions in the same order, which has a name and exact phases; else the plan itself.

    One microbatch makes the same plan of several schedules; then the plan's own name decides.
    """
    wanted = _keys(plan)
    return next((built for built in _variants(plan) if _keys(built) == wanted), plan)


def match_reversed(plan: Plan) -> Plan | None:
    """The registry's plan that a plan is but for its backwards, which run the microbatches in the opposite order; None if none.

    GPipe often runs them from the last to the first, in its paper's figure 2 too (arXiv 1811.06965): what the last forwards keep
    is freed first. Plans of a search have no usual order.
    """
    wanted = _keys(plan)
    variants = (_reversed(built) for built in _variants(plan) if not registry.get(built.name).searches)
    return next((built for built in variants if _keys(built) == wanted), None)


def _keys(plan: Plan) -> list[list[Key]]:
    return [[action.key for action in plan.compute_actions(rank)] for rank in range(plan.pp)]


def _reversed(plan: Plan) -> Plan:
    last = plan.num_microbatches - 1

    def turned(action: Action) -> Action:
        if action.kind is Kind.F or action.parts or action.microbatch is None:
            return action
        return replace(action, microbatch=last - action.microbatch)

    return replace(plan, ranks=tuple(tuple(map(turned, row)) for row in plan.ranks))


def _variants(plan: Plan) -> Iterator[Plan]:
    """The registry's plans of a plan's shape, those of its own name first."""
    variants: list[tuple[int | None, bool]]
    variants = [(None, False)]
    if plan.num_chunks > 1:
        variants += [(_first_group(plan), False), (None, True)]
    for entry in sorted(registry.SCHEDULES.values(), key=lambda entry: entry.name != plan.name):
        for group_size, lean in variants:
            try:
                yield registry.build(entry.name, plan.pp, plan.num_microbatches, plan.num_chunks, group_size, lean)
            except ScheduleError:
                continue


def _first_group(plan: Plan) -> int:
    """Number of actions that the first rank runs on its first stage before it turns to another."""
    first = plan.compute_actions(0)
    return next((index for index, action in enumerate(first) if action.stage != first[0].stage), len(first))
