"""Ranks that come last to collectives: the time in which all other members waited for one rank alone.

    member a   ----posts----asks~~~~~~~~waits~~~~~~~~|transfer
    member b   ------------------posts asks~~~waits~~|transfer
    member c   --------------------------------posts |transfer
                                       |-- late --|            c alone is missing, and b, the next one, waits

It ends when the last one comes, and begins when the others have all come and asked for the result: had it come when the next one
does, it would not be. What that next one computes meanwhile, as a device does beside a collective, is no waiting. Collectives
under way at once are waited for at once, so that the times of a rank are their union.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from pptrace.intervals import merge, subtract, union
from pptrace.model.tables import MESSAGES, Int64
from pptrace.slices import rows_among


def times_waited_for(comms: pd.DataFrame, uncertainty_ns: int, computes: Mapping[int, Int64]) -> dict[int, Int64]:
    """For each rank that comes last to any matched collective the times in which its others waited for it, as sets of intervals.

    Args:
        comms: with matches, on one clock (schema COMMS).
        uncertainty_ns: of the clocks: times that they may make up are left out.
        computes: when each rank computed, as sets of intervals.
    """
    names = ("match", "rank", "start_ns", "posted_ns", "asked_ns", "end_ns", "group_size")
    match, rank, start, posted, asked, end, size = (comms[name].to_numpy() for name in names)
    rows = np.flatnonzero((match >= 0) & ~rows_among(comms["kind"], MESSAGES))
    if not len(rows):
        return {}
    rows = rows[np.lexsort((start[rows], match[rows]))]
    first = np.flatnonzero(np.diff(match[rows], prepend=-1) != 0)
    count = np.diff(np.append(first, len(rows)))
    last = first + count - 1
    waiting = np.where(posted >= end, start, np.maximum(start, asked))[
        rows
    ]  # a call that returns at its end waits in it
    waiting[last] = np.iinfo(np.int64).min
    next_one = np.lexsort((waiting, match[rows]))[last]
    begins, ends = waiting[next_one], start[rows[last]]
    is_late = (count > 1) & (count == size[rows[last]])
    is_late[is_late] = ends[is_late] - begins[is_late] > 2 * uncertainty_ns
    late_rank, waiter = rank[rows[last]][is_late], rank[rows[next_one]][is_late]
    return _without_compute(late_rank, waiter, begins[is_late], ends[is_late], computes)


def _without_compute(
    late_rank: Int64, waiter: Int64, begins: Int64, ends: Int64, computes: Mapping[int, Int64]
) -> dict[int, Int64]:
    """The union of the times of each late rank, without what the rank that waits computes in them."""
    found: dict[int, list[Int64]] = {}
    order = np.lexsort((waiter, late_rank))
    is_first = (np.diff(late_rank[order], prepend=-1) != 0) | (np.diff(waiter[order], prepend=-1) != 0)
    for rows in np.split(order, np.flatnonzero(is_first)[1:]) if len(order) else ():
        times = union(begins[rows], ends[rows])
        computes_of = computes.get(int(waiter[rows[0]]))
        found.setdefault(int(late_rank[rows[0]]), []).append(
            times if computes_of is None else subtract(times, computes_of)
        )
    return {late: merge(*sets) for late, sets in found.items()}
