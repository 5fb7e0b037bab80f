"""The plan that a run followed, and where it left it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import pandas as pd
from msgspec.structs import replace

from pptrace.errors import ScheduleError
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import PlanSource, ScheduleInfo
from pptrace.model.tables import COMPUTE_KINDS, Int64
from pptrace.model.wording import as_ranges, listed
from pptrace.recognise.schedule.measured_steps import (
    MeasuredStep,
    built_plan,
    match_registry,
    match_reversed,
    match_runs,
    measured_steps,
    most_complete,
    plans_by_step,
)
from pptrace.schedule import registry
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import replay
from pptrace.schedule.text import from_rows
from pptrace.slices import rows_among

_MIN_SHARE = 0.6
"""A run is named after a plan only if at least this share of its ops is in the plan's order."""
_FEW_STEPS = 4


def recognise_schedule(
    ops: pd.DataFrame, mesh: MeshInfo, metadata: Sequence[Mapping[str, object]], name: str | None
) -> ScheduleInfo:
    """The plan of this name, else the one in the metadata, else the one that the ops follow.

    Raises:
        UsageError: no schedule has the name.
        ScheduleError: it is illegal for the run's p, m and v.
    """
    measured = measured_steps(ops, mesh)
    rows, name_in_metadata = _metadata_rows(metadata)
    if name is not None:
        entry = registry.get(name)
        if rows is not None:
            shape = from_rows(rows, "the plan in the metadata")
        elif measured:
            shape = from_rows(most_complete(measured).rows, "the measured run")
        else:
            raise ScheduleError("schedule: the trace shows no forward or backward of any microbatch to compare with")
        plan = registry.build(entry.name, shape.pp, shape.num_microbatches, shape.num_chunks)
        return _compared_in_training(plan, PlanSource.OPTION, measured)
    if rows is not None:
        try:
            plan = match_registry(from_rows(rows, name_in_metadata, where="the trace's metadata"))
        except ScheduleError as err:
            return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(f"the plan in the metadata: {err}",))
        return _compared_in_training(plan, PlanSource.METADATA, measured)
    if not measured:
        return ScheduleInfo(None, "unknown", PlanSource.NONE)
    training = [step for step in measured if not only_forwards(step)]
    if not training:
        reason = "no schedule recognised: the steps have forwards only, as in evaluation"
        return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(reason,))
    return _without_evaluations(_recognised(training, ops, mesh), training, measured)


def _compared_in_training(plan: Plan, source: PlanSource, measured: Sequence[MeasuredStep]) -> ScheduleInfo:
    """The plan compared with all steps but those of evaluation, unless the plan is one of evaluation itself."""
    trains = bool((plan.table.kind != Kind.F.code).any())
    training = [step for step in measured if not only_forwards(step)] if trains else measured
    repeated = _several_times(plan, training)
    compared = compare_with_plan(plan, source, training) if repeated is None else _as_runs(*repeated, source, training)
    return _without_evaluations(compared, training, measured)


def _several_times(plan: Plan, measured: Sequence[MeasuredStep]) -> tuple[Plan, tuple[Plan, ...]] | None:
    """(order of the most complete step, the plans that it runs one after another), where it runs the plan several times."""
    if not measured or (best := most_complete(measured)).num_ops <= len(plan.table.kind):
        return None
    order, _ = _plan_of(best)
    runs = match_runs(order) if order is not None else ()
    shape = (plan.name, plan.num_microbatches)
    if order is None or shape not in [(run.name, run.num_microbatches) for run in runs]:
        return None
    return order, runs


def _as_runs(order: Plan, runs: tuple[Plan, ...], source: PlanSource, measured: Sequence[MeasuredStep]) -> ScheduleInfo:
    """The order of a step that runs plans one after another, with a line on that; steps that repeat an op are not compared."""
    lines = [_line_of_runs(runs, measured)]
    if repeated := {step.step for step in measured if _repeats_ops(step)}:
        lines.append(f"step {as_ranges(repeated)} has an op of one microbatch twice: not compared")
    comparable = [step for step in measured if step.step not in repeated]
    compared = compare_with_plan(order, source, comparable, tuple(lines))
    steps = [step.step for step in comparable]
    usual = compared.usual_num_microbatches(steps)
    plans = (plan for plan in map(compared.plan_of, steps) if plan is not None and plan.num_microbatches == usual)
    plan = next(plans, order)
    usual_runs = runs if plan is order else match_runs(plan) or (plan,)
    return replace(compared, runs=tuple(run.name for run in usual_runs))


