"""Assign stages and microbatches to unlabelled ops: their sequence of kinds is matched against every registered schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from pptrace.model.mesh import MeshInfo
from pptrace.recognise.infer.candidates import match_by_kinds
from pptrace.recognise.messages.messages_from_plan import PRODUCERS, PlanOf, cross_rank_ops, match_by_adjacent_ops
from pptrace.recognise.schedule.measured_steps import MeasuredStep, fullest, steps_of
from pptrace.schedule.actions import Action
from pptrace.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """The tables with stages, the mesh with its number of chunks, and lines about what was inferred."""

    ops: pd.DataFrame
    comms: pd.DataFrame
    mesh: MeshInfo
    notes: tuple[str, ...] = ()


def assign_microbatches(
    ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo, calls: Mapping[int, pd.DataFrame]
) -> StageAssignment | None:
    """Assign chunks and microbatches by the interleaved schedule that the kinds of ops match; None without one."""
    steps = steps_of(ops[(ops["microbatch"] >= 0) & (ops["stage"] < 0)], mesh)
    pipeline_steps = [step for step in steps if len(step.pipeline) > 1]
    if not pipeline_steps:
        return None
    step = fullest(pipeline_steps)
    plan = match_by_kinds(len(step.pipeline), step.kinds, _received_in(step, ops, comms, mesh, calls))
    if plan is None or plan.num_chunks == 1:
        return None
    plans = {
        step.step: plan_of_other_length
        for step in steps
        if (plan_of_other_length := match_by_kinds(plan.pp, step.kinds, like=plan)) is not None
    }
    filled = _with_stages_and_microbatches(ops, steps, plan, plans)

    def plan_of(step: int) -> Plan:
        return plans.get(step, plan)

    note = (
        f"chunks and microbatches are inferred from the order of forwards and backwards, which is that of {plan.name} with "
        f"{plan.num_microbatches} microbatches and {plan.num_chunks} chunks per rank"
    )
    messages, message_warnings = messages_of_plan(comms, filled, plan_of, mesh)
    return StageAssignment(filled, messages, replace(mesh, vpp=plan.num_chunks), (note, *message_warnings))


def messages_of_plan(
    comms: pd.DataFrame, ops: pd.DataFrame, plan_of: PlanOf, mesh: MeshInfo
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Assign the plan's stages and microbatches to messages; with warnings. ``ops`` have theirs."""
    if _is_possible(comms, plan_of, mesh):
        return _with_plan(comms, plan_of, mesh), ()
    name = plan_of(int(ops["step"].iloc[0])).name
    chosen = match_by_adjacent_ops(comms, ops, plan_of, mesh)
    if chosen is not None:
        warning = (
            f"there are more labelled messages than {name} has: only those next to an op that sends or receives in "
            f"{name} are counted"
        )
        return chosen, (warning,)
    line = (
        f"there are more labelled messages than {name} has, and the real ones cannot be identified: the labelled messages of the "
        "pipeline are left out, so that exposed communication may count as bubble"
    )
    return comms[comms["axis"] != "pp"], (line,)


def _with_stages_and_microbatches(
    ops: pd.DataFrame, steps: Sequence[MeasuredStep], plan: Plan, plans: Mapping[int, Plan]
) -> pd.DataFrame:
    """The ops with the stages and microbatches of their steps' plans; those of a row that is no part of its plan have none."""
    filled = ops.copy()
    first = min(step.step for step in steps)
    for step in steps:
        for (pp_rank, kinds), indices in zip(step.kinds.items(), step.labels.values(), strict=True):
            planned = plans.get(step.step, plan).compute_actions(pp_rank)
            actions = _matching_part(kinds, planned, is_first=step.step == first)
            for name in ("stage", "chunk", "microbatch"):
                filled.loc[indices, name] = [getattr(action, name) for action in actions] or -1
    return filled


