"""Joins the two ends of each transfer and the members of each collective."""

from __future__ import annotations

import numpy as np
import pandas as pd

from pptrace.recognise.mesh import MeshInfo


def match_comms(comms: pd.DataFrame, mesh: MeshInfo | None) -> pd.DataFrame:
    """The comms table with ``match`` filled: one number for the two ends of a transfer or the members of a collective.

    A send of stage s and microbatch b forward meets the receive of stage s+1; backward, that of s−1. Messages without a
    microbatch meet in the order in which their two ends post them, and so do collectives of a group. What has no counterpart
    keeps -1.
    """
    matched = comms.copy()
    matched["match"] = np.int64(-1)
    if comms.empty:
        return matched
    p2p = comms["kind"].isin(("send", "recv"))
    ends = _match_p2p(comms[p2p])
    matched.loc[ends.index, "match"] = ends
    if mesh is not None:
        members = _match_collectives(comms[~p2p], mesh, first=int(ends.max()) + 1 if len(ends) else 0)
        matched.loc[members.index, "match"] = members
    return matched


def _match_p2p(p2p: pd.DataFrame) -> pd.Series[int]:
    """Match numbers of sends and receives that have exactly one counterpart."""
    forward = p2p["direction"] == "F"
    is_send = p2p["kind"] == "send"
    key = p2p[["step", "axis", "direction", "microbatch"]].copy()
    key["edge"] = p2p["stage"] - np.where(is_send | (p2p["direction"] == ""), 0, np.where(forward, 1, -1))
    key["source"] = np.where(is_send, p2p["rank"], p2p["peer"])
    key["target"] = np.where(is_send, p2p["peer"], p2p["rank"])
    key["nth"] = 0
    unnamed = p2p[p2p["microbatch"] < 0].sort_values("start_ns", kind="stable").index
    ends = key.loc[unnamed].assign(is_send=is_send[unnamed])
    key.loc[unnamed, "nth"] = ends.groupby(["step", "axis", "source", "target", "is_send"]).cumcount()
    number = key.groupby(list(key.columns), sort=False).ngroup()
    sends = is_send.groupby(number).transform("sum")
    total = is_send.groupby(number).transform("size")
    return number[(sends == 1) & (total == 2)]


def _match_collectives(collectives: pd.DataFrame, mesh: MeshInfo, first: int) -> pd.Series[int]:
    ordered = collectives.sort_values("start_ns", kind="stable")
    calls = zip(ordered["rank"], ordered["axis"], ordered["group_size"], strict=True)
    groups = [mesh.group_of(rank, axis, size) for rank, axis, size in calls]
    key = ordered[["step", "kind", "axis"]].copy()
    key["group"] = [str(group) if group else "" for group in groups]
    key["nth"] = key.assign(rank=ordered["rank"]).groupby(["step", "kind", "axis", "group", "rank"]).cumcount()
    key = key[key["group"] != ""]
    number = key.groupby(list(key.columns), sort=False).ngroup() + first
    size = number.groupby(number).transform("size")
    complete: pd.Series[int] = number[size == ordered.loc[number.index, "group_size"]]
    return complete


_EARLY = ("send", "broadcast", "reduce", "gather", "scatter")
"""Kinds that one side may be done with before the last side comes, because the message lies in a buffer until then."""


def with_transfers(comms: pd.DataFrame) -> pd.DataFrame:
    """Fill ``transfer_start_ns`` and ``transfer_end_ns``: between them a side moved data, around them it waited.

    Needs aligned clocks. A transfer starts when all sides are ready; a side that may be done before that (a small message
    lies in a buffer) did not wait, and its transfer starts when it does. It ends with the side itself, but a send not after
    its receive: a group of transfers, one kernel on a device, lasts until the slowest of them. On devices a receive does not
    outlast its send either. Unmatched rows keep their own start and end.
    """
    filled = comms.copy()
    matched = comms["match"] >= 0
    own = comms.loc[matched]
    sides = own.groupby("match")
    ready, first_done = sides["start_ns"].transform("max"), sides["end_ns"].transform("min")
    on_device = (own["clock"] == "device").groupby(own["match"]).transform("all")
    bounded = (own["kind"] == "send") | ((own["kind"] == "recv") & on_device)
    buffered = own["kind"].isin(_EARLY) & (own["end_ns"] < ready)
    end = np.where(bounded & (first_done >= ready), first_done, own["end_ns"])
    filled.loc[matched, "transfer_end_ns"] = end
    filled.loc[matched, "transfer_start_ns"] = np.where(buffered, own["start_ns"], np.minimum(ready, end))
    return filled
