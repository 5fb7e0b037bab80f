"""Which way a pipeline's messages go, where no label says so: from the stages of their two ends."""

from __future__ import annotations

import numpy as np
import pandas as pd

from pptrace.recognise.mesh import MeshInfo

_P2P = ("send", "recv")


def with_directions(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """``comms`` in which the pipeline's messages of known stage and peer have their direction, F or B, as far as these tell it.

    What stage s sends to a rank with stage s+1 goes forward, and to one with s−1 backward; what it receives, the other way round.
    Of a peer with both, as between two ranks with chunks, the first message of a microbatch goes forward and the second one back:
    a stage runs the forward of a microbatch before its backward. One alone keeps "".
    """
    lacking = comms["kind"].isin(_P2P) & (comms["axis"] == "pp") & (comms["direction"] == "")
    lacking &= (comms["stage"] >= 0) & (comms["peer"] >= 0)
    if not lacking.any():
        return comms
    rows = comms[lacking]
    held = set(ops.loc[ops["stage"] >= 0, ["rank", "stage"]].drop_duplicates().itertuples(index=False, name=None))
    after, before = (
        np.array([(peer, stage + away) in held for peer, stage in zip(rows["peer"], rows["stage"], strict=True)])
        for away in (1, -1)
    )
    is_near = np.array([peer in mesh.pipeline_of(rank) for rank, peer in zip(rows["rank"], rows["peer"], strict=True)])
    is_send = (rows["kind"] == "send").to_numpy()
    forward, backward = np.where(is_send, after, before), np.where(is_send, before, after)
    told = np.where(forward & ~backward, "F", np.where(backward & ~forward, "B", ""))
    of_both = forward & backward & (rows["microbatch"] >= 0).to_numpy()
    told[of_both] = _by_order(rows[of_both])
    filled = comms.copy()
    filled.loc[lacking, "direction"] = np.where(is_near, told, "")
    return filled


def _by_order(rows: pd.DataFrame) -> list[str]:
    """F and B of the two messages that a microbatch has of a kind, stage and peer; "" where there are not two."""
    key = ["rank", "step", "kind", "stage", "microbatch", "peer"]
    groups = rows.sort_values("start_ns", kind="stable").groupby(key)
    nth, size = groups.cumcount().reindex(rows.index), groups["start_ns"].transform("size").reindex(rows.index)
    return [("F", "B")[place] if count == 2 else "" for place, count in zip(nth, size, strict=True)]
