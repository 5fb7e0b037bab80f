"""Turn unlabelled communication calls into COMMS rows: fill in axis, peer, direction and step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.intervals import Int64, find_interval, union
from pptrace.marks import P2P
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.model.tables import COMMS, COMPUTE_KINDS, Bool, Schema, comms_table, empty_table, rows_of_splits
from pptrace.recognise.groups.axes import Groups
from pptrace.recognise.groups.topology import UNKNOWN, Group, call_keys, global_peer
from pptrace.recognise.messages.kernels_from_plan import kernels_from_plan
from pptrace.recognise.messages.messages_from_plan import label_from_plan
from pptrace.slices import are_among, distinct_of, rows_among, rows_where, slices

Texts: TypeAlias = npt.NDArray[np.object_]

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
        ops, labelled_comms: what labels say; ranks whose labels name the pipeline's messages have no others.
        mesh: the pipelines, for the direction of messages.
        schedule: of the ops: where its plan is known, for messages that do not tell their directions.
    """
    tables = []
    for rank, table in sorted(calls.items()):
        if len(table):
            rank_ops = ops[ops["rank"] == rank]
            comms = _of_rank(rank, table, groups, rank_ops, labelled_comms, mesh)
            tables.append(label_from_plan(comms, rank_ops, schedule.plan_of, mesh.pipeline_of(rank), rank))
    tables = [table for table in tables if len(table)]
    comms = pd.concat(tables, ignore_index=True) if tables else empty_table(CALL_COMMS)
    comms, warning = kernels_from_plan(comms, labelled_comms, ops, schedule, mesh)
    return comms, (warning,) if warning else ()


def _of_rank(
    rank: int,
    calls: pd.DataFrame,
    groups: Groups,
    rank_ops: pd.DataFrame,
    labelled_comms: pd.DataFrame,
    mesh: MeshInfo,
) -> pd.DataFrame:
    """The communication of a rank; of messages that do not tell their directions, without these."""
    number, keys = call_keys(rank, calls)
    call_groups = [groups.of_call[key] for key in keys]
    kinds = _kinds(calls, rank_ops)
    has_ops = bool(rows_among(rank_ops["kind"], COMPUTE_KINDS).any())
    axes = _each(
        lambda kind, key, hint: _axis(kind, call_groups[key], hint, groups, has_ops),
        (kinds, number, calls["hint"].to_numpy(dtype=object)),
        "object",
    )
    is_label = (labelled_comms["rank"] == rank) & rows_among(labelled_comms["kind"], P2P)
    is_free = ~_is_labelled(calls, kinds, axes, labelled_comms[is_label])
    calls, number, kinds, axes = rows_where(calls, is_free), number[is_free], kinds[is_free], axes[is_free]

    def peer_of(kind: str, key: int, peer: int, local_peer: int) -> int:
        group = call_groups[key]
        if kind not in P2P:
            return -1
        return global_peer(peer, local_peer, group if group.is_named else groups.unnamed[rank])

    ends = (calls["peer"].to_numpy(), calls["local_peer"].to_numpy())
    peers = _each(peer_of, (kinds, number, *ends), "int64")
    size = np.array([group.size for group in call_groups], dtype=np.int64)[number]
    posted_only = (calls["clock"] == "host") & (calls["posted_ns"] == calls["end_ns"])
    # In a group of one rank nothing has to move and nobody is waited for: a call that was only posted has no duration.
    is_alone = (posted_only & (size == 1)).to_numpy()
    starts = calls["start_ns"].to_numpy()
    table = comms_table(
        {
            "rank": rank,
            "step": _steps(calls, kinds, rank_ops),
            "kind": kinds,
            "axis": axes,
            "peer": peers,
            "group_size": np.where(are_among(kinds, P2P), 2, size),
            **_sizes(calls),
            "direction": _each(partial(_direction, rank, mesh=mesh), (kinds, axes, peers), "object"),
            "start_ns": starts,
            **{name: np.where(is_alone, starts, calls[name]) for name in ("posted_ns", "asked_ns", "end_ns")},
            "stream": calls["stream"].to_numpy(),
            "algorithm": calls["algorithm"].array,
            "clock": calls["clock"].to_numpy(dtype=object),
            "group": np.array([group.key for group in call_groups], dtype=object)[number],
            "seq": calls["seq"].to_numpy(),
        },
        CALL_COMMS,
    )
    return _with_microbatches(table, rank_ops)


