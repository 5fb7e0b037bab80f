"""Convert ranges with the ids of pipeline ops in their arguments to OPS and COMMS.

An op is a range named forward or backward (or one of the names below) with its microbatch or sequence number
(:mod:`pptrace.ingest.chrome.sequence_ids`) among its arguments, and the model chunk or stage where its rank has several.
MegaScan, which writes such ranges (github.com/OpenSQZ/MegatronApp, 77f7b0a, megatron/training/trace.py and
scripts/aggregate.py), puts the arguments on the ends: microbatch or micro_batch_index, model_chunk, pp_rank, dp_rk, pp_rk,
tp_rk, g_rk, iteration, and ``group`` and ``data`` on messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from pptrace.axes import WITHIN_STAGE
from pptrace.ingest.chrome.ranges import Range
from pptrace.ingest.chrome.sequence_ids import number_by_sequence
from pptrace.ingest.ops.build import comms_table, ops_table
from pptrace.ingest.ops.mesh import Facts, mesh_facts
from pptrace.ingest.ops.stages import assign_stages, number_chunks
from pptrace.ingest.ops.steps import number_by_repetition
from pptrace.marks import P2P
from pptrace.model.tables import COMPUTE_KINDS

_NAMES = {
    "F": "forward forward-warmup forward-compute forward_step fwd f",
    "B": "backward backward-cooldown backward-compute backward_step bwd b",
    "W": "wgrad weight-backward backward_weight w",
    "I": "dgrad input-backward backward_input",
    "OPTIMIZER": "optimizer optimizer_step optimizer.step",
    "GRAD_SYNC": "grad-sync grad_sync grads-reduce-scatter",
    "LOSS": "loss",
    "STEP": "iteration step train_step",
}
_KIND = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_MESSAGES = {
    "recv-warmup": ("recv", "F"),
    "recv-forward": ("recv", "F"),
    "recv-extra": ("recv", "F"),
    "recv-backward": ("recv", "B"),
    "recv-cooldown": ("recv", "B"),
    "send-warmup": ("send", "F"),
    "send-forward": ("send", "F"),
    "send-extra": ("send", "F"),
    "send-backward": ("send", "B"),
    "send-cooldown": ("send", "B"),
    "forward-send": ("send", "F"),
    "forward-recv": ("recv", "F"),
    "backward-send": ("send", "B"),
    "backward-recv": ("recv", "B"),
}
_MICROBATCH = ("microbatch", "micro_batch_index", "micro_batch", "mb_id", "mb", "microbatch_id", "minibatch")
_CHUNK = ("model_chunk", "chunk", "vpp_rank", "virtual_stage")
_STEP = ("iteration", "step", "iter")
_PP = ("pp_rank", "pp_rk", "pipeline_rank")
_AXES = {f"{axis}_rank": (f"{axis}_rank", f"{axis}_rk", str(axis)) for axis in WITHIN_STAGE} | {"pp_rank": (*_PP, "pp")}
_FRAMEWORKS = {
    "bytedance": {"mb_id"},  # the timeline of github.com/ByteDance-Seed/StragglerAnalysis
    "megascan": {"model_chunk", "micro_batch_index", "pp_rk", "g_rk"},
}
"""Argument names that identify a framework."""
_DIGITS = re.compile(r"-?\d{1,9}")


@dataclass(frozen=True, slots=True)
class ChromeOps:
    """OPS and COMMS of all ranks of a file, the framework that named them, and the mesh where arguments have coordinates."""

    framework: str
    ops: pd.DataFrame
    comms: pd.DataFrame
    facts: Facts

    def of_rank(self, rank: int) -> ChromeOps:
        """Select the rows of one rank."""
        ops, comms = (table[table["rank"] == rank].reset_index(drop=True) for table in (self.ops, self.comms))
        return ChromeOps(self.framework, ops, comms, self.facts)


def ops_of(ranges: Sequence[Range], ranks: Sequence[int], pp: int | None = None) -> ChromeOps | None:
    """Convert a file's ranges to ops; None unless it has forwards and backwards with microbatches.

    Args:
        ranges: in order of start.
        ranks: the rank of each range.
        pp: the number of pipeline ranks, where known from elsewhere.
    """
    rows = [_row(entry, rank) for entry, rank in zip(ranges, ranks, strict=True) if _is_op_or_message(entry.name)]
    table = pd.DataFrame([row for row in rows if row is not None])
    if table.empty or not {"F", "B"} <= set(table["kind"]):
        return None
    is_op = table["kind"].isin(COMPUTE_KINDS)
    with_microbatches = number_by_sequence(table, is_op)
    if with_microbatches is None:
        return None
    table = with_microbatches
    has_steps = bool((table.loc[is_op, "step"] >= 0).all())
    is_message = table["kind"].isin(P2P)
    table = table[~is_message | (table["microbatch"] >= 0) | (table["peer"] >= 0)]
    is_message = is_message[table.index]
    ops = number_by_repetition(table[~is_message].assign(step=table["step"].clip(lower=0)), has_steps)
    ops = ops.assign(stage=_stages(ops, pp), kind=_split_backward(ops))
    ops["chunk"] = ops["chunk"].where(~ops["kind"].isin(COMPUTE_KINDS), number_chunks(ops))
    op_columns = ("rank", "step", "kind", "stage", "chunk", "microbatch", "start_ns", "end_ns")
    arg_names = {arg_name for entry in ranges[:2000] for arg_name in entry.args}
    framework = next((name for name, args in _FRAMEWORKS.items() if args & arg_names), "chrome")
    messages = _messages(table[is_message], ops)
    op_table = ops_table({name: ops[name] for name in op_columns}, len(ops))
    return ChromeOps(framework, op_table, messages, _mesh(ops, ranges, ranks))


def mesh_of(ranges: Sequence[Range], ranks: Sequence[int]) -> Facts:
    """Derive the mesh from the arguments of ranges that are no ops; ({}, {}) where they have no coordinates."""
    return _mesh(pd.DataFrame({"rank": sorted(set(ranks)), "kind": "", "stage": -1, "pp_rank": -1}), ranges, ranks)


def _mesh(ops: pd.DataFrame, ranges: Sequence[Range], ranks: Sequence[int]) -> Facts:
    """Derive the mesh, if every rank has distinct coordinates and every coordinate has a rank."""
    coordinates: dict[int, dict[str, int]] = {}
    for entry, rank in zip(ranges, ranks, strict=True):
        coordinates_of_rank = coordinates.setdefault(rank, {})
        for axis, names in _AXES.items():
            if axis not in coordinates_of_rank and (coordinate := _number(entry.args, names)) >= 0:
                coordinates_of_rank[axis] = coordinate
    table = pd.DataFrame.from_dict(coordinates, orient="index")
    table = table.loc[table.index.isin(ops["rank"].unique())].dropna(axis="columns", how="all")
    if "pp_rank" not in table or len(table.columns) < 2 or table.isna().any(axis=None) or table.duplicated().any():
        return {}, {}
    if math.prod(table[axis].max() + 1 for axis in table) != len(table):
        return {}, {}
    coordinates_of_ops = table.astype("int64").reindex(ops["rank"]).set_axis(ops.index)
    with_coordinates = ops.drop(columns="pp_rank").join(coordinates_of_ops)
    return mesh_facts(with_coordinates, with_coordinates.iloc[:0])


def _is_op_or_message(name: str) -> bool:
    return name.lower() in _KIND or name.lower() in _MESSAGES


def _row(entry: Range, rank: int) -> dict[str, Any] | None:
    name = entry.name.lower()
    kind, direction = _MESSAGES.get(name) or (_KIND[name], "")
    chunk = _number(entry.args, _CHUNK)
    group = entry.args.get("group")
    peers = group if isinstance(group, list) and len(group) == 1 else [-1]
    return {
        "rank": rank,
        "kind": kind,
        "direction": direction,
        "step": _number(entry.args, _STEP),
        "microbatch": _number(entry.args, _MICROBATCH),
        "chunk": chunk,
        "stage": _number(entry.args, ("stage",)),
        "pp_rank": _number(entry.args, _PP),
        "seq": _number(entry.args, ("seq_id",)),
        "peer": peers[0] if isinstance(peers[0], int) else -1,
        "bytes": _number(entry.args, ("data", "bytes")),
        "start_ns": entry.start_ns,
        "end_ns": entry.end_ns,
    }


def _number(args: Mapping[str, Any], names: Sequence[str]) -> int:
    """The first of the arguments that is a whole number; -1 without one."""
    for name in names:
        value = args.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and _DIGITS.fullmatch(value):
            return int(value)
    return -1


def _split_backward(ops: pd.DataFrame) -> pd.Series[str]:
    """Turn B into I where weight gradients have separate ranges."""
    kinds = ops["kind"]
    return kinds.mask((kinds == "B") & bool((kinds == "W").any()), "I")


def _stages(ops: pd.DataFrame, pp: int | None) -> pd.Series[int]:
    """The stage in the arguments, else from chunk and pipeline rank; -1 for rows that are no op."""
    is_op = ops["kind"].isin(COMPUTE_KINDS)
    if not is_op.any() or (ops.loc[is_op, "stage"] >= 0).all():
        return ops["stage"].where(is_op, -1)
    one_op_per_rank = ops[is_op & (ops["pp_rank"] >= 0)].drop_duplicates("rank")
    pp_ranks = dict(zip(one_op_per_rank["rank"].tolist(), one_op_per_rank["pp_rank"].tolist(), strict=True))
    if not pp_ranks:
        pp_ranks = {rank: index for index, rank in enumerate(sorted(ops.loc[is_op, "rank"].unique().tolist()))}
    chunked = ops.assign(chunk=ops["chunk"].where(~is_op | (ops["chunk"] >= 0), 0).where(is_op, -1))
    if pp is not None:
        pp_rank = chunked["rank"].map(pp_ranks).fillna(0).astype("int64")
        return (chunked["chunk"] * pp + pp_rank).where(is_op, -1)
    return pd.Series(assign_stages(chunked, pp_ranks), index=ops.index)


def _messages(rows: pd.DataFrame, ops: pd.DataFrame) -> pd.DataFrame:
    """Make COMMS of sends and receives; their stage is that of their chunk, or the only one of their rank."""
    if rows.empty:
        return comms_table({"kind": [], "start_ns": [], "end_ns": []}, 0)
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    by_chunk = {
        (rank, chunk): stage
        for rank, chunk, stage in zip(compute["rank"], compute["chunk"], compute["stage"], strict=True)
    }
    chunks = [max(chunk, 0) for chunk in rows["chunk"]]
    stages = [by_chunk.get((rank, chunk), -1) for rank, chunk in zip(rows["rank"], chunks, strict=True)]
    steps = rows["step"].clip(lower=0)
    columns = {
        name: rows[name] for name in ("rank", "kind", "direction", "microbatch", "peer", "bytes", "start_ns", "end_ns")
    }
    shared = {"axis": ["pp"] * len(rows), "group_size": [2] * len(rows), "stage": stages, "step": steps}
    return comms_table({**columns, **shared}, len(rows))
