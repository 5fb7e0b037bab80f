"""Slow members of collectives inside ops: a rank of tp or cp whose peers wait for it, and which no pipeline of its own shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.reason import Reason, gains

LATE_MEMBER = "late member"
_LEAST_RATIO = 3.0
"""A rank is slow for which others wait so many times as long as for any of those."""


def late_member(plans: Sequence[StepMatrix]) -> Reason | None:
    """The rank for which others wait longest inside ops, and what steps would get back if it came when the next one does.

    None where no rank is slower than those that wait for it: where all come last in turn, ops vary.
    """
    caused, peers = _caused(plans)
    if not caused:
        return None
    rank = max(caused, key=caused.__getitem__)
    if caused[rank] < _LEAST_RATIO * max(caused.get(peer, 0) for peer in peers[rank]):
        return None
    in_time = (replace(costs, durations=costs.durations - costs.held(costs.holds["rank"] == rank)) for costs in plans)
    waiting = ", ".join(map(str, sorted(peers[rank])))
    return Reason(
        LATE_MEMBER,
        ("straggler", "jitter", "communication"),
        {"rank": rank},
        "Late member: {share} is lost to " + f"rank {rank}, for which others wait inside their ops",
        f"it comes last to the collectives that it has with rank {waiting}, with as much to compute: look at its host, clocks "
        "and neighbours",
        gains(plans, in_time),
        {"waiting_ranks": sorted(peers[rank])},
    )


def _caused(plans: Sequence[StepMatrix]) -> tuple[dict[int, int], dict[int, set[int]]]:
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