def _without_evaluations(
    schedule: ScheduleInfo, training: Sequence[MeasuredStep], measured: Sequence[MeasuredStep]
) -> ScheduleInfo:
    """The schedule with a line on the steps that only evaluate, where there are any."""
    evaluated = sorted({step.step for step in measured} - {step.step for step in training})
    if not evaluated:
        return schedule
    line = f"step {as_ranges(evaluated)} has forwards only, as in evaluation: not compared with the schedule"
    return replace(schedule, warnings=(*schedule.warnings, line))


def only_forwards(step: MeasuredStep) -> bool:
    kinds = step.ops.rows["kind"]
    return all(bool((kinds[slice(*bounds)] == Kind.F).all()) for bounds in step.bounds)


def _recognised(measured: Sequence[MeasuredStep], ops: pd.DataFrame, mesh: MeshInfo) -> ScheduleInfo:
    """The plan that the most complete step follows, else the closest of the registry, else that step's own order."""
    best = most_complete(measured)
    if _repeats_ops(best):
        line = "no schedule recognised: an op of one microbatch runs twice in a step"
        return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(line,))
    if differing := _differing_pipelines(measured):
        line = f"no schedule recognised: pipelines run different numbers of microbatches in step {as_ranges(differing)}"
        return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(line,))
    plan, problem = _plan_of(best)
    if plan is not None and plan.name in registry.SCHEDULES:
        return compare_with_plan(plan, PlanSource.RECOGNISED, measured)
    turned = None if plan is None else match_reversed(plan)
    if turned is not None:
        line = f"the run follows {turned.name}, but its backwards run the microbatches in the opposite order"
        return compare_with_plan(turned, PlanSource.RECOGNISED, measured, (line,))
    if plan is not None and (runs := match_runs(plan)):
        return _as_runs(plan, runs, PlanSource.RECOGNISED, measured)
    closest, share = closest_to_step(best, ops, mesh)
    if closest is not None and share >= _MIN_SHARE:
        line = (
            f"the run follows {closest.name} in {share:.0%} of its ops: the ideal figures are of that "
            "plan; see the schedule's mismatches"
        )
        return compare_with_plan(closest, PlanSource.RECOGNISED, measured, () if share == 1 else (line,))
    text = f"; the closest, {closest.name}, has {share:.0%} of the ops in this order" if closest else ""
    if plan is None:
        line = f"no schedule recognised: {problem}{text}"
        return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(line,))
    line = f"the order of ops matches no known schedule{text}"
    return compare_with_plan(plan, PlanSource.RECOGNISED, measured, (line,))


def _repeats_ops(step: MeasuredStep) -> bool:
    return any(len(set(row)) < len(row) for row in step.rows)


def _differing_pipelines(measured: Sequence[MeasuredStep]) -> list[int]:
    """The steps whose pipelines have different numbers of ops, if in one of the first each follows a plan of the registry: else
    they lack ops.
    """
    by_step: dict[int, dict[int, MeasuredStep]] = {}
    for pipeline in measured:
        by_step.setdefault(pipeline.step, {})[pipeline.num_ops] = pipeline
    unlike = {step: by_size for step, by_size in by_step.items() if len(by_size) > 1}
    are_planned = (all(map(_follows_a_schedule, by_size.values())) for by_size in islice(unlike.values(), _FEW_STEPS))
    return list(unlike) if any(are_planned) else []


def _follows_a_schedule(step: MeasuredStep) -> bool:
    plan, _ = _plan_of(step)
    return plan is not None and plan.name in registry.SCHEDULES


def _line_of_runs(runs: Sequence[Plan], measured: Sequence[MeasuredStep]) -> str:
    names = listed(sorted({run.name for run in runs}))
    sizes = sorted({run.num_microbatches for run in runs})
    size = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    are_alike = len({tuple(len(set(row)) for row in step.rows) for step in measured}) == 1
    steps = "each step runs" if are_alike else "the longest steps run"
    return (
        f"{steps} {names} {len(runs)} times, one after the other, with {size} microbatches each: no schedule with all "
        "of them"
    )


