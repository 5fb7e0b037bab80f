"""Which plan a run followed, and where it left it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    measured = _orders(ops, mesh)
    rows, name = _metadata_rows(metadata)
    if wanted is not None:
        entry = registry.get(wanted)
        pp, m, v = _shape(measured)
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
        plan = identify(from_rows(measured.values(), "custom"))
    except ScheduleError as err:
        return ScheduleInfo(None, "unknown", PlanSource.NONE, warnings=(f"no schedule recognised: {err}",))
    return ScheduleInfo(plan, plan.name, PlanSource.RECOGNISED)


def identify(plan: Plan) -> Plan:
    """The registry's plan with the same actions in the same order, which has a name and exact phases; else the plan itself.

    One microbatch makes the same plan of several schedules; then the plan's own name decides.
    """
    wanted = [[action.key for action in plan.compute_actions(rank)] for rank in range(plan.pp)]
    variants: list[tuple[int | None, bool]]
    variants = [(None, False)] if plan.num_chunks == 1 else [(_first_group(plan), False), (None, True)]
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


def differences(plan: Plan, measured: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """For each pipeline rank the first place where the measured order leaves the plan; () when it never does."""
    found = []
    if len(measured) != plan.pp:
        found.append(f"the plan has {plan.pp} pipeline ranks, the trace has {len(measured)}")
    for rank, actual in measured.items():
        if rank >= plan.pp:
            continue
        planned = [str(action) for action in plan.compute_actions(rank)]
        for place, (want, have) in enumerate(zip(planned, actual, strict=False), 1):
            if want != have:
                found.append(f"rank {rank}: op {place} is {have} where {plan.name} has {want}")
                break
        else:
            if len(planned) != len(actual):
                found.append(f"rank {rank}: {len(actual)} ops where {plan.name} has {len(planned)}")
    return tuple(found)


def _orders(ops: pd.DataFrame, mesh: MeshInfo) -> dict[int, list[str]]:
    """pipeline rank → its compute actions in time order, from the last step of the first pipeline that is there."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    pipeline = next((p for p in mesh.pipelines if set(p) & set(compute["rank"])), None)
    if pipeline is None:
        return {}
    mine = compute[compute["rank"].isin(pipeline)]
    last = mine[mine["step"] == mine["step"].max()].sort_values("start_ns", kind="stable")
    return {
        pipeline.index(rank): [
            f"{stage}{kind}{mb}"
            for stage, kind, mb in zip(rows["stage"], rows["kind"], rows["microbatch"], strict=True)
        ]
        for rank, rows in sorted(last.groupby("rank"), key=lambda item: pipeline.index(item[0]))
    }


def _shape(measured: Mapping[int, Sequence[str]]) -> tuple[int, int, int]:
    """(p, m, v) of the measured orders."""
    if not measured:
        raise ScheduleError("--schedule: the trace shows no forward or backward of any microbatch to compare with")
    plan = from_rows(measured.values(), "the measured run")
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