def _matching_part(kinds: Sequence[str], actions: Sequence[Action], is_first: bool) -> Sequence[Action]:
    """Actions of a plan, as many as there are ops of these kinds: from the beginning on, or those before the end in a trace's
    first step; () where neither has these kinds.
    """
    count = len(kinds)
    parts = [actions[:count], actions[len(actions) - count :]]
    return next((part for part in (parts[::-1] if is_first else parts) if [a.kind for a in part] == list(kinds)), ())


def _received_in(
    step: MeasuredStep, ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo, calls: Mapping[int, pd.DataFrame]
) -> int | None:
    """Number of activations that the first rank of a pipeline receives in this step; None if unknown.

    It receives those of all its chunks but the first, of which a mesh may tell the number.
    """
    if mesh.vpp is not None and mesh.vpp > 1:
        forwards = max(row.count("F") for row in step.kinds.values())
        return forwards - forwards // mesh.vpp
    first = step.pipeline[0]
    received = _num_received(comms, step.step, first)
    if received is None and first in step.ranks and first in calls:
        kinds = step.kinds[step.pp_ranks[step.ranks.index(first)]]
        return _num_received_before_backwards(kinds, ops.loc[step.labels[first]], calls[first])
    return received


def _is_possible(comms: pd.DataFrame, plan_of: PlanOf, mesh: MeshInfo) -> bool:
    """Return whether no rank has more messages of a kind in a step than the plan: combined send-receive functions are called
    on all stages, also where one side is absent.
    """
    lacking = comms[(comms["axis"] == "pp") & (comms["microbatch"] >= 0) & (comms["stage"] < 0)]
    for (rank, step, kind, direction), rows in lacking.groupby(["rank", "step", "kind", "direction"], observed=True):
        pp_rank = mesh.pp_rank(int(str(rank)))
        if pp_rank is not None and direction in PRODUCERS:
            planned = sum(1 for _ in cross_rank_ops(plan_of(int(str(step))), pp_rank, direction, sends=kind == "send"))
            if len(rows) > planned:
                return False
    return True


def _num_received(comms: pd.DataFrame, step: int, first: int) -> int | None:
    """Number of activations that the first rank of a pipeline receives in a step; None where messages tell no directions."""
    forward = comms[(comms["axis"] == "pp") & (comms["direction"] == "F") & (comms["microbatch"] >= 0)]
    if forward.empty:
        return None
    return int(((forward["rank"] == first) & (forward["kind"] == "recv") & (forward["step"] == step)).sum())


def _num_received_before_backwards(kinds: Sequence[str], ops: pd.DataFrame, calls: pd.DataFrame) -> int | None:
    """Number of activations that this rank receives in a step whose forwards all come before its backwards, as those of GPipe
    and of interleaved schedules without a steady phase do; None where they do not, or where receives cannot be distinguished
    from sends.
    """
    num_forwards = list(kinds).count("F")
    if not num_forwards or "F" in kinds[num_forwards:] or not (calls["kind"] == "recv").any():
        return None
    times = ops["start_ns"].to_numpy()
    received = calls[calls["kind"] == "recv"]
    before = (received["end_ns"] > times[0]) & (received["end_ns"] <= times[num_forwards - 1])
    return int(before.sum())


def _with_plan(comms: pd.DataFrame, plan_of: PlanOf, mesh: MeshInfo) -> pd.DataFrame:
    """Assign the messages of each step's plan in the order of the ops that send or receive them."""
    filled = comms.copy()
    lacking = comms[(comms["microbatch"] >= 0) & (comms["stage"] < 0)].sort_values("start_ns", kind="stable")
    for (rank, step, kind, direction), rows in lacking.groupby(["rank", "step", "kind", "direction"], observed=True):
        pp_rank = mesh.pp_rank(int(str(rank)))
        if pp_rank is None or direction not in PRODUCERS:
            continue
        wanted = list(cross_rank_ops(plan_of(int(str(step))), pp_rank, direction, sends=kind == "send"))[: len(rows)]
        indices = rows.index[: len(wanted)]
        filled.loc[indices, "stage"] = [action.stage for action in wanted]
        filled.loc[indices, "microbatch"] = [action.microbatch for action in wanted]
        filled.loc[rows.index[len(wanted) :], "microbatch"] = -1
    return filled
