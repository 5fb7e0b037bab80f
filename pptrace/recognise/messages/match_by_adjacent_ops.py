"""Assign stage and microbatch to messages of which only some have ranges: those of the adjacent op on the same rank.

A receive comes right before the op that reads it, a send right after the op that made it. What a stage at an end of the pipeline
calls for a neighbour that it does not have moves nothing and is no message.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd

from pptrace.marks import P2P
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.messages.messages_from_plan import PRODUCERS


def with_adjacent(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo, ranks: Collection[int]) -> pd.DataFrame:
    """Fill in stage and microbatch of messages of ``ranks`` by the adjacent op; messages without one are dropped.

    Args:
        comms: schema COMMS; the rows meant are of the pipeline, with a direction and without stage and microbatch.
        ops: schema OPS with stages and microbatches, where they are known.
    """
    is_open = comms["kind"].isin(P2P) & (comms["axis"] == "pp") & comms["direction"].isin(PRODUCERS)
    is_open &= (comms["microbatch"] < 0) & (comms["stage"] < 0) & (comms["peer"] < 0) & comms["rank"].isin(ranks)
    if not is_open.any():
        return comms
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns", kind="stable")
    of_rank = {int(str(rank)): rank_ops for rank, rank_ops in compute.groupby("rank")}
    parts = [comms[~is_open]]
    for (rank, kind), rows in comms[is_open].groupby(["rank", "kind"], observed=True):
        if (rank_ops := of_rank.get(int(str(rank)))) is not None:
            parts.append(_of_rank(rows.sort_values("start_ns", kind="stable"), rank_ops, sends=kind == "send"))
    joined: pd.DataFrame = pd.concat([part for part in parts if len(part)] or parts[:1])
    return joined[_has_other_stage(joined, mesh) | ~joined.index.isin(comms.index[is_open])].sort_index()


def _of_rank(rows: pd.DataFrame, ops: pd.DataFrame, sends: bool) -> pd.DataFrame:
    """The messages of one rank and way that an op of the right kind stands next to, the nearest one of each op."""
    if sends:
        index = np.searchsorted(ops["end_ns"].to_numpy(), rows["start_ns"].to_numpy(), side="right") - 1
    else:
        index = np.searchsorted(ops["start_ns"].to_numpy(), rows["end_ns"].to_numpy(), side="left")
    inside = (index >= 0) & (index < len(ops))
    rows, adjacent = rows[inside], ops.iloc[index[inside]]
    is_right_kind = np.array(
        [kind in PRODUCERS[way] for kind, way in zip(adjacent["kind"], rows["direction"], strict=True)], dtype=bool
    )
    named = rows.assign(**{name: adjacent[name].to_numpy() for name in ("step", "stage", "microbatch")})
    named = named.assign(posted_ns=named["start_ns"], asked_ns=named["start_ns"])  # the host waits inside of the call
    named = named[is_right_kind & (adjacent["stage"].to_numpy() >= 0)]
    named = named[named["microbatch"] >= 0]
    kept: pd.DataFrame = named.drop_duplicates(
        ["step", "direction", "stage", "microbatch"], keep="first" if sends else "last"
    )
    return kept


def _has_other_stage(comms: pd.DataFrame, mesh: MeshInfo) -> pd.Series[bool]:
    """Return whether the stage at the other end exists, as far as the number of stages is known."""
    next_or_previous = np.where((comms["kind"] == "send") == (comms["direction"] == "F"), 1, -1)
    other_stage = comms["stage"] + next_or_previous
    num_stages = mesh.pp * mesh.vpp if mesh.pp and mesh.vpp else np.iinfo(np.int64).max
    return (other_stage >= 0) & (other_stage < num_stages)


def drop_half_matched(comms: pd.DataFrame, ranks: Collection[int]) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Drop messages between two of ``ranks`` with a span on one side only; with a warning."""
    between = comms["rank"].isin(ranks) & comms["peer"].isin(ranks) & comms["kind"].isin(P2P)
    half = between & (comms["axis"] == "pp") & (comms["match"] < 0)
    if not half.any():
        return comms, ()
    line = (
        f"{int(half.sum())} of {int(between.sum())} sends and receives have a span on one rank only (combined send-receive calls "
        "may have none): they are left out, and the time of messages without spans counts as bubble"
    )
    return comms[~half].reset_index(drop=True), (line,)
