"""The plan that a run followed, and where it left it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from pptrace.errors import ScheduleError
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import PlanSource, ScheduleInfo
from pptrace.model.tables import COMPUTE_KINDS, Int64
from pptrace.model.wording import numbered
from pptrace.recognise.schedule.closest_match import MIN_SHARE, ClosestSchedule, closest_schedule
from pptrace.recognise.schedule.exact_match import match_registry, match_reversed
from pptrace.recognise.schedule.measured_steps import MeasuredStep, measured_steps, most_complete
from pptrace.recognise.schedule.plan_per_step import plans_by_step
from pptrace.schedule import registry
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import replay
from pptrace.schedule.text import from_rows

_NOTHING = ScheduleInfo(None, "unknown", PlanSource.NONE)


def recognise_schedule(
    ops: pd.DataFrame, mesh: MeshInfo, metadata: Sequence[Mapping[str, object]], wanted: str | None
) -> ScheduleInfo:
    """The plan named by ``wanted``, else the one in the metadata, else the one that the ops follow.

    Raises:
        UsageError: ``wanted`` names no schedule.
        ScheduleError: ``wanted`` is illegal for the run's p, m and v.
    """
    measured = measured_steps(ops, mesh)
    rows, name = _metadata_rows(metadata)
    if wanted is not None:
        entry = registry.get(wanted)
        pp, m, v = _shape(rows, measured)
        return _compared_in_training(registry.build(entry.name, pp, m, v), PlanSource.OPTION, measured)
    if rows is not None:
        try:
            plan = match_registry(from_rows(rows, name, where="the trace's metadata"))
        except ScheduleError as err:
            return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(f"the plan in the metadata: {err}",))
        return _compared_in_training(plan, PlanSource.METADATA, measured)
    if not measured:
        return _NOTHING
    training = [step for step in measured if not only_forwards(step)]
    if not training:
        reason = "no schedule recognised: the steps have forwards only, as in evaluation"
        return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(reason,))
    return _without_evaluations(_recognised(training, ops, mesh), training, measured)


def _compared_in_training(plan: Plan, source: PlanSource, measured: Sequence[MeasuredStep]) -> ScheduleInfo:
    """The plan compared with all steps but those of evaluation, unless the plan is one of evaluation itself."""
    trains = bool((plan.table.kind != Kind.F.code).any())
    training = [step for step in measured if not only_forwards(step)] if trains else measured
    return _without_evaluations(compare_with_plan(plan, source, training), training, measured)


def _without_evaluations(
    schedule: ScheduleInfo, training: Sequence[MeasuredStep], measured: Sequence[MeasuredStep]
) -> ScheduleInfo:
    """The schedule with a line on the steps that only evaluate, where there are any."""
    evaluated = sorted({step.step for step in measured} - {step.step for step in training})
    if not evaluated:
        return schedule
    line = f"step {numbered(evaluated)} has forwards only, as in evaluation: not compared with the schedule"
    return replace(schedule, warnings=(*schedule.warnings, line))


def only_forwards(step: MeasuredStep) -> bool:
    kinds = step.ops.rows["kind"]
    return all(bool((kinds[slice(*bounds)] == Kind.F).all()) for bounds in step.bounds)


def _recognised(measured: Sequence[MeasuredStep], ops: pd.DataFrame, mesh: MeshInfo) -> ScheduleInfo:
    """The plan that the most complete step follows, else the closest of the registry, else that step's own order."""
    best = most_complete(measured)
    plan, problem = _plan_of(best)
    if plan is not None and plan.name in registry.SCHEDULES:
        return compare_with_plan(plan, PlanSource.RECOGNISED, measured)
    turned = None if plan is None else match_reversed(plan)
    if turned is not None:
        line = f"the run follows {turned.name}, but its backwards run the microbatches in the opposite order"
        return compare_with_plan(turned, PlanSource.RECOGNISED, measured, (line,))
    closest = closest_to_step(best, ops, mesh)
    if closest is not None and closest.share >= MIN_SHARE:
        line = (
            f"the run follows {closest.plan.name} in {closest.share:.0%} of its ops: the ideal figures are of that "
            "plan; see the schedule's mismatches"
        )
        warnings = () if closest.share == 1 else (line,)
        return compare_with_plan(closest.plan, PlanSource.RECOGNISED, measured, warnings)
    closest_text = (
        f"; the closest, {closest.plan.name}, has {closest.share:.0%} of the ops in this order" if closest else ""
    )
    if plan is None:
        return ScheduleInfo(
            None, "unknown", PlanSource.NONE, warnings=(f"no schedule recognised: {problem}{closest_text}",)
        )
    line = f"the order of ops matches no known schedule{closest_text}"
    return compare_with_plan(plan, PlanSource.RECOGNISED, measured, (line,))


def compare_with_plan(
    plan: Plan, source: PlanSource, measured: Sequence[MeasuredStep], warnings: tuple[str, ...] = ()
) -> ScheduleInfo:
    """The plan with its mismatches, by step."""
    plan_by_step = plans_by_step(plan, measured)
    info = ScheduleInfo(plan, plan.name, source, _differences(plan, measured, plan_by_step), warnings, plan_by_step)
    with_plan = [step for step, step_plan in plan_by_step.items() if step_plan is not None]
    without_plan = [step for step, step_plan in plan_by_step.items() if step_plan is None]
    if with_plan:
        numbers = numbered(with_plan)
        line = f"step {numbers} has another number of microbatches: compared with {plan.name} of that number"
        info = replace(info, warnings=(*info.warnings, line))
    if without_plan:
        numbers = numbered(without_plan)
        line = f"step {numbers} has another number of microbatches, for which {plan.name} has no plan: not compared"
        info = replace(info, warnings=(*info.warnings, line))
    return info