def _sizes(calls: pd.DataFrame) -> dict[str, npt.NDArray[Any]]:
    """Bytes of calls; of an all-to-all of uneven parts what is handed in and what comes back: a call tells the larger."""
    num_bytes, splits = calls["bytes"].to_numpy(), calls["splits"].to_numpy(dtype=object)
    sent, received = rows_of_splits(splits)
    most = np.maximum(np.maximum(sent, received), 1)
    is_known = (num_bytes >= 0) & (splits != "")
    return {
        "bytes": np.where(is_known, num_bytes // most * sent, num_bytes),
        "received_bytes": np.where(is_known, num_bytes // most * received, -1),
        "splits": splits,
    }


def _each(function: Callable[..., Any], columns: Sequence[npt.NDArray[Any]], dtype: str) -> npt.NDArray[Any]:
    """Results of a function for each row of some columns; called once for equal rows."""
    number, first = distinct_of(columns)
    values = [function(*row) for row in zip(*(column[first].tolist() for column in columns), strict=True)]
    return np.array(values, dtype=dtype)[number]


def _is_labelled(calls: pd.DataFrame, kinds: Texts, axes: Texts, labelled: pd.DataFrame) -> Bool:
    """Mask of the calls that are messages which labels cover: of a pipeline's all sends and receives, and kernels at the time of
    one; of others those that begin as one does.

    Where other collectives use the pipeline's group too, so that it has their axis, a message is one that begins as a label does.
    Labels on the host's clock do not tell when the kernels ran: then each kernel that may be a message is one.
    """
    if not len(labelled):
        return np.zeros(len(calls), dtype=np.bool_)
    kernels = kinds == "send_recv"
    of_pipeline = labelled[labelled["axis"] == "pp"]
    if kernels.any() and (of_pipeline["clock"] == "device").all():
        busy = union(of_pipeline["start_ns"], of_pipeline["end_ns"])
        at = np.searchsorted(busy[:, 1], calls["start_ns"].to_numpy(), side="right")
        begins = np.append(busy[:, 0], np.iinfo(np.int64).max)[at]
        kernels &= begins < calls["end_ns"].to_numpy()
    covered: Bool = are_among(axes, ("pp", UNKNOWN)) & (kernels | are_among(kinds, P2P)) & bool(len(of_pipeline))
    for kind in P2P:
        begins = labelled["start_ns"].to_numpy()[(labelled["kind"] == kind).to_numpy()]
        covered |= (kinds == kind) & np.isin(calls["start_ns"].to_numpy(), begins)
    return covered


def _with_microbatches(calls: pd.DataFrame, ops: pd.DataFrame) -> pd.DataFrame:
    """A pipeline's messages with their stage and microbatch, on a rank with one stage: the k-th of a step is that of its k-th op.

    What is sent was made by the op, what is received is read by it; where messages and ops are not equally many, none is named.
    """
    compute = ops[rows_among(ops["kind"], ("F", "B", "I"))].sort_values("start_ns", kind="stable")
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


def _axis(kind: str, group: Group, hint: str, groups: Groups, has_ops: bool) -> str:
    """A group of the whole world is what the pipeline's messages use where they have no group of their own, and the rank has ops
    or messages show pipelines.

    A barrier of all ranks is of no axis, whatever else their group is used for.
    """
    axis = groups.axes.get(group, UNKNOWN)
    if kind == "barrier" and group.size > 1 and group.size == groups.world_size:
        return "world"
    if kind in P2P and axis in ("world", UNKNOWN):
        return "pp" if (has_ops or groups.pipelines) and group not in groups.rings else UNKNOWN
    return hint or axis if axis == UNKNOWN else axis


def _kinds(calls: pd.DataFrame, ops: pd.DataFrame) -> Texts:
    """The kinds; a kernel that may be any of send, receive and all-to-all exchanges tokens if it lies inside a single op."""
    kinds: Texts = calls["kind"].to_numpy(dtype=object, copy=True)
    is_with_gemm = (kinds == "send_recv") & (calls["hint"] == "tp").to_numpy()  # in parts
    kinds[is_with_gemm] = "ring_exchange"
    kinds[(kinds == "send_recv") & (calls["hint"] == "ep").to_numpy()] = "all_to_all"
    unclear = np.flatnonzero(kinds == "send_recv")
    if not len(unclear):
        return kinds
    compute = ops[rows_among(ops["kind"], COMPUTE_KINDS) & (ops["clock"] == "device")].sort_values(
        "start_ns", kind="stable"
    )
    starts, ends = compute["start_ns"].to_numpy(), np.maximum.accumulate(compute["end_ns"].to_numpy())
    started, ended = (calls[name].to_numpy()[unclear] for name in ("start_ns", "end_ns"))
    kinds[unclear[find_interval(starts, ends, started - 1, until=ended + 1) >= 0]] = "all_to_all"
    return kinds


def _direction(rank: int, kind: str, axis: str, peer: int, *, mesh: MeshInfo) -> str:
    """F or B of a message between neighbours of a pipeline; "" where it may be either, as between two ranks with chunks."""
    pipeline = mesh.pipeline_of(rank)
    if axis != "pp" or peer not in pipeline or len(pipeline) < 2 or ((mesh.vpp or 1) > 1 and len(pipeline) == 2):
        return ""
    distance = pipeline.index(peer) - pipeline.index(rank)
    if (mesh.vpp or 1) > 1 and abs(distance) == len(pipeline) - 1:
        distance = -distance  # from the last rank on to the next chunk on the first
    return "F" if (distance > 0) == (kind == "send") else "B"


def _steps(calls: pd.DataFrame, kinds: Texts, ops: pd.DataFrame) -> Int64:
    """The step of each call, -1 outside all: by the steps' own ranges, on the device where these are, else by the ops around it.

    Between the last op of one step and the first of the next, what is received belongs to the next step and the rest to the one
    before: gradients are summed, and the last ones sent, after the ops.
    """
    marked = ops[ops["kind"] == "STEP"].sort_values("start_ns", kind="stable")
    if len(marked):
        on_device = (marked["clock"] == "device").any() & (calls["clock"] == "device").to_numpy()
        at = np.where(on_device, calls["start_ns"], calls["host_ns"])
        index = find_interval(marked["start_ns"].to_numpy(), marked["end_ns"].to_numpy(), at)
        return np.append(marked["step"].to_numpy(), -1)[index].astype(np.int64)
    compute = ops[rows_among(ops["kind"], COMPUTE_KINDS)]
    if compute.empty:
        return np.full(len(calls), -1, dtype=np.int64)
    by_step = compute.groupby("step")
    start, end = by_step["start_ns"].min(), by_step["end_ns"].max().to_numpy()
    order = np.argsort(start.to_numpy())
    numbers, starts, ends = start.index.to_numpy()[order], start.to_numpy()[order], end[order]
    at = calls["start_ns"].to_numpy()
    index = np.searchsorted(starts, at, side="right") - 1
    after = (index < 0) | (at >= ends[np.maximum(index, 0)])
    index = np.where(after & (kinds == "recv") & (index + 1 < len(numbers)), index + 1, index)
    return np.append(numbers, -1)[index].astype(np.int64)