def compare_with_plan(
    plan: Plan, source: PlanSource, measured: Sequence[MeasuredStep], warnings: tuple[str, ...] = ()
) -> ScheduleInfo:
    """The plan with its mismatches, by step."""
    plan_by_step = plans_by_step(plan, measured)
    schedule = ScheduleInfo(plan, plan.name, source, plan_by_step=plan_by_step)
    every = sorted({step.step for step in measured})
    usual = schedule.usual_num_microbatches(every)
    others = [step for step in every if (of_step := schedule.plan_of(step)) and of_step.num_microbatches != usual]
    lacking = [step for step, of_step in plan_by_step.items() if of_step is None]
    lines = []
    other = f"{plan.name} of that number" if plan.name in registry.SCHEDULES else "more or fewer runs of its schedule"
    for steps, what in (
        (others, f": compared with {other}"),
        (lacking, f", for which {plan.name} has no plan: not compared"),
    ):
        if steps:
            lines.append(f"step {as_ranges(steps)} has another number of microbatches{what}")
    differences = _differences(plan, measured, plan_by_step)
    return replace(schedule, mismatches=differences, warnings=(*warnings, *lines))


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


def closest_to_step(step: MeasuredStep, ops: pd.DataFrame, mesh: MeshInfo) -> tuple[Plan | None, float]:
    """(the plan with the largest share of a step's ops at their planned index, that share), by the mean of the ranks, of which an
    order that ends early is compared as far as it goes; (None, −1) where no schedule has this shape.
    """
    compute = ops[rows_among(ops["kind"], COMPUTE_KINDS) & (ops["stage"] >= 0) & (ops["microbatch"] >= 0)]
    if compute.empty:
        return None, -1.0
    num_stages, num_microbatches = int(compute["stage"].max()) + 1, int(compute["microbatch"].max()) + 1
    chunks = int(compute.groupby("rank")["stage"].nunique().max())
    pp = max(max(step.pp_ranks) + 1, mesh.pp or 1, -(-num_stages // chunks))
    rows = step.rows
    best: tuple[Plan | None, float] = None, -1.0
    for entry in registry.SCHEDULES.values():
        plan = built_plan(entry.name, pp, num_microbatches, chunks)
        if plan is None:
            continue
        shares = []
        for pp_rank, row in zip(step.pp_ranks, rows, strict=True):
            planned = map(str, plan.compute_actions(pp_rank))
            shares.append(sum(cell == of_plan for cell, of_plan in zip(row, planned, strict=False)) / len(row))
        share = sum(shares) / len(shares)
        if share > best[1]:
            best = plan, share
    return best


def _differences(
    plan: Plan, measured: Sequence[MeasuredStep], plan_by_step: Mapping[int, Plan | None]
) -> tuple[str, ...]:
    """Describe for each rank the first position where its order leaves the plan, with the steps in which it does; () when
    none does. An order that only stops early does not leave the plan: the trace was cut off.
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
        line if set(steps) == every else f"{line} (in step {as_ranges(set(steps))})" for line, steps in by_line.items()
    )


def _differences_of_step(plan: Plan, step: MeasuredStep, planned_keys: Sequence[tuple[Int64, Int64]]) -> Iterator[str]:
    """The differences of one step; ``planned_keys`` are the plan's by pipeline rank."""
    if max(step.pp_ranks) >= plan.pp:
        yield f"the plan has {plan.pp} pipeline ranks, the trace has {max(step.pp_ranks) + 1}"
    keys, pairs = step.ops.keys
    for index, (pp_rank, rank, (first, last)) in enumerate(zip(step.pp_ranks, step.ranks, step.bounds, strict=True)):
        if pp_rank >= plan.pp:
            continue
        keys_of_plan, pairs_of_plan = planned_keys[pp_rank]
        size = min(last - first, len(keys_of_plan))
        is_same = np.array_equal(keys[first : first + size], keys_of_plan[:size])
        is_same = is_same and np.array_equal(pairs[first : first + size], pairs_of_plan[:size])
        if is_same and last - first <= len(keys_of_plan):
            continue
        actual = step.cells_of(index)
        planned = [str(action) for action in plan.compute_actions(pp_rank)]
        differs = (at for at, (of_plan, cell) in enumerate(zip(planned, actual, strict=False)) if of_plan != cell)
        at = next(differs, None)
        if at is not None:
            yield f"rank {rank}: op {at + 1} is {actual[at]} where {plan.name} has {planned[at]}"
        elif len(actual) > len(planned):
            yield f"rank {rank}: {len(actual)} ops where {plan.name} has {len(planned)}"


def _metadata_rows(metadata: Sequence[Mapping[str, object]]) -> tuple[list[list[str]] | None, str]:
    for facts in metadata:
        plan = facts.get("plan")
        if not isinstance(plan, Mapping):
            continue
        rows = plan.get("rows")
        if isinstance(rows, list) and all(isinstance(row, list) for row in rows):
            return [[str(cell) for cell in row] for row in rows], str(plan.get("name", "custom"))
    return None, ""
