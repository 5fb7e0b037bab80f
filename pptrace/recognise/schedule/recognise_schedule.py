"""The plan that a run followed, and where it left it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from pptrace.errors import ScheduleError
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import PlanSource, ScheduleInfo
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.schedule.closest_match import MIN_SHARE, ClosestSchedule, closest_schedule
from pptrace.recognise.schedule.exact_match import match_registry
from pptrace.recognise.schedule.plan_per_step import MeasuredStep, plans_by_step
from pptrace.schedule import registry
from pptrace.schedule.actions import Kind, parse_action
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
        return compare_with_plan(registry.build(entry.name, pp, m, v), PlanSource.OPTION, measured)
    if rows is not None:
        try:
            plan = match_registry(from_rows(rows, name, where="the trace's metadata"))
        except ScheduleError as err:
            return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(f"the plan in the metadata: {err}",))
        return compare_with_plan(plan, PlanSource.METADATA, measured)
    if not measured:
        return _NOTHING
    training = [step for step in measured if not only_forwards(step)]
    if not training:
        reason = "no schedule recognised: the steps have forwards only, as in evaluation"
        return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(reason,))
    schedule = _recognised(training, ops, mesh)
    evaluated = sorted({step.step for step in measured} - {step.step for step in training})
    if not evaluated:
        return schedule
    line = f"step {_listed(evaluated)} has forwards only, as in evaluation: not compared with the schedule"
    return replace(schedule, warnings=(*schedule.warnings, line))


def only_forwards(step: MeasuredStep) -> bool:
    return all(parse_action(cell).kind is Kind.F for row in step.rows for cell in row)


def _recognised(measured: Sequence[MeasuredStep], ops: pd.DataFrame, mesh: MeshInfo) -> ScheduleInfo:
    """The plan that the most complete step follows, else the closest of the registry, else that step's own order."""
    best = most_complete(measured)
    plan, problem = _plan_of(best)
    if plan is not None and plan.name in registry.SCHEDULES:
        return compare_with_plan(plan, PlanSource.RECOGNISED, measured)
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
        line = f"step {_listed(with_plan)} has another number of microbatches: compared with {plan.name} of that number"
        info = replace(info, warnings=(*info.warnings, line))
    if without_plan:
        line = f"step {_listed(without_plan)} has another number of microbatches, for which {plan.name} has no plan: not compared"
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
    """For each rank the first place where its order leaves the plan, with the steps in which it does; () when none does.

    An order that only stops early does not leave the plan: the trace was cut off. ``others`` are the plans of steps that have
    another than ``plan``.
    """
    by_line: dict[str, list[int]] = {}
    for step in measured:
        step_plan = plan_by_step.get(step.step, plan)
        for line in _differences_of_step(step_plan, step) if step_plan is not None else ():
            by_line.setdefault(line, []).append(step.step)
    every = {step.step for step in measured}
    return tuple(
        line if set(steps) == every else f"{line} (in step {_listed(steps)})" for line, steps in by_line.items()
    )


def _differences_of_step(plan: Plan, step: MeasuredStep) -> Iterator[str]:
    if max(step.pp_ranks) >= plan.pp:
        yield f"the plan has {plan.pp} pipeline ranks, the trace has {max(step.pp_ranks) + 1}"
    for pp_rank, rank, actual in zip(step.pp_ranks, step.ranks, step.rows, strict=True):
        if pp_rank >= plan.pp:
            continue
        planned = [str(action) for action in plan.compute_actions(pp_rank)]
        pairs = zip(planned, actual, strict=False)
        first_difference = next(
            (position for position, (planned_cell, actual_cell) in enumerate(pairs) if planned_cell != actual_cell),
            None,
        )
        if first_difference is not None:
            yield (
                f"rank {rank}: op {first_difference + 1} is {actual[first_difference]} where {plan.name} has "
                f"{planned[first_difference]}"
            )
        elif len(actual) > len(planned):
            yield f"rank {rank}: {len(actual)} ops where {plan.name} has {len(planned)}"


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(str(step) for step in sorted(set(steps)))


def measured_steps(ops: pd.DataFrame, mesh: MeshInfo) -> list[MeasuredStep]:
    """Every step of every pipeline, without ops of which neither labels nor order told the stage."""
    has_stage = ops["kind"].isin(COMPUTE_KINDS) & (ops["stage"] >= 0) & (ops["microbatch"] >= 0)
    compute = ops[has_stage].sort_values("start_ns", kind="stable")
    simple = compute["stage"].astype(str) + compute["kind"] + compute["microbatch"].astype(str)
    cells = compute["pair"].where(compute["pair"] != "", simple)
    rows: dict[tuple[int, int], list[str]] = {}
    for step, rank, cell in zip(compute["step"].tolist(), compute["rank"].tolist(), cells, strict=True):
        rows.setdefault((step, rank), []).append(cell)
    steps = []
    for pipeline in mesh.pipelines:
        for step in sorted({step for step, rank in rows if rank in pipeline}):
            ranks = tuple(rank for rank in pipeline if (step, rank) in rows)
            pp_ranks = tuple(pp_rank for rank in ranks if (pp_rank := mesh.pp_rank(rank)) is not None)
            if len(pp_ranks) == len(ranks):
                steps.append(MeasuredStep(step, pp_ranks, ranks, tuple(tuple(rows[step, rank]) for rank in ranks)))
    return steps


def most_complete(measured: Sequence[MeasuredStep]) -> MeasuredStep:
    """The step with most ranks and then most ops: the last of a run may have been cut off."""
    return max(measured, key=lambda step: (len(step.rows), sum(map(len, step.rows))))


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
