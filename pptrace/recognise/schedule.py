"""Which plan a run followed, and where it left it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import pandas as pd

from pptrace.errors import ScheduleError
from pptrace.recognise.mesh import MeshInfo
from pptrace.schedule import registry
from pptrace.schedule.plan import Plan
from pptrace.schedule.text import from_rows


class PlanSource(StrEnum):
    METADATA = "metadata"
    RECOGNISED = "recognised"
    OPTION = "option"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """The plan of a run: its name, where it came from, and each place where the run differs from it, in words."""

    plan: Plan | None
    name: str
    source: PlanSource
    mismatches: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


COMPUTE_KINDS = ("F", "B", "I", "W", "OVERLAP_F_B")
_NOTHING = ScheduleInfo(None, "unknown", PlanSource.NONE)


def recognise_schedule(
    ops: pd.DataFrame, mesh: MeshInfo, metadata: Sequence[Mapping[str, object]], wanted: str | None
) -> ScheduleInfo:
    """The plan that was asked for with ``wanted``, else the one in the metadata, else the one that the ops follow.

    Raises:
        UsageError: ``wanted`` names no schedule.
        ScheduleError: ``wanted`` is illegal for the run's p, m and v.
    """
    measured = _measured_steps(ops, mesh)
    rows, name = _metadata_rows(metadata)
    if wanted is not None:
        entry = registry.get(wanted)
        pp, m, v = _shape(rows, measured)
        plan = registry.build(entry.name, pp, m, v)
        return ScheduleInfo(plan, entry.name, PlanSource.OPTION, differences(plan, measured))
    if rows is not None:
        try:
            plan = identify(from_rows(rows, name, where="the trace's metadata"))
        except ScheduleError as err:
            return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(f"the plan in the metadata: {err}",))
        return ScheduleInfo(plan, plan.name, PlanSource.METADATA, differences(plan, measured))
    if not measured:
        return _NOTHING
    try:
        plan = identify(from_rows(_most_complete(measured).rows, "custom"))
    except ScheduleError as err:
        return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(f"no schedule recognised: {err}",))
    return ScheduleInfo(plan, plan.name, PlanSource.RECOGNISED, differences(plan, measured))


def identify(plan: Plan) -> Plan:
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
    """How many actions the first rank runs on its first stage before it turns to another."""
    first = plan.compute_actions(0)
    return next((place for place, action in enumerate(first) if action.stage != first[0].stage), len(first))


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The order of compute actions of one pipeline in one step: for each rank that is in the trace its cells, in time order.

    ``pp_ranks`` and ``ranks`` are the pipeline ranks and global ranks of the rows.
    """

    step: int
    pp_ranks: tuple[int, ...]
    ranks: tuple[int, ...]
    rows: tuple[tuple[str, ...], ...]


def differences(plan: Plan, measured: Sequence[MeasuredStep]) -> tuple[str, ...]:
    """For each rank the first place where its order leaves the plan, with the steps in which it does; () when none does.

    An order that only stops early does not leave the plan: the trace was cut off.
    """
    found: dict[str, list[int]] = {}
    for step in measured:
        for line in _differences_of_step(plan, step):
            found.setdefault(line, []).append(step.step)
    every = {step.step for step in measured}
    return tuple(line if set(steps) == every else f"{line} (in step {_listed(steps)})" for line, steps in found.items())


def _differences_of_step(plan: Plan, step: MeasuredStep) -> Iterator[str]:
    if max(step.pp_ranks) >= plan.pp:
        yield f"the plan has {plan.pp} pipeline ranks, the trace has {max(step.pp_ranks) + 1}"
    for pp_rank, rank, actual in zip(step.pp_ranks, step.ranks, step.rows, strict=True):
        if pp_rank >= plan.pp:
            continue
        planned = [str(action) for action in plan.compute_actions(pp_rank)]
        pairs = zip(planned, actual, strict=False)
        wrong = next((place for place, (want, have) in enumerate(pairs) if want != have), None)
        if wrong is not None:
            yield f"rank {rank}: op {wrong + 1} is {actual[wrong]} where {plan.name} has {planned[wrong]}"
        elif len(actual) > len(planned):
            yield f"rank {rank}: {len(actual)} ops where {plan.name} has {len(planned)}"


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(str(step) for step in sorted(set(steps)))


def _measured_steps(ops: pd.DataFrame, mesh: MeshInfo) -> list[MeasuredStep]:
    """Every step of every pipeline."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns", kind="stable")
    simple = compute["stage"].astype(str) + compute["kind"] + compute["microbatch"].astype(str)
    cells = compute["pair"].where(compute["pair"] != "", simple)
    rows: dict[tuple[int, int], list[str]] = {}
    for step, rank, cell in zip(compute["step"].tolist(), compute["rank"].tolist(), cells, strict=True):
        rows.setdefault((step, rank), []).append(cell)
    found = []
    for pipeline in mesh.pipelines:
        for step in sorted({step for step, rank in rows if rank in pipeline}):
            present = [place for place, rank in enumerate(pipeline) if (step, rank) in rows]
            ranks = tuple(pipeline[place] for place in present)
            found.append(MeasuredStep(step, tuple(present), ranks, tuple(tuple(rows[step, rank]) for rank in ranks)))
    return found


def _most_complete(measured: Sequence[MeasuredStep]) -> MeasuredStep:
    """The step with most ranks and then most ops: the last of a run may have been cut off."""
    return max(measured, key=lambda step: (len(step.rows), sum(map(len, step.rows))))


def _shape(rows: list[list[str]] | None, measured: Sequence[MeasuredStep]) -> tuple[int, int, int]:
    """(p, m, v) of the run: of its own plan where it has one, else of what was measured."""
    if rows is not None:
        plan = from_rows(rows, "the plan in the metadata")
    elif measured:
        plan = from_rows(_most_complete(measured).rows, "the measured run")
    else:
        raise ScheduleError("--schedule: the trace shows no forward or backward of any microbatch to compare with")
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
