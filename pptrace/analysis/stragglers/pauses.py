"""Pauses of the host: a rank begins an op late, although all that the op needs is there.

Pauses are now and then. Garbage collection looks like this where nothing recorded it: at different times on different ranks, or
on all at once where it is planned. What a rank waits for in most steps is no pause but a gap: Python between ops, or a late
start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.hosts import late_firsts
from pptrace.analysis.stragglers.reason import Reason, gains_if_sooner
from pptrace.model.tables import Int64
from pptrace.model.wording import counted

FEWEST_WINDOWS = 4
"""Steps of a pipeline; fewer tell too little of what is usual."""
PAUSES = "pauses"
_LEAST_SHARE = 0.25
"""Share of a mean op: a shorter delay is no pause."""
_MOST_OF_THEM = 0.5
"""A rank with this share of all pauses' or gaps' time is named."""


_ADVICE = (
    "; garbage collection is the usual reason where none was recorded (pptrace run does): turn it off and collect on all ranks "
    "at once, every so many steps; else look at other processes on that host"
)


def host_pauses(plans: Sequence[StepMatrix]) -> Reason | None:
    """Pauses, and what steps would get back without them; None where there are none."""
    paused = pauses_of(plans)
    times = np.concatenate([pauses[pauses > 0] for pauses in paused])
    if not len(times):
        return None
    of_rank = time_by_rank(plans, paused)
    rank, most = max(of_rank.items(), key=lambda item: item[1])
    where = {"rank": rank} if most >= _MOST_OF_THEM * sum(of_rank.values()) else {}
    place = f"rank {rank}" if where else f"{len(of_rank)} ranks"
    return Reason(
        PAUSES,
        ("host", "unexplained"),
        where,
        "Pauses: {share} is lost where the host stands still now and then, on " + place,
        f"{counted(len(times), 'op')} began late with all inputs there, typically by {np.median(times) / 1e6:,.2f} ms{_ADVICE}",
        gains_if_sooner(plans, paused),
        {"num_pauses": len(times), "num_ranks": len(of_rank), "typical_ns": round(float(np.median(times)))},
    )


def pauses_of(plans: Sequence[StepMatrix]) -> list[Int64]:
    """The part of the delays that is pauses, shape (windows, rows), ns, in each plan."""
    late = late_firsts(plans)
    return [np.where(starts > 0, 0, _pauses(costs)) for costs, starts in zip(plans, late, strict=True)]


def _pauses(costs: StepMatrix) -> Int64:
    """Lateness of each op beyond what is usual before it, shape (windows, rows), ns; 0 where that is no pause."""
    pauses = np.zeros_like(costs.lateness)
    for windows in costs.of_pipelines():
        if len(windows) >= FEWEST_WINDOWS:
            delays = costs.lateness[windows]
            usual = np.sort(delays, axis=0)[
                (len(windows) - 1) // 2
            ]  # what is late in half of the steps is not so in most
            excess = delays - usual
            pauses[windows] = np.where(excess >= _LEAST_SHARE * costs.durations.mean(), excess, 0)
    return pauses


def time_by_rank(plans: Sequence[StepMatrix], paused: Sequence[Int64]) -> dict[int, int]:
    """The sum of some times of ops, shape (windows, rows), on each rank that has any, ns."""
    of_rank: dict[int, int] = {}
    for costs, pauses in zip(plans, paused, strict=True):
        window, row = np.nonzero(pauses)
        ranks = costs.ranks[window, costs.table.rank[row]]
        for rank, ns in zip(ranks.tolist(), pauses[window, row].tolist(), strict=True):
            of_rank[rank] = of_rank.get(rank, 0) + ns
    return of_rank
