"""Turn unlabelled communication calls into COMMS rows: fill in axis, peer, direction and step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from pptrace.intervals import Int64, union
from pptrace.marks import P2P
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.model.tables import COMMS, COMPUTE_KINDS, Schema, empty_table, make_table
from pptrace.recognise.groups.axes import Groups
from pptrace.recognise.groups.topology import GROUP_COLUMNS, UNKNOWN, Group, global_peer, key_of
from pptrace.recognise.messages.kernels_from_plan import kernels_from_plan
from pptrace.recognise.messages.messages_from_plan import label_from_plan
from pptrace.slices import slices

CALL_COMMS: Schema = {**COMMS, "group": "str", "seq": "int64"}
"""COMMS with what calls are matched by: ``group`` is the same text on all members, "" where the group is not known."""


def comms_of_calls(
    calls: Mapping[int, pd.DataFrame],
    groups: Groups,
    ops: pd.DataFrame,
    labelled_comms: pd.DataFrame,
    mesh: MeshInfo,
    schedule: ScheduleInfo,
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The communication of all ranks that labels do not cover (schema :data:`CALL_COMMS`), unmatched; with warnings.

    Args:
        calls: by rank (schema ``CALLS``).
        groups: the groups of all calls.
        ops, known: what labels tell; ranks whose labels tell the pipeline's messages have no other messages of the pipeline.
        mesh: the pipelines, for the direction of messages.
        schedule: of the ops: where its plan is known, for messages that do not tell their directions.
    """
    tables = [
        _of_rank(rank, table, groups, ops, labelled_comms, mesh, schedule)
        for rank, table in sorted(calls.items())
        if len(table)
    ]
    tables = [table for table in tables if len(table)]
    comms = pd.concat(tables, ignore_index=True) if tables else empty_table(CALL_COMMS)
    comms, warning = kernels_from_plan(comms, labelled_comms, ops, schedule, mesh)
    return comms, (warning,) if warning else ()


def _of_rank(
    rank: int,
    calls: pd.DataFrame,
    groups: Groups,
    ops: pd.DataFrame,
    labelled_comms: pd.DataFrame,
    mesh: MeshInfo,
    schedule: ScheduleInfo,
) -> pd.DataFrame:
    rank_ops = ops[ops["rank"] == rank]
    call_groups = [
        groups.of_call[key_of(rank, key)] for key in zip(*(calls[name] for name in GROUP_COLUMNS), strict=True)
    ]
    kinds = _kinds(calls, rank_ops)
    axes = [_axis(*call, groups) for call in zip(kinds, call_groups, calls["hint"], strict=True)]
    peers = [
        global_peer(peer, group_rank, group if group.id or group.ranks else groups.unnamed[rank]) if kind in P2P else -1
        for kind, peer, group_rank, group in zip(kinds, calls["peer"], calls["local_peer"], call_groups, strict=True)
    ]
    size = len(calls)
    table = make_table(
        CALL_COMMS,
        {
            "rank": [rank] * size,
            "step": _steps(calls, kinds, rank_ops),
            "kind": kinds,
            "axis": axes,
            "peer": peers,
            "group_size": [2 if kind in P2P else group.size for kind, group in zip(kinds, call_groups, strict=True)],
            "bytes": calls["bytes"].tolist(),
            "direction": [_direction(rank, *c, mesh) for c in zip(kinds, axes, peers, strict=True)],
            "stage": [-1] * size,
            "chunk": [-1] * size,
            "microbatch": [-1] * size,
            **{name: calls[name].tolist() for name in ("start_ns", "posted_ns", "asked_ns", "end_ns")},
            "transfer_start_ns": calls["start_ns"].tolist(),
            "transfer_end_ns": calls["end_ns"].tolist(),
            "stream": calls["stream"].tolist(),
            "match": [-1] * size,
            "clock": calls["clock"].tolist(),
            "group": [_key(group) for group in call_groups],
            "seq": calls["seq"].tolist(),
        },
    )
    table = _with_microbatches(table, rank_ops)
    labelled = labelled_comms[
        (labelled_comms["rank"] == rank) & labelled_comms["kind"].isin(P2P) & (labelled_comms["axis"] == "pp")
    ]
    if len(labelled):
        table = table[~_is_labelled(table, labelled)]
    pipeline = mesh.pipeline_of(rank)
    return label_from_plan(table, rank_ops, schedule.plan_of, pipeline, rank)


def _is_labelled(calls: pd.DataFrame, labelled: pd.DataFrame) -> pd.Series[bool]:
    """Mark the calls that are pipeline messages which labels cover: all sends and receives, and kernels at the time of one.

    Labels on the host's clock do not tell when the kernels ran: then each kernel that may be a message is one.
    """
    is_candidate = calls["axis"].isin(("pp", UNKNOWN))
    kernels = calls["kind"] == "send_recv"
    if (labelled["clock"] == "device").all():
        busy = union(labelled["start_ns"], labelled["end_ns"])
        at = np.searchsorted(busy[:, 1], calls["start_ns"].to_numpy(), side="right")
        begins = np.append(busy[:, 0], np.iinfo(np.int64).max)[at]
        kernels &= begins < calls["end_ns"].to_numpy()
    return is_candidate & (kernels | calls["kind"].isin(P2P))


