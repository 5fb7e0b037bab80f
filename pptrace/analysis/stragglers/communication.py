"""Slow links: the messages between two ranks of a pipeline take longer than those of links like it.

Like it are the links between the same two pipeline ranks of the other pipelines; of a single pipeline, its other links.

Waits for one that is late: ops that wait inside collectives for the member that comes last, and receives that run on.

A slow member of tp or cp has peers that wait for it, and no pipeline of its own shows it. A kernel may still receive what the
kernel of the sender has sent: the message is under way, or the device of the receiver runs something else, as ranks that share a
device take turns on it. The host has launched all, and neither ops nor transfers show it.

Unequal routes to experts: what steps would get back if all experts had equally many rows, and who has most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix, pipelines_of
from pptrace.analysis.stragglers.reason import Reason, gains
from pptrace.analysis.whole_run import UNEQUAL_ROUTES
from pptrace.axes import Axis
from pptrace.model.tables import Floats, Int64
from pptrace.slices import reduce_groups

SLOW_LINK = "slow link"
_LEAST_RATIO = 2.0
"""A link is slow whose messages take so many times as long as those of its like, in the median and the upper quartile."""
_QUANTILES = (50, 75)
"""Percentiles of the messages that were waited for: of what had come before it was asked for, no time is known. Medians alone
differ by chance where half of the messages come while their ranks are busy."""
FEWEST_ALIKE = 2
"""Other links of one pipeline; fewer tell too little of what is usual."""


OnOneHost = Callable[[Sequence[int]], bool | None]
"""Returns whether ranks are on one host, None where it is not known."""


def not_known(_: Sequence[int]) -> None:
    return None


class _Link(Struct, frozen=True):
    """The messages between two pipeline ranks of a pipeline: their typical transfer and that of links like it, ns."""

    ranks: tuple[int, int]
    typical: float
    usual: float


def slow_link(plans: Sequence[StepMatrix], are_on_one_host: OnOneHost = not_known) -> Reason | None:
    """The slowest link against its like, and what steps would get back if it were as fast; None where all are alike."""
    links = [link for link in map(_slowest, plans) if link is not None]
    if not links:
        return None
    link = max(links, key=lambda link: link.typical - link.usual)
    ranks, is_inside = sorted(link.ranks), are_on_one_host(link.ranks)
    return Reason(
        SLOW_LINK,
        ("communication", "unexplained"),
        {"link": "-".join(map(str, ranks))},
        f"Slow link: {{share}} goes to messages between ranks {ranks[0]} and {ranks[1]}{' of one host' * bool(is_inside)}",
        f"they typically take {link.typical / 1e6:,.3f} ms where those of links like it take {link.usual / 1e6:,.3f} ms: "
        f"{_LOOK_AT_LINK[is_inside]}",
        gains(plans, (_as_usual(costs, link) for costs in plans)),
        {"typical_ns": round(link.typical), "usual_ns": round(link.usual), "same_host": is_inside},
    )


_LOOK_AT_LINK: Mapping[bool | None, str] = {
    True: "look at other work on that host, for which a receiver waits for its core, at its NUMA nodes, and at what joins its "
    "devices, if it has any",
    False: "look at the network between the two ranks, and at what else uses it",
    None: "look at the network between the two ranks and at what else uses it, or, if they are on one host, at other work on it",
}
"""Advice on a slow link, by whether its ranks are on one host (None: not known)."""


def peer_bit(place: Int64 | int) -> Int64:
    """The bit of a pipeline rank in a set of peers: those of one rank are few, and near it or at the other end."""
    return np.left_shift(1, np.asarray(place, dtype=np.int64) % 31)


def num_links(costs: StepMatrix) -> int:
    """Pairs of pipeline ranks with messages between them."""
    return len(np.unique(_ends(costs)))


def _ends(costs: StepMatrix) -> Int64:
    """The pipeline ranks of each message's sender and reader, the smaller first, as one number."""
    table = costs.table
    sender, reader = (table.rank[rows].astype(np.int64) for rows in table.messages[:2])
    return np.minimum(sender, reader) * table.pp + np.maximum(sender, reader)


def _slowest(costs: StepMatrix) -> _Link | None:
    """The link of a plan's pipelines with the largest excess."""
    ends = _ends(costs)
    pipelines = pipelines_of(costs.ranks)
    boundaries = np.unique(ends)
    times = np.full((len(_QUANTILES), len(pipelines), len(boundaries)), np.nan)
    for index, boundary in enumerate(boundaries.tolist()):
        transfers, is_whole = costs.transfers[:, ends == boundary], costs.sender_is_last[:, ends == boundary]
        for pipeline, (_, windows) in enumerate(pipelines):
            of_link, whole = transfers[windows], is_whole[windows]
            known = of_link[(of_link > 0) & whole]  # of others a part may have been moved before they were asked for
            if (known := known if known.size else of_link[of_link > 0]).size:
                times[:, pipeline, index] = np.percentile(known, _QUANTILES)
    links = []
    for pipeline, index in np.argwhere(~np.isnan(times[0])).tolist():
        usual = [_usual(quantile, pipeline, index) for quantile in times]
        if all(
            limit and at >= _LEAST_RATIO * limit for limit, at in zip(usual, times[:, pipeline, index], strict=True)
        ):
            first, second = divmod(int(boundaries[index]), costs.table.pp)
            ranks = pipelines[pipeline][0][first], pipelines[pipeline][0][second]
            links.append(_Link(ranks, float(times[0, pipeline, index]), usual[0] or 0.0))
    return max(links, key=lambda link: link.typical - link.usual, default=None)


