"""The registry's plans that a plan or a step follows: the one with the same order, and that of another number of microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pptrace.errors import ScheduleError
from pptrace.recognise.schedule.measured_steps import MeasuredStep
from pptrace.schedule import registry
from pptrace.schedule.actions import Action, Key, Kind, iter_halves, parse_action
from pptrace.schedule.plan import Plan
from pptrace.schedule.text import from_rows


def match_registry(plan: Plan) -> Plan:
    """The registry's plan with the same actions in the same order, which has a name and exact phases; else the plan itself.

    One microbatch makes the same plan of several schedules; then the plan's own name decides.
    """
    keys = _keys(plan)
    return next((built for built in _variants(plan) if _keys(built) == keys), plan)


def match_reversed(plan: Plan) -> Plan | None:
    """The registry's plan that a plan is but for its backwards, which run the microbatches in the opposite order; None if none.

    GPipe often runs them from the last to the first, in its paper's figure 2 too (arXiv 1811.06965): what the last forwards keep
    is freed first. Plans of a search have no usual order.
    """
    last = plan.num_microbatches - 1

    def turned(action: Action) -> Action:
        if action.kind is Kind.F or action.parts or action.microbatch is None:
            return action
        return replace(action, microbatch=last - action.microbatch)

    keys = _keys(plan)
    for built in _variants(plan):
        if not registry.get(built.name).searches:
            reversed_plan = replace(built, ranks=tuple(tuple(map(turned, row)) for row in built.ranks))
            if _keys(reversed_plan) == keys:
                return reversed_plan
    return None


def _keys(plan: Plan) -> list[list[Key]]:
    return [[action.key for action in plan.compute_actions(rank)] for rank in range(plan.pp)]


def _variants(plan: Plan) -> Iterator[Plan]:
    """The registry's plans of a plan's shape, those of its own name first."""
    variants: list[tuple[int | None, bool]] = [(None, False)]
    if plan.num_chunks > 1:
        # Groups of microbatches: as many actions as the first rank runs on its first stage before it turns to another.
        first = plan.compute_actions(0)
        group = next((index for index, action in enumerate(first) if action.stage != first[0].stage), len(first))
        variants += [(group, False), (None, True)]
    for entry in sorted(registry.SCHEDULES.values(), key=lambda entry: entry.name != plan.name):
        for group_size, lean in variants:
            try:
                yield registry.build(entry.name, plan.pp, plan.num_microbatches, plan.num_chunks, group_size, lean)
            except ScheduleError:
                continue


def plans_by_step(plan: Plan, measured: Sequence[MeasuredStep]) -> dict[int, Plan | None]:
    """Plans by step: ``plan`` with another number of microbatches, where a step has so many on all of its ranks.

    None for a step with so many that the schedule has no plan for them, or is none of the registry.
    """
    plans: dict[int, Plan | None] = {}
    counts: dict[int, set[int | None]] = {}
    for step in measured:
        counts.setdefault(step.step, set()).add(_num_microbatches(plan, step))
    for step in measured:
        count = counts[step.step]
        if step.step not in plans and len(count) == 1 and None not in count and plan.num_microbatches not in count:
            plans[step.step] = _with_microbatches(plan, max(filter(None, count)), step)
    return plans


def _num_microbatches(plan: Plan, step: MeasuredStep) -> int | None:
    """Number of microbatches of a step: the plan's, unless every rank has all ops of another number on all of its stages."""
    planned = np.diff(plan.table.rank_ptr)
    lengths = zip(step.pp_ranks, step.bounds, strict=True)
    if all(last - first == planned[pp_rank] for pp_rank, (first, last) in lengths if pp_rank < plan.pp):
        return plan.num_microbatches
    pairs = [(pp_rank, row) for pp_rank, row in zip(step.pp_ranks, step.rows, strict=True) if pp_rank < plan.pp]
    counts = {_num_complete_microbatches(plan, pp_rank, tuple(map(parse_action, row))) for pp_rank, row in pairs}
    return counts.pop() if len(counts) == 1 else None


def _num_complete_microbatches(plan: Plan, pp_rank: int, row: tuple[Action, ...]) -> int | None:
    """Number of microbatches whose forwards and backwards a rank ran on each of its stages; None if some are missing."""
    halves = [half for half in iter_halves(row) if half.kind in (Kind.F, Kind.B, Kind.I)]
    forwards = Counter(half.stage for half in halves if half.kind is Kind.F)
    backwards = Counter(half.stage for half in halves if half.kind is not Kind.F)
    microbatches = {half.microbatch for half in halves}
    count = len(microbatches)
    if microbatches != set(range(count)) or forwards != backwards or set(forwards) != set(plan.stages_of(pp_rank)):
        return None
    share = {number * plan.num_chains for number in forwards.values()}
    return count if share == {count} else None


def _with_microbatches(plan: Plan, count: int, step: MeasuredStep) -> Plan | None:
    """The same schedule with so many microbatches: the variant that the step follows, else the usual one."""
    if plan.name not in registry.SCHEDULES:
        return None
    try:
        measured = from_rows(step.rows, plan.name)
    except ScheduleError:
        return with_num_microbatches(plan, count)  # ranks without a trace leave gaps
    followed = match_registry(measured)
    if followed is measured:
        followed = match_reversed(measured) or measured
    if followed is not measured and followed.name == plan.name and followed.pp == plan.pp:
        return followed
    return with_num_microbatches(plan, count)


def with_num_microbatches(plan: Plan, count: int) -> Plan | None:
    """The plan of the same schedule with another number of microbatches; None if there is none."""
    if plan.name not in registry.SCHEDULES:
        return None
    try:
        return registry.build(plan.name, plan.pp, count, plan.num_chunks)
    except ScheduleError:
        return None