def _plan_of(step: MeasuredStep) -> tuple[Plan | None, str]:
    """(plan of a step's order, ""), or (None, reason)."""
    try:
        plan = match_registry(from_rows(step.rows, "custom"))
    except ScheduleError as err:
        return None, str(err)
    if blocked := replay(plan).blocked:
        stuck = blocked[0]
        return None, f"in the measured order op {stuck.index + 1} of pipeline rank {stuck.rank} would deadlock"
    return plan, ""


def closest_to_step(step: MeasuredStep, ops: pd.DataFrame, mesh: MeshInfo) -> ClosestSchedule | None:
    compute = ops[ops["kind"].isin(COMPUTE_KINDS) & (ops["stage"] >= 0) & (ops["microbatch"] >= 0)]
    if compute.empty:
        return None
    num_stages, num_microbatches = int(compute["stage"].max()) + 1, int(compute["microbatch"].max()) + 1
    chunks = int(compute.groupby("rank")["stage"].nunique().max())
    pp = max(max(step.pp_ranks) + 1, mesh.pp or 1, -(-num_stages // chunks))
    return closest_schedule(step.rows, step.pp_ranks, pp, num_microbatches, chunks)


def _differences(
    plan: Plan, measured: Sequence[MeasuredStep], plan_by_step: Mapping[int, Plan | None]
) -> tuple[str, ...]:
    """Describe for each rank the first position where its order leaves the plan, with the steps in which it does; () when
    none does.

    An order that only stops early does not leave the plan: the trace was cut off. ``others`` are the plans of steps that have
    another than ``plan``.
    """
    by_line: dict[str, list[int]] = {}
    keys: dict[int, list[tuple[Int64, Int64]]] = {}
    for step in measured:
        step_plan = plan_by_step.get(step.step, plan)
        if step_plan is None:
            continue
        if id(step_plan) not in keys:
            keys[id(step_plan)] = step.ops.planned_keys(step_plan)
        for line in _differences_of_step(step_plan, step, keys[id(step_plan)]):
            by_line.setdefault(line, []).append(step.step)
    every = {step.step for step in measured}
    return tuple(
        line if set(steps) == every else f"{line} (in step {numbered(set(steps))})" for line, steps in by_line.items()
    )


def _differences_of_step(plan: Plan, step: MeasuredStep, wanted: Sequence[tuple[Int64, Int64]]) -> Iterator[str]:
    """The differences of one step; ``wanted`` are the plan's keys by pipeline rank."""
    if max(step.pp_ranks) >= plan.pp:
        yield f"the plan has {plan.pp} pipeline ranks, the trace has {max(step.pp_ranks) + 1}"
    keys, pairs = step.ops.keys
    for index, (pp_rank, rank, (first, last)) in enumerate(zip(step.pp_ranks, step.ranks, step.bounds, strict=True)):
        if pp_rank >= plan.pp:
            continue
        planned_keys, planned_pairs = wanted[pp_rank]
        size = min(last - first, len(planned_keys))
        is_same = np.array_equal(keys[first : first + size], planned_keys[:size])
        is_same = is_same and np.array_equal(pairs[first : first + size], planned_pairs[:size])
        if is_same and last - first <= len(planned_keys):
            continue
        actual = step.cells_of(index)
        planned = [str(action) for action in plan.compute_actions(pp_rank)]
        both = enumerate(zip(planned, actual, strict=False))
        first_difference = next((position for position, (wanted_cell, cell) in both if wanted_cell != cell), None)
        if first_difference is not None:
            yield (
                f"rank {rank}: op {first_difference + 1} is {actual[first_difference]} where {plan.name} has "
                f"{planned[first_difference]}"
            )
        elif len(actual) > len(planned):
            yield f"rank {rank}: {len(actual)} ops where {plan.name} has {len(planned)}"


def _shape(rows: list[list[str]] | None, measured: Sequence[MeasuredStep]) -> tuple[int, int, int]:
    """(p, m, v) of the run: of its own plan where it has one, else of what was measured."""
    if rows is not None:
        plan = from_rows(rows, "the plan in the metadata")
    elif measured:
        plan = from_rows(most_complete(measured).rows, "the measured run")
    else:
        raise ScheduleError("schedule: the trace shows no forward or backward of any microbatch to compare with")
    return plan.pp, plan.num_microbatches, plan.num_chunks


def _metadata_rows(metadata: Sequence[Mapping[str, object]]) -> tuple[list[list[str]] | None, str]:
    for facts in metadata:
        plan = facts.get("plan")
        if not isinstance(plan, Mapping):
            continue
        rows = plan.get("rows")
        if isinstance(rows, list) and all(isinstance(row, list) for row in rows):
            return [[str(cell) for cell in row] for row in rows], str(plan.get("name", "custom"))
    return None, ""