def _usual(typical: Floats, pipeline: int, boundary: int) -> float | None:
    """Typical time of the messages of links like one, ns; None where too few are known."""
    replicas = np.delete(typical[:, boundary], pipeline)
    replicas = replicas[~np.isnan(replicas)]
    if len(replicas):
        return float(np.median(replicas))
    others = np.delete(typical[pipeline], boundary)
    others = others[~np.isnan(others)]
    return float(np.median(others)) if len(others) >= FEWEST_ALIKE else None


def _as_usual(costs: StepMatrix, link: _Link) -> StepMatrix:
    """The costs, messages of a link and what these kept their ranks from no longer than is usual."""
    is_of_link = np.isin(costs.ranks, link.ranks)
    is_window = is_of_link.sum(axis=1) == 2
    place = [costs.ranks[is_window][0].tolist().index(rank) for rank in link.ranks] if is_window.any() else [0, 0]
    is_message = _ends(costs) == min(place) * costs.table.pp + max(place)
    of_link = is_window[:, np.newaxis]
    usual = np.int64(round(link.usual))  # costs are in as few bytes as they need, which it may exceed
    transfers = np.where(of_link & is_message, np.minimum(costs.transfers, usual), costs.transfers)
    rank = costs.table.rank
    is_kept = np.zeros(costs.moving.shape, dtype=np.bool_)
    for here, there in (place, place[::-1]):
        is_kept |= (rank == here) & (costs.moved_with & peer_bit(there) > 0)
    # What is shorter than a whole transfer is the rest of one that had begun before it was asked for.
    saved = np.int64(round(max(link.typical - link.usual, 0)))
    kept = np.minimum(np.maximum(costs.moving.astype(np.int64) - saved, 0), usual)
    moving = np.where(of_link & is_kept, np.minimum(costs.moving, kept), costs.moving)
    return replace(costs, transfers=transfers, moving=moving)


LATE_MEMBER = "late member"
_LEAST_WAIT_RATIO = 3.0
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
    if caused[rank] < _LEAST_WAIT_RATIO * max(caused.get(peer, 0) for peer in peers[rank]):
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
        totals = reduce_groups(np.add, holds["ns"][is_late], number, len(ranks))
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


CLEARLY = 1.25
"""An expert or rank is named that has so many times the mean."""


class HotSpot(Struct, frozen=True):
    """The rank whose experts have most rows compared with its group's, and the expert with most routes over its layer's mean."""

    rank: int
    ratio: float
    expert: int | None
    expert_ratio: float | None
    layer: int | None
    num_layers: int


def unequal_routes(gains: Int64, spot: HotSpot) -> Reason:
    """The reason that ranks of experts have unequally many rows, with what equal ones would gain."""
    at, evidence = _words(spot)
    return Reason(
        UNEQUAL_ROUTES,
        ("imbalance",),
        {"axis": str(Axis.EP), **({"rank": spot.rank} if spot.ratio >= CLEARLY else {})},
        "Unequal routes: {share} is waiting for ranks whose experts have more rows than others" + at,
        "balance the routes (auxiliary loss, bias, capacity), or spread experts that are chosen often over the ranks; "
        "`pptrace whatif --ideal routing` replays the run with equal rows",
        gains,
        evidence,
        is_cause=True,
    )


def _words(spot: HotSpot) -> tuple[str, dict[str, Any]]:
    """(words on who has most, for the title; figures behind it)."""
    evidence: dict[str, Any] = {"rank_ratio": spot.ratio}
    parts = []
    if spot.expert is not None and (spot.expert_ratio or 0) >= CLEARLY:
        of = f"in {spot.num_layers} layers" if spot.num_layers > 1 else f"in layer {spot.layer}"
        parts.append(f"expert {spot.expert} has {spot.expert_ratio:.1f} times the mean {of}")
        evidence |= {"expert": spot.expert, "expert_ratio": spot.expert_ratio, "layer": spot.layer}
    if spot.ratio >= CLEARLY:
        parts.append(f"rank {spot.rank} computes {spot.ratio:.1f} times the rows of its group")
    return (": " + ", ".join(parts) if parts else ""), evidence
