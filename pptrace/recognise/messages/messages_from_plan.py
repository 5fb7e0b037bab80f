"""Label messages with those of a known plan by the adjacent ops: a send follows the op that made it, a receive precedes its
reader.

A function that sends and receives in one call is called on all ranks of a pipeline, with nothing to send or to receive on some
of them: which of its messages there were, the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pptrace.marks import P2P
from pptrace.model.mesh import MeshInfo
from pptrace.schedule.actions import Action
from pptrace.schedule.messages import Direction, messages_of_rank
from pptrace.schedule.plan import Plan
from pptrace.slices import Slice, slices

PlanOf = Callable[[int], Plan]
"""The plan of a step."""

PRODUCERS = {str(direction): direction.producers for direction in Direction}
"""Kinds of ops whose output moves in a direction."""


def cross_rank_ops(plan: Plan, rank: int, direction: str, sends: bool) -> Iterator[Action]:
    """The ops of a rank whose output goes to another rank, or whose input comes from one."""
    return (op for op, message in messages_of_rank(plan, rank, sends) if message.direction == direction)


def match_by_adjacent_ops(
    comms: pd.DataFrame, ops: pd.DataFrame, plan_of: PlanOf, mesh: MeshInfo
) -> pd.DataFrame | None:
    """Reduce labelled pipeline messages to those of the plan; None where one of the plan's is missing.

    Args:
        comms: with messages by order alone (their stage is unknown).
        ops: with the stages and microbatches of the plan.
        plan_of: the plan of each step.
    """
    lacking = comms[(comms["axis"] == "pp") & (comms["microbatch"] >= 0) & (comms["stage"] < 0)]
    parts = [comms.drop(lacking.index)]
    for (rank, step, kind, direction), rows in lacking.groupby(["rank", "step", "kind", "direction"], observed=True):
        pp_rank = mesh.pp_rank(int(str(rank)))
        if pp_rank is None or direction not in PRODUCERS:
            return None
        kinds = [str(kind) for kind in PRODUCERS[str(direction)]]
        rank_ops = ops[(ops["rank"] == rank) & (ops["step"] == step) & ops["kind"].isin(kinds)]
        planned = {
            (a.stage, a.microbatch)
            for a in cross_rank_ops(plan_of(int(str(step))), pp_rank, str(direction), sends=kind == "send")
        }
        ordered = rows.sort_values("start_ns", kind="stable"), rank_ops.sort_values("start_ns", kind="stable")
        matched, adjacent = with_adjacent_op(*ordered, sends=kind == "send")
        matched = matched.assign(**{name: adjacent[name].to_numpy() for name in ("stage", "microbatch")})
        matched = matched[[key in planned for key in zip(matched["stage"], matched["microbatch"], strict=True)]]
        matched = matched.drop_duplicates(["stage", "microbatch"], keep="first" if kind == "send" else "last")
        if len(matched) < len(planned):
            return None
        parts.append(matched)
    return pd.concat(parts).sort_index()


def with_adjacent_op(rows: pd.DataFrame, ops: pd.DataFrame, sends: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(messages, ops row by row): the last op over before a send, or the first that begins after a receive; both tables are in
    the order of time, and messages without such an op are left out.
    """
    if sends:
        index = np.searchsorted(ops["end_ns"].to_numpy(), rows["start_ns"].to_numpy(), side="right") - 1
    else:
        index = np.searchsorted(ops["start_ns"].to_numpy(), rows["end_ns"].to_numpy(), side="left")
    inside = (index >= 0) & (index < len(ops))
    return rows[inside], ops.iloc[index[inside]]


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """A message of the plan: the op that makes or reads it, and the pipeline rank of its peer."""

    op: Action
    direction: str
    peer_pp_rank: int


def planned_messages(plan: Plan, rank: int, sends: bool) -> Iterator[PlannedMessage]:
    """The messages of a rank in the order of their ops."""
    for op, message in messages_of_rank(plan, rank, sends):
        peer_pp_rank = message.target_stage if sends else message.source_stage
        yield PlannedMessage(op, message.direction, plan.placement[peer_pp_rank])


def label_from_plan(
    calls: pd.DataFrame, ops: pd.DataFrame, plan_of: Callable[[int], Plan | None], pipeline: Sequence[int], rank: int
) -> pd.DataFrame:
    """Label a rank's messages without stage and microbatch with those of the plan.

    A rank sends in the order in which its ops end, and receives in the order in which they begin. Where there are not as many
    as planned, or one would be sent before it was made or read before it was there, none of that step is named.
    """
    is_message = calls["kind"].isin(P2P) & (calls["axis"] == "pp")
    if not is_message.any():
        return calls
    planned: dict[tuple[int, str], list[PlannedMessage]] = {}
    steps = {step: rows for (step,), rows in slices(ops, ("step",)).items()}
    named = {name: calls[name].to_numpy(copy=True) for name in ("direction", "stage", "microbatch", "peer")}
    messages = calls.assign(row=np.arange(len(calls)))[is_message]
    for (step, kind), rows in slices(messages, ("step", "kind")).items():
        plan = plan_of(step)
        if plan is None or plan.pp != len(pipeline):
            continue
        key = (plan.num_microbatches, kind)
        if key not in planned:
            planned[key] = list(planned_messages(plan, pipeline.index(rank), sends=kind == "send"))
        ordered = rows.in_order_of("start_ns")
        for row, message in zip(
            ordered["row"], _messages_in_order(planned[key], ordered, steps.get(step)), strict=False
        ):
            named["direction"][row] = message.direction
            named["stage"][row], named["microbatch"][row] = message.op.stage, message.op.microbatch
            named["peer"][row] = pipeline[message.peer_pp_rank]
    return calls.assign(**named).astype(calls.dtypes)


def _messages_in_order(planned: Sequence[PlannedMessage], messages: Slice, ops: Slice | None) -> list[PlannedMessage]:
    """The planned messages in time order; [] where the ops contradict that."""
    if ops is None or not planned or len(messages) % len(planned) or (messages["microbatch"] >= 0).any():
        return []
    keys = zip(*(ops[name].tolist() for name in ("kind", "stage", "microbatch")), strict=True)
    index_of_op = {key: index for index, key in enumerate(keys)}
    op_indices = [
        index_of_op.get((message.op.kind.value, message.op.stage, message.op.microbatch), -1) for message in planned
    ]
    if min(op_indices) < 0:
        return []
    op_times = ops.where(np.repeat(op_indices, len(messages) // len(planned)))
    is_send = messages["kind"] == "send"
    possible = np.where(
        is_send, messages["start_ns"] >= op_times["end_ns"], messages["end_ns"] <= op_times["start_ns"]
    ).all()
    return [message for message in planned for _ in range(len(messages) // len(planned))] if possible else []
