"""Read op tables of ByteDance's straggler study (github.com/ByteDance-Seed/StragglerAnalysis, analyzer/metatypes.py, 8efcd7f).

    columns = dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, mb_id [, gmc]

One row per operation of one rank. ``start_ts`` and ``duration`` are seconds, ``start_ts`` since the beginning of the step, so
that steps are placed one after another here. ``stage`` is the pipeline rank, ``mc`` the model chunk (-1 for messages),
``mb_id`` the microbatch (-1 for communication, whose microbatch follows from the order of the compute on its rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pptrace.errors import TraceError
from pptrace.ingest.common.json_texts import to_ns
from pptrace.ingest.op_tables.rows import Reader
from pptrace.ingest.ops.build import Tables
from pptrace.model.tables import Int64, comms_table, ops_table

COLUMNS = frozenset({"dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id"})
_INTEGERS = {"dp_rank": 0, "stage": 0, "rank": 0, "step": 0, "seq_id": -1, "mc": -1, "mb_id": -1}
"""Integer columns, and the minimum of each."""
_OPS = {
    "forward-compute": "F",
    "backward-compute": "B",
    "optimizer": "OPTIMIZER",
    "optimizer-clip-main-grad": "OPTIMIZER",
    "gc": "GC",
}
_P2P = {
    "forward-send": ("send", "F"),
    "forward-recv": ("recv", "F"),
    "backward-send": ("send", "B"),
    "backward-recv": ("recv", "B"),
}
_COLLECTIVES = {
    "grads-reduce-scatter": ("reduce_scatter", "dp"),
    "params-all-gather": ("all_gather", "dp"),
    "embedding-grads-all-reduce": ("all_reduce", "embd"),
    "layernorm-grads-all-reduce": ("all_reduce", "tp"),
    "separate-grads-all-reduce": ("all_reduce", "dp"),
}
_EVERY = ("rank", "step", "start_ns", "end_ns")
_STEP_GAP_NS = 1_000_000
"""Gap between steps, ns: the table does not contain the time between them."""


def bytedance_tables(path: Path, table: pd.DataFrame) -> Tables:
    """Convert such a table.

    Raises:
        TraceError: a row has no usable time.
    """
    start, is_start_valid = to_ns(table["start_ts"], "s")
    duration, is_duration_valid = to_ns(table["duration"], "s")
    is_valid = is_start_valid & is_duration_valid & (duration >= 0)
    if not is_valid.all():
        row = int(np.argmin(is_valid))
        finding = f"start_ts {table['start_ts'].iloc[row]!s}, duration {table['duration'].iloc[row]!s}"
        raise TraceError(f"{path}: row {row + 1} has {finding}; expected seconds, not negative; correct the row")
    reader = Reader(path, table)
    integer_columns = {name: reader.integers(name, least) for name, least in _INTEGERS.items()}
    rows = pd.DataFrame(
        {**integer_columns, "optype": reader.texts("optype"), "start_ns": start, "end_ns": start + duration}
    )
    rows[["start_ns", "end_ns"]] += _step_offsets(rows)[:, None]
    pp = int(rows["stage"].max()) + 1
    compute = rows[rows["optype"].isin(_OPS)].copy()
    is_op = compute["optype"].isin(("forward-compute", "backward-compute"))
    compute["kind"] = compute["optype"].map(_OPS)
    compute["chunk"] = np.where(is_op, compute["mc"].astype("int64").clip(lower=0), -1)
    compute["pp_rank"] = compute["stage"].astype("int64")
    compute["stage"] = np.where(is_op, compute["chunk"] * pp + compute["pp_rank"], -1)
    compute["microbatch"] = np.where(is_op, compute["mb_id"].astype("int64"), -1)
    columns = ("rank", "step", "kind", "stage", "chunk", "microbatch", "start_ns", "end_ns")
    ops = ops_table({name: compute[name].to_numpy() for name in columns})
    comms = pd.concat([_messages(rows, compute[is_op], pp), _collectives(rows, pp)], ignore_index=True)
    unknown = sorted(set(rows["optype"]) - set(_OPS) - set(_P2P) - set(_COLLECTIVES))
    warnings = [f"left out rows of unknown optype {', '.join(map(repr, unknown[:5]))}"] if unknown else []
    facts, facts_of = _facts(rows, pp)
    facts = {
        **facts,
        "notes": [
            "the table lacks the time between steps: they are placed 1 ms apart, and times across steps mean nothing"
        ],
    }
    return Tables("bytedance", "op table", ops, comms, facts=facts, facts_of=facts_of, warnings=tuple(warnings))


def _step_offsets(rows: pd.DataFrame) -> Int64:
    """Offset of each row's times, shape (n,), ns, so that each step begins after the end of the one before."""
    begin, end = rows.groupby("step")["start_ns"].min(), rows.groupby("step")["end_ns"].max()
    lengths = (end - begin + _STEP_GAP_NS).to_numpy()
    if (begin.to_numpy()[1:] >= end.to_numpy()[:-1]).all() and len(begin) > 1:
        return np.zeros(len(rows), dtype=np.int64)  # the table has one clock for all steps
    offset = pd.Series(np.concatenate([[0], np.cumsum(lengths)[:-1]]) - begin.to_numpy(), index=begin.index)
    return rows["step"].map(offset).to_numpy(dtype=np.int64)


