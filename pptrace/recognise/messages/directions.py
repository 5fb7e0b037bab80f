"""Directions of pipeline messages without a label, from the stages of their two ends."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import pandas as pd

from pptrace.marks import P2P
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import DIRECTIONS


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
    held = set(ops.loc[ops["stage"] >= 0, ["rank", "stage"]].drop_duplicates().itertuples(index=False, name=None))
    ends = list(rows[["rank", "peer", "stage"]].itertuples(index=False, name=None))
    after, before = (
        np.array([_holds(mesh, held, rank, peer, stage + offset) for rank, peer, stage in ends]) for offset in (1, -1)
    )
    is_near = np.array([peer < 0 or peer in mesh.pipeline_of(rank) for rank, peer, _ in ends])
    is_send = (rows["kind"] == "send").to_numpy()
    forward, backward = np.where(is_send, after, before), np.where(is_send, before, after)
    directions = np.where(forward & ~backward, "F", np.where(backward & ~forward, "B", ""))
    of_both = forward & backward & (rows["microbatch"] >= 0).to_numpy()
    directions[of_both] = _by_order(rows[of_both])
    filled = comms.copy()
    filled.loc[lacking, "direction"] = np.where(is_near, directions, "")
    return filled


def _holds(mesh: MeshInfo, held: Set[tuple[int, int]], rank: int, peer: int, stage: int) -> bool:
    """Return whether the other end of a rank's message, any other rank of its pipeline where that is not known, has a stage."""
    peers = (peer,) if peer >= 0 else mesh.pipeline_of(rank)
    return any((candidate, stage) in held for candidate in peers if candidate != rank or peer >= 0)


def _by_order(rows: pd.DataFrame) -> list[str]:
    """F and B of the two messages that a microbatch has of a kind, stage and peer; "" where there are not two."""
    key = ["rank", "step", "kind", "stage", "microbatch", "peer"]
    groups = rows.sort_values("start_ns", kind="stable").groupby(key)
    nth, size = groups.cumcount().reindex(rows.index), groups["start_ns"].transform("size").reindex(rows.index)
    return [DIRECTIONS[index] if count == 2 else "" for index, count in zip(nth, size, strict=True)]
