"""Ops and messages that order alone numbers, taken for those of the schedule whose order theirs is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from pptrace.recognise.beside import PRODUCERS, beside_ops, moving
from pptrace.recognise.fit import fit
from pptrace.recognise.mesh import MeshInfo
from pptrace.recognise.step_rows import Op, steps_of
from pptrace.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class Numbered:
    """The tables with stages and microbatches, the plan that they follow, and what was taken from what."""

    ops: pd.DataFrame
    comms: pd.DataFrame
    plan: Plan
    notes: tuple[str, ...]


def numbered(
    ops: pd.DataFrame, comms: pd.DataFrame, mesh: MeshInfo, calls: Mapping[int, pd.DataFrame]
) -> Numbered | None:
    """Ops numbered by order, taken for those of the schedule with several chunks whose kinds they follow; None without one."""
    steps = steps_of(ops[(ops["microbatch"] >= 0) & (ops["stage"] == -1)], mesh)
    whole = [(pipeline, rows) for pipeline, rows in steps if len(pipeline) > 1]
    if not whole:
        return None
    pipeline, rows = max(whole, key=lambda step: sum(map(len, step[1].values())))
    kinds = {pipeline.index(rank): [op.kind for op in row] for rank, row in rows.items()}
    received = _num_received(comms, pipeline[0])
    if received is None and pipeline[0] in rows and pipeline[0] in calls:
        received = _num_received_before_backwards(rows[pipeline[0]], ops, calls[pipeline[0]])
    plan = fit(len(pipeline), kinds, received)
    if plan is None or plan.num_chunks == 1:
        return None
    filled = ops.copy()
    for own, rows in steps:
        for rank, row in rows.items():
            actions = plan.compute_actions(own.index(rank))
            if [op.kind for op in row] != [action.kind for action in actions[: len(row)]]:
                continue
            where = [op.index for op in row]
            filled.loc[where, "stage"] = [action.stage for action in actions[: len(row)]]
            filled.loc[where, "chunk"] = [action.chunk for action in actions[: len(row)]]
            filled.loc[where, "microbatch"] = [action.microbatch for action in actions[: len(row)]]
    note = (
        f"chunks and microbatches are inferred from the order of forwards and backwards, which is that of {plan.name} with "
        f"{plan.num_microbatches} microbatches and {plan.num_chunks} chunks per rank"
    )
    if _is_possible(comms, plan, mesh):
        return Numbered(filled, _with_plan(comms, plan, mesh), plan, (note,))
    chosen = beside_ops(comms, filled, plan, mesh)
    if chosen is not None:
        told = f"labels tell more messages than {plan.name} has: those are taken that the ops beside them send or receive in it"
        return Numbered(filled, chosen, plan, (note, told))
    told = f"labels tell more messages than {plan.name} has: which of them there were is not known"
    return Numbered(filled, comms[comms["axis"] != "pp"], plan, (note, told))


def _is_possible(comms: pd.DataFrame, plan: Plan, mesh: MeshInfo) -> bool:
    """Whether no rank has more messages of a kind in a step than the plan: a function that sends and receives both ways is
    called on all stages, and does not move what has no other side.
    """
    lacking = comms[(comms["axis"] == "pp") & (comms["microbatch"] >= 0) & (comms["stage"] < 0)]
    for (rank, _, kind, direction), rows in lacking.groupby(["rank", "step", "kind", "direction"]):
        place = mesh.pp_rank(int(str(rank)))
        if place is not None and direction in PRODUCERS:
            planned = sum(1 for _ in moving(plan, place, direction, sends=kind == "send"))
            if len(rows) > planned:
                return False
    return True


def _num_received(comms: pd.DataFrame, first: int) -> int | None:
    """How many activations the first rank of a pipeline receives in a step; None where messages tell no directions."""
    forward = comms[(comms["axis"] == "pp") & (comms["direction"] == "F")]
    if forward.empty:
        return None
    mine = forward[(forward["rank"] == first) & (forward["kind"] == "recv")]
    return int(mine.groupby("step").size().max()) if len(mine) else 0


def _num_received_before_backwards(row: Sequence[Op], ops: pd.DataFrame, calls: pd.DataFrame) -> int | None:
    """How many activations this rank receives in a step whose forwards all come before its backwards, as those of GPipe and of
    interleaved schedules without a steady phase do; None where they do not, or where no receive is told from a send.
    """
    kinds = [op.kind for op in row]
    num_forwards = kinds.count("F")
    if not num_forwards or "F" in kinds[num_forwards:] or not (calls["kind"] == "recv").any():
        return None
    times = ops.loc[[op.index for op in row], "start_ns"].to_numpy()
    received = calls[calls["kind"] == "recv"]
    before = (received["end_ns"] > times[0]) & (received["end_ns"] <= times[num_forwards - 1])
    return int(before.sum())


def _with_plan(comms: pd.DataFrame, plan: Plan, mesh: MeshInfo) -> pd.DataFrame:
    """Messages numbered by order, taken for those of the plan's ops that send or receive, in the order of these ops."""
    filled = comms.copy()
    lacking = comms[(comms["microbatch"] >= 0) & (comms["stage"] < 0)].sort_values("start_ns", kind="stable")
    for (rank, _, kind, direction), rows in lacking.groupby(["rank", "step", "kind", "direction"]):
        place = mesh.pp_rank(int(str(rank)))
        if place is None or direction not in PRODUCERS:
            continue
        wanted = list(moving(plan, place, direction, sends=kind == "send"))[: len(rows)]
        where = rows.index[: len(wanted)]
        filled.loc[where, "stage"] = [action.stage for action in wanted]
        filled.loc[where, "microbatch"] = [action.microbatch for action in wanted]
        filled.loc[rows.index[len(wanted) :], "microbatch"] = -1
    return filled
