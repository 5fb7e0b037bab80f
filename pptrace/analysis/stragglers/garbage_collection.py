"""Garbage collections of Python: recorded by ``pptrace run``, they tell why a host stood still, in ops or before them.

They differ from pauses, which are seen by their effect alone and have no known reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.pauses import time_by_rank
from pptrace.analysis.stragglers.reason import Reason, gains

GARBAGE_COLLECTION = "garbage collection"
_MOST_OF_THEM = 0.5
"""A rank with this share of the time of all collections is named."""


def garbage_collections(plans: Sequence[StepMatrix]) -> Reason | None:
    """Collections that held up ops, and what steps would get back without them; None where there are none."""
    if not any(costs.has_collections for costs in plans):
        return None
    taken = [costs.collected_before.astype(np.int64) + costs.collected_inside for costs in plans]
    times = np.concatenate([ns[ns > 0] for ns in taken])
    of_rank = time_by_rank(plans, taken)
    rank, most = max(of_rank.items(), key=lambda item: item[1])
    where = {"rank": rank} if most >= _MOST_OF_THEM * sum(of_rank.values()) else {}
    place = f"rank {rank}" if where else f"{len(of_rank)} ranks"
    return Reason(
        GARBAGE_COLLECTION,
        ("host", "unexplained", "jitter", "straggler"),
        where,
        "Garbage collection: {share} is lost while Python collects garbage, on " + place,
        f"{len(times)} ops were held up by it, typically for {np.median(times) / 1e6:,.2f} ms: turn it off (gc.disable), collect "
        "on all ranks at once between steps, every so many of them (gc.collect), and keep what stays out of it (gc.freeze once "
        "the model is built)",
        gains(plans, (costs.without_collections() for costs in plans)),
        {"num_ops": len(times), "num_ranks": len(of_rank), "typical_ns": round(float(np.median(times)))},
    )
