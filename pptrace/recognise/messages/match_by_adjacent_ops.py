"""Assign stage, microbatch and direction to messages of which only some have ranges: those of the adjacent op on the same rank.

A receive comes right before the op that reads it, a send right after the op that made it. What a stage at an end of the pipeline
calls for a neighbour that it does not have moves nothing and is no message.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd

from pptrace.marks import P2P
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS, DIRECTIONS
from pptrace.recognise.messages.messages_from_plan import PRODUCERS, with_adjacent_op

_MESSAGE = ("rank", "step", "kind", "stage", "microbatch")


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
    # The stage at the other end has to exist, as far as the number of stages is known.
    next_or_previous = np.where((joined["kind"] == "send") == (joined["direction"] == "F"), 1, -1)
    num_stages = mesh.pp * mesh.vpp if mesh.pp and mesh.vpp else np.iinfo(np.int64).max
    exists = (joined["stage"] + next_or_previous).between(0, num_stages - 1)
    return joined[exists | ~joined.index.isin(comms.index[is_open])].sort_index()


def _of_rank(rows: pd.DataFrame, ops: pd.DataFrame, sends: bool) -> pd.DataFrame:
    """The messages of one rank and way that an op of the right kind stands next to, the nearest one of each op."""
    rows, adjacent = with_adjacent_op(rows, ops, sends)
    is_right_kind = np.array(
        [kind in PRODUCERS[way] for kind, way in zip(adjacent["kind"], rows["direction"], strict=True)], dtype=bool
    )
    named = rows.assign(**{name: adjacent[name].to_numpy() for name in ("step", "stage", "microbatch")})
    named = named.assign(posted_ns=named["start_ns"], asked_ns=named["start_ns"])  # the host waits inside of the call
    named = named[is_right_kind & (adjacent["stage"].to_numpy() >= 0)]
    named = named[named["microbatch"] >= 0]
    of_op = ["step", "direction", "stage", "microbatch"]
    nearest: pd.DataFrame = named.drop_duplicates(of_op, keep="first" if sends else "last")
    return nearest


def with_directions(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """Fill in the direction, F or B, of pipeline messages of known stage, as far as stage and peer determine it.

    What stage s sends to a rank with stage s+1 goes forward, and to one with s−1 backward; what it receives, the other way round.
    Of a peer with both, as between two ranks with chunks, the first message of a microbatch goes forward and the second one back:
    a stage runs the forward of a microbatch before its backward. One alone keeps "". A message whose peer is not known goes to or
    comes from the ranks of its pipeline with the stages before and after its own.
    """
    lacking = comms["kind"].isin(P2P) & (comms["axis"] == "pp") & (comms["direction"] == "")
    lacking &= comms["stage"] >= 0
    if not lacking.any():
        return comms
    rows = comms[lacking]
    stages = set(ops.loc[ops["stage"] >= 0, ["rank", "stage"]].drop_duplicates().itertuples(index=False, name=None))

    def has_stage(rank: int, peer: int, stage: int) -> bool:
        """Return whether the other end of a rank's message has a stage: any other rank of its pipeline where it is not known."""
        peers = [peer] if peer >= 0 else [other for other in mesh.pipeline_of(rank) if other != rank]
        return any((other, stage) in stages for other in peers)

    ends = list(rows[["rank", "peer", "stage"]].itertuples(index=False, name=None))
    after, before = (
        np.array([has_stage(rank, peer, stage + offset) for rank, peer, stage in ends]) for offset in (1, -1)
    )
    is_near = np.array([peer < 0 or peer in mesh.pipeline_of(rank) for rank, peer, _ in ends])
    is_send = (rows["kind"] == "send").to_numpy()
    forward, backward = np.where(is_send, after, before), np.where(is_send, before, after)
    directions = np.where(forward & ~backward, "F", np.where(backward & ~forward, "B", ""))
    of_both = forward & backward & (rows["microbatch"] >= 0).to_numpy()
    # Of two messages that a microbatch has of a kind, stage and peer, the first goes forward.
    same = rows[of_both].sort_values("start_ns", kind="stable").groupby([*_MESSAGE, "peer"])
    nth, size = (
        column.reindex(rows.index[of_both]) for column in (same.cumcount(), same["start_ns"].transform("size"))
    )
    directions[of_both] = np.where(size == 2, np.where(nth == 0, *DIRECTIONS), "")
    filled = comms.copy()
    filled.loc[lacking, "direction"] = np.where(is_near, directions, "")
    return filled


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
