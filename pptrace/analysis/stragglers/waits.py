"""Waits for one that is late: ops that wait inside collectives for the member that comes last, and receives that run on.

A slow member of tp or cp has peers that wait for it, and no pipeline of its own shows it. A kernel may still receive what the
kernel of the sender has sent: the message is under way, or the device of the receiver runs something else, as ranks that share a
device take turns on it. The host has launched all, and neither ops nor transfers show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.reason import Reason, gains

LATE_MEMBER = "late member"
_LEAST_RATIO = 3.0
"""A rank is slow for which others wait so many times as long as for any of those."""
LATE_RECEIVES = "late receives"
_LEAST_WAIT = 0.25
"""Share of a mean op: shorter ones are how kernels end."""


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


def late_receives(plans: Sequence[StepMatrix], uncertainty_ns: int | None) -> Reason | None:
    """Waits for receives whose senders are done, and what steps would get back without them.

    None where there are none, and where the clocks of two ranks may be off by as much as is typical of them.
    """
    waits = [costs.receiving["ns"] for costs in plans]
    times = np.concatenate(
        [ns[ns >= _LEAST_WAIT * costs.durations.mean()] for ns, costs in zip(waits, plans, strict=True)]
    )
    if not len(times) or uncertainty_ns is None or np.median(times) <= 2 * uncertainty_ns:
        return None
    return Reason(
        LATE_RECEIVES,
        ("unexplained",),
        {},
        "Late receives: {share} is lost in receive kernels that run on after their data was sent",
        f"{len(times)} ops waited for receive kernels that ended typically {np.median(times) / 1e6:,.2f} ms after the send "
        "kernel: the network delivers late, or the receiver's device was busy with something else; ranks that share a device "
        "take turns on it: give each one of its own",
        gains(plans, (costs.without_late_receives() for costs in plans)),
        {"num_ops": len(times), "typical_ns": round(float(np.median(times)))},
    )
