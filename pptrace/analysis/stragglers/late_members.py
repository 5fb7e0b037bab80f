"""Slow members of collectives inside ops: a rank of tp or cp whose peers wait for it, and which no pipeline of its own shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pptrace.analysis.stragglers.costs import MeasuredCosts
from pptrace.analysis.stragglers.reason import Reason, step_lengths
from pptrace.model.tables import Int64

LATE_MEMBER = "late member"
_LEAST_RATIO = 3.0
"""A rank is slow for which others wait so many times as long as for any of those."""


def late_member(plans: Sequence[MeasuredCosts], measured: Sequence[Int64]) -> Reason | None:
    """The rank for which others wait longest inside ops, and what steps would get back if it came when the next one does.

    None where no rank is slower than those that wait for it: where all come last in turn, ops vary.
    """
    caused, peers = _caused(plans)
    if not caused:
        return None
    rank = max(caused, key=caused.__getitem__)
    if caused[rank] < _LEAST_RATIO * max(caused.get(peer, 0) for peer in peers[rank]):
        return None
    gains = [
        lengths - step_lengths(costs, costs.durations - costs.held(costs.holds["rank"] == rank), costs.transfers)
        for costs, lengths in zip(plans, measured, strict=True)
    ]
    waiting = ", ".join(map(str, sorted(peers[rank])))
    return Reason(
        LATE_MEMBER,
        ("straggler", "jitter", "communication"),
        {"rank": rank},
        "Late member: {share} is lost to " + f"rank {rank}, for which others wait inside their ops",
        f"it comes last to the collectives that it has with rank {waiting}, with as much to compute: look at its host, clocks "
        "and neighbours",
        np.concatenate(gains),
        {"waiting_ranks": sorted(peers[rank])},
    )


def _caused(plans: Sequence[MeasuredCosts]) -> tuple[dict[int, int], dict[int, set[int]]]:
    """(the time by which each rank held up its collectives, ns, the ranks that waited for it)."""
    caused: dict[int, int] = {}
    peers: dict[int, set[int]] = {}
    for costs in plans:
        holds = costs.holds
        is_late = holds["is_late"] == 1
        ranks, number = np.unique(holds["rank"][is_late], return_inverse=True)
        totals = np.zeros(len(ranks), dtype=np.int64)
        np.add.at(totals, number, holds["ns"][is_late])
        for rank, ns in zip(ranks.tolist(), totals.tolist(), strict=True):
            caused[rank] = caused.get(rank, 0) + ns
        waiting = costs.ranks[holds["window"], costs.table.rank[holds["row"]]]
        for rank, peer in np.unique(np.stack((holds["rank"], waiting))[:, ~is_late], axis=1).T.tolist():
            peers.setdefault(rank, set()).add(peer)
    return caused, peers
