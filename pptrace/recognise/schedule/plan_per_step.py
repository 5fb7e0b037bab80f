"""Plans of single steps with another number of microbatches than most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pptrace.errors import ScheduleError
from pptrace.recognise.schedule.exact_match import match_registry, match_reversed
from pptrace.recognise.schedule.measured_steps import MeasuredStep
from pptrace.schedule import registry
from pptrace.schedule.actions import Action, Kind, iter_halves, parse_action
from pptrace.schedule.plan import Plan
from pptrace.schedule.text import from_rows


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
