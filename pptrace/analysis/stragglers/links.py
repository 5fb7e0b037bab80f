"""Slow links: the messages between two ranks of a pipeline take longer than those of links like it.

Like it are the links between the same two pipeline ranks of the other pipelines; of a single pipeline, its other links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.reason import Reason, gains
from pptrace.model.tables import Int64

SLOW_LINK = "slow link"
_LEAST_RATIO = 2.0
"""A link is slow whose messages take so many times as long as those of its like, in the median and the upper quartile."""
_QUANTILES = (50, 75)
"""Percentiles of the messages that were waited for: of what had come before it was asked for, no time is known. Medians alone
differ by chance where half of the messages come while their ranks are busy."""
FEWEST_ALIKE = 2
"""Other links of one pipeline; fewer tell too little of what is usual."""


@dataclass(frozen=True, slots=True)
class _Link:
    """The messages between two pipeline ranks of a pipeline: their typical transfer and that of links like it, ns."""

    ranks: tuple[int, int]
    typical: float
    usual: float


def slow_link(plans: Sequence[StepMatrix]) -> Reason | None:
    """The slowest link against its like, and what steps would get back if it were as fast; None where all are alike."""
    links = [link for link in map(_slowest, plans) if link is not None]
    if not links:
        return None
    link = max(links, key=lambda link: link.typical - link.usual)
    name = "-".join(map(str, sorted(link.ranks)))
    return Reason(
        SLOW_LINK,
        ("communication", "unexplained"),
        {"link": name},
        "Slow link: {share} goes to messages between ranks " + " and ".join(map(str, sorted(link.ranks))),
        f"they typically take {link.typical / 1e6:,.3f} ms where those of links like it take {link.usual / 1e6:,.3f} ms: look at "
        "the network between the two, and at what else uses it; on one host, at who else wants its cores",
        gains(plans, (_as_usual(costs, link) for costs in plans)),
        {"typical_ns": round(link.typical), "usual_ns": round(link.usual)},
    )


def peer_bit(place: Int64 | int) -> Int64:
    """The bit of a pipeline rank in a set of peers: those of one rank are few, and near it or at the other end."""
    bits: Int64 = np.left_shift(1, np.asarray(place, dtype=np.int64) % 31)
    return bits


def num_links(costs: StepMatrix) -> int:
    """Pairs of pipeline ranks with messages between them."""
    return len(np.unique(_ends(costs)))


def _ends(costs: StepMatrix) -> Int64:
    """The pipeline ranks of each message's sender and reader, the smaller first, as one number."""
    table = costs.table
    sender = table.rank[table.dep[table.dep_is_message]].astype(np.int64)
    reader = table.rank[costs.reader].astype(np.int64)
    return np.minimum(sender, reader) * table.pp + np.maximum(sender, reader)


def _slowest(costs: StepMatrix) -> _Link | None:
    """The link of a plan's pipelines with the largest excess."""
    ends = _ends(costs)
    pipelines, of_window = np.unique(costs.ranks, axis=0, return_inverse=True)
    boundaries = np.unique(ends)
    times = np.full((len(_QUANTILES), len(pipelines), len(boundaries)), np.nan)
    for index, boundary in enumerate(boundaries.tolist()):
        transfers, is_whole = costs.transfers[:, ends == boundary], costs.sender_is_last[:, ends == boundary]
        for pipeline in range(len(pipelines)):
            of_link, whole = transfers[of_window.ravel() == pipeline], is_whole[of_window.ravel() == pipeline]
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
            ranks = int(pipelines[pipeline, first]), int(pipelines[pipeline, second])
            links.append(_Link(ranks, float(times[0, pipeline, index]), usual[0] or 0.0))
    return max(links, key=lambda link: link.typical - link.usual, default=None)


def _usual(typical: np.typing.NDArray[np.float64], pipeline: int, boundary: int) -> float | None:
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