def _messages(rows: pd.DataFrame, compute: pd.DataFrame, pp: int) -> pd.DataFrame:
    """The sends and receives, each with the stage and microbatch of the op that it belongs to."""
    messages = rows[rows["optype"].isin(_P2P)].sort_values(
        ["rank", "step", "optype", "seq_id", "start_ns"], kind="stable"
    )
    pp_rank = rows.groupby("rank")["stage"].first().astype("int64")
    replica = rows.groupby("rank")["dp_rank"].first().astype("int64")
    rank_at = {(replica[rank], pp_rank[rank]): rank for rank in pp_rank.index}
    ops_of_messages = _ops_of_messages(messages, compute)
    kinds = messages["optype"].map(_P2P)
    forward = np.array([direction == "F" for _, direction in kinds], dtype=bool)
    sends = np.array([kind == "send" for kind, _ in kinds], dtype=bool)
    stage_offsets = np.where(forward == sends, 1, -1)
    peers = [
        rank_at.get((replica[rank], (pp_rank[rank] + step) % pp), -1)
        for rank, step in zip(messages["rank"], stage_offsets, strict=True)
    ]
    return comms_table(
        {
            **{name: messages[name].to_numpy() for name in _EVERY},
            "kind": np.where(sends, "send", "recv"),
            "axis": "pp",
            "peer": np.array(peers, dtype=np.int64),
            "group_size": 2,
            "direction": np.where(forward, "F", "B"),
            "stage": ops_of_messages["stage_of_op"].to_numpy(),
            "microbatch": ops_of_messages["microbatch"].to_numpy(),
        }
    )


def _ops_of_messages(messages: pd.DataFrame, compute: pd.DataFrame) -> pd.DataFrame:
    """Columns ``stage_of_op`` and ``microbatch`` of each message, -1 where its rank has no such op.

    The k-th message of a kind belongs to the k-th op of its direction that has one: the first stage receives no forward and
    sends no backward, the last one sends no forward and receives no backward.
    """
    last_stage = compute["stage"].max()
    ordered = compute.sort_values("start_ns", kind="stable").rename(columns={"stage": "stage_of_op"})
    parts = []
    for optype, (kind, direction) in _P2P.items():
        excluded_stage = last_stage if (kind == "send") == (direction == "F") else 0
        ops = ordered[(ordered["kind"] == direction) & (ordered["stage_of_op"] != excluded_stage)]
        parts.append(ops.assign(optype=optype, nth=ops.groupby(["rank", "step"]).cumcount()))
    key = ["rank", "step", "optype", "nth"]
    calls = messages[["rank", "step", "optype"]].assign(
        nth=messages.groupby(["rank", "step", "optype"], observed=True).cumcount()
    )
    joined = calls.merge(pd.concat(parts)[[*key, "stage_of_op", "microbatch"]], on=key, how="left")
    return joined[["stage_of_op", "microbatch"]].fillna(-1).astype("int64")


def _collectives(rows: pd.DataFrame, pp: int) -> pd.DataFrame:
    collectives = rows[rows["optype"].isin(_COLLECTIVES)]
    kinds, axes = (
        np.array([_COLLECTIVES[name][index] for name in collectives["optype"]], dtype=object) for index in (0, 1)
    )
    sizes = {"dp": int(rows["dp_rank"].max()) + 1, "embd": min(pp, 2), "tp": 1}
    return comms_table(
        {
            **{name: collectives[name].to_numpy() for name in _EVERY},
            "kind": kinds,
            "axis": axes,
            "group_size": np.array([sizes[axis] for axis in axes], dtype=np.int64),
        }
    )


def _facts(rows: pd.DataFrame, pp: int) -> tuple[Mapping[str, Any], Mapping[int, Mapping[str, Any]]]:
    """(facts of the mesh, the pipeline of each rank)."""
    rank_rows = rows.groupby("rank")[["stage", "dp_rank"]].first().astype("int64").sort_values("stage")
    dp = int(rows["dp_rank"].max()) + 1
    chunks = max(int(rows["mc"].max()), 0) + 1
    first = rank_rows[rank_rows["stage"] == 0]["dp_rank"]
    ranks = sorted(first.index.tolist())
    dp_first = len(ranks) < 2 or ranks[1] - ranks[0] == 1
    order = "tp-cp-dp-pp" if dp_first else "tp-cp-pp-dp"
    mesh = {"pp": pp, "vpp": chunks, "tp": None, "cp": None, "dp": dp, "ep": None, "order": order}
    pipelines = {
        replica: rank_rows.index[rank_rows["dp_rank"] == replica].tolist() for replica in rank_rows["dp_rank"].unique()
    }
    facts_of = {rank: {"pp_ranks": pipelines[rank_rows.loc[rank, "dp_rank"]]} for rank in rank_rows.index.tolist()}
    return {"mesh": mesh, "world_size": len(rank_rows)}, facts_of