def _with_microbatches(calls: pd.DataFrame, ops: pd.DataFrame) -> pd.DataFrame:
    """A pipeline's messages with their stage and microbatch, on a rank with one stage: the k-th of a step is that of its k-th op.

    What is sent was made by the op, what is received is read by it; where messages and ops are not equally many, none is named.
    """
    compute = ops[ops["kind"].isin(("F", "B", "I"))].sort_values("start_ns", kind="stable")
    is_message = (calls["axis"] == "pp") & (calls["direction"] != "") & (calls["step"] >= 0)
    if not is_message.any() or compute["stage"].nunique() != 1:
        return calls
    stage, microbatch = (calls[name].to_numpy(copy=True) for name in ("stage", "microbatch"))
    made = slices(compute.assign(is_forward=compute["kind"] == "F"), ("step", "is_forward"))
    messages = calls[is_message].assign(index=np.flatnonzero(is_message))
    for (step, _, direction), rows in slices(messages, ("step", "kind", "direction")).items():
        step_ops = made.get((step, direction == "F"))
        if step_ops is not None and len(step_ops) == len(rows):
            rows_in_order = rows.in_order_of("start_ns")["index"]
            microbatch[rows_in_order], stage[rows_in_order] = step_ops["microbatch"], step_ops["stage"]
    return calls.assign(stage=stage, microbatch=microbatch)


def _key(group: Group) -> str:
    if group.ranks:
        return ",".join(map(str, group.ranks))
    return f"{group.id} {group.description}" if group.id else ""


def _axis(kind: str, group: Group, hint: str, groups: Groups) -> str:
    """A group of the whole world is what the pipeline's messages use where they have no group of their own."""
    axis = groups.axes.get(group, UNKNOWN)
    if kind in P2P and axis in ("world", UNKNOWN):
        return UNKNOWN if group in groups.rings else "pp"
    return hint or axis if axis == UNKNOWN else axis


def _kinds(calls: pd.DataFrame, ops: pd.DataFrame) -> list[str]:
    """The kinds; a kernel that may be any of send, receive and all-to-all exchanges tokens if it lies inside a single op."""
    kinds = [
        "ring_exchange" if kind == "send_recv" and hint == "tp" else kind  # beside a GEMM, in parts
        for kind, hint in zip(calls["kind"].tolist(), calls["hint"].tolist(), strict=True)
    ]
    unclear = [index for index, kind in enumerate(kinds) if kind == "send_recv"]
    compute = ops[ops["kind"].isin(COMPUTE_KINDS) & (ops["clock"] == "device")].sort_values("start_ns", kind="stable")
    if not unclear or compute.empty:
        return kinds
    starts, ends = compute["start_ns"].to_numpy(), np.maximum.accumulate(compute["end_ns"].to_numpy())
    started, ended = calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()
    for index in unclear:
        row = int(np.searchsorted(starts, started[index], side="left")) - 1
        if row >= 0 and ended[index] < ends[row]:
            kinds[index] = "all_to_all"
    return kinds


def _direction(rank: int, kind: str, axis: str, peer: int, mesh: MeshInfo) -> str:
    """F or B of a message between neighbours of a pipeline; "" where it may be either, as between two ranks with chunks."""
    pipeline = mesh.pipeline_of(rank)
    if axis != "pp" or peer not in pipeline or len(pipeline) < 2 or ((mesh.vpp or 1) > 1 and len(pipeline) == 2):
        return ""
    distance = pipeline.index(peer) - pipeline.index(rank)
    if (mesh.vpp or 1) > 1 and abs(distance) == len(pipeline) - 1:
        distance = -distance  # from the last rank on to the next chunk on the first
    return "F" if (distance > 0) == (kind == "send") else "B"


def _steps(calls: pd.DataFrame, kinds: list[str], ops: pd.DataFrame) -> Int64:
    """The step of each call, -1 outside all: by the steps' own ranges, else by the ops around it.

    Between the last op of one step and the first of the next, what is received belongs to the next step and the rest to the one
    before: gradients are summed, and the last ones sent, after the ops.
    """
    marked = ops[ops["kind"] == "STEP"].sort_values("start_ns", kind="stable")
    if len(marked):
        starts, ends = marked["start_ns"].to_numpy(), marked["end_ns"].to_numpy()
        at = calls["host_ns"].to_numpy()
        index = np.searchsorted(starts, at, side="right") - 1
        inside = (index >= 0) & (at < ends[np.maximum(index, 0)])
        return np.where(inside, marked["step"].to_numpy()[np.maximum(index, 0)], -1).astype(np.int64)
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    if compute.empty:
        return np.full(len(calls), -1, dtype=np.int64)
    spans = compute.groupby("step").agg(start=("start_ns", "min"), end=("end_ns", "max")).sort_values("start")
    numbers, starts, ends = (np.asarray(column) for column in (spans.index, spans["start"], spans["end"]))
    at = calls["start_ns"].to_numpy()
    index = np.searchsorted(starts, at, side="right") - 1
    after = (index < 0) | (at >= ends[np.maximum(index, 0)])
    received = np.array([kind == "recv" for kind in kinds], dtype=np.bool_)
    index = np.where(after & received & (index + 1 < len(numbers)), index + 1, index)
    return np.where(index >= 0, numbers[np.maximum(index, 0)], -1).astype(np.int64)
