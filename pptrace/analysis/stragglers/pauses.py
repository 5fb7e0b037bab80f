"""Pauses and gaps of the host: a rank begins an op late, although all that the op needs is there.

Pauses are now and then. Garbage collection looks like this: at different times on different ranks, or on all at once where it is
planned. What a rank waits for in most steps is no pause but a gap: Python between ops, or a late start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pptrace.analysis.stragglers.costs import MeasuredCosts
from pptrace.analysis.stragglers.reason import Reason, step_lengths
from pptrace.model.tables import Int64

_FEWEST_WINDOWS = 4
"""Steps of a pipeline; fewer tell too little of what is usual."""
_LEAST_SHARE = 0.25
"""Share of a mean op: a shorter delay is no pause."""
_LEAST_GAP = 0.02
"""Share of a mean op: a shorter delay in every step is not counted."""
_MOST_OF_THEM = 0.5
"""A rank with this share of all pauses' or gaps' time is named."""


def host_pauses(plans: Sequence[MeasuredCosts], measured: Sequence[Int64]) -> Reason | None:
    """Pauses, and what steps would get back without them; None where there are none."""
    paused = [_pauses(costs) for costs in plans]
    times = np.concatenate([pauses[pauses > 0] for pauses in paused])
    if not len(times):
        return None
    gains = [
        step_lengths(costs, costs.durations + pauses, costs.transfers) - lengths
        for costs, pauses, lengths in zip(plans, paused, measured, strict=True)
    ]
    of_rank = _by_rank(plans, paused)
    rank, most = max(of_rank.items(), key=lambda item: item[1])
    where = {"rank": rank} if most >= _MOST_OF_THEM * sum(of_rank.values()) else {}
    place = f"rank {rank}" if where else f"{len(of_rank)} ranks"
    return Reason(
        "pauses",
        ("host", "unexplained"),
        where,
        "Pauses: {share:.1%} of the step is lost where the host stands still now and then, on " + place,
        f"{len(times)} times an op began late that had all it needed, typically by {np.median(times) / 1e6:,.2f} ms; garbage "
        "collection is the usual reason: turn it off and collect on all ranks at once, every so many steps",
        np.concatenate(gains),
        {"num_pauses": len(times), "num_ranks": len(of_rank), "typical_ns": round(float(np.median(times)))},
    )


def host_gaps(plans: Sequence[MeasuredCosts], measured: Sequence[Int64]) -> Reason | None:
    """Lateness of one rank's ops in most steps, and what steps would get back without it; None where no rank is apart."""
    usual = [_usual_delays(costs) for costs in plans]
    of_rank = _by_rank(plans, usual)
    rank, most = max(of_rank.items(), key=lambda item: item[1], default=(0, 0))
    if (
        most < _MOST_OF_THEM * sum(of_rank.values())
        or len({*np.concatenate([costs.ranks.ravel() for costs in plans])}) < 2
    ):
        return None
    of_this = [
        np.where(costs.ranks[:, costs.table.rank] == rank, delays, 0)
        for costs, delays in zip(plans, usual, strict=True)
    ]
    gains = [
        step_lengths(costs, costs.durations + gaps, costs.transfers) - lengths
        for costs, gaps, lengths in zip(plans, of_this, measured, strict=True)
    ]
    times = np.concatenate(
        [gaps[gaps >= _LEAST_GAP * costs.durations.mean()] for costs, gaps in zip(plans, of_this, strict=True)]
    )
    if not len(times):
        return None
    return Reason(
        "gaps",
        ("host", "unexplained"),
        {"rank": rank},
        f"Gaps: {{share:.1%}} of the step is lost where rank {rank} begins ops late in most steps",
        f"{len(times)} times an op began late that had all it needed, typically by {np.median(times) / 1e6:,.2f} ms: look at "
        "what runs on its host between ops: Python, input, logging, synchronisation",
        np.concatenate(gains),
        {"num_gaps": len(times), "typical_ns": round(float(np.median(times)))},
    )


def _usual_delays(costs: MeasuredCosts) -> Int64:
    """The median lateness of each op on its rank, shape (windows, rows), ns; 0 where there are too few steps to know."""
    usual = np.zeros_like(costs.delays)
    for pipeline in np.unique(costs.ranks, axis=0):
        windows = np.flatnonzero((costs.ranks == pipeline).all(axis=1))
        if len(windows) >= _FEWEST_WINDOWS:
            usual[windows] = np.median(costs.delays[windows], axis=0).astype(np.int64)
    return usual


def _pauses(costs: MeasuredCosts) -> Int64:
    """Lateness of each op beyond what is usual before it on its rank, shape (windows, rows), ns; 0 where that is no pause."""
    _, windows = np.unique(costs.ranks, axis=0, return_inverse=True)
    is_known = np.bincount(windows.ravel())[windows.ravel()] >= _FEWEST_WINDOWS
    excess = np.where(is_known[:, None], costs.delays - _usual_delays(costs), 0)
    return np.where(excess >= _LEAST_SHARE * costs.durations.mean(), excess, 0)


def _by_rank(plans: Sequence[MeasuredCosts], paused: Sequence[Int64]) -> dict[int, int]:
    """The time of all pauses of each rank that has any, ns."""
    of_rank: dict[int, int] = {}
    for costs, pauses in zip(plans, paused, strict=True):
        window, row = np.nonzero(pauses)
        ranks = costs.ranks[window, costs.table.rank[row]]
        for rank, ns in zip(ranks.tolist(), pauses[window, row].tolist(), strict=True):
            of_rank[rank] = of_rank.get(rank, 0) + ns
    return of_rank
