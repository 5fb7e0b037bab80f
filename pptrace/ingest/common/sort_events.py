"""Collected columns → sorted :class:`pptrace.model.tables.Events`, without the events whose times cannot be true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.ingest.common.exact_numbers import ABSURD, LIMIT_NS, MISSING
from pptrace.model.tables import Category, Events, Int8, Int32, Int64

MAX_DURATION_NS = 30 * 24 * 3600 * 10**9
"""A single event that is longer, thirty days, is an overflow."""
LONE_ZERO_NS = 3600 * 10**9
"""A timestamp of 0 this long before all others, an hour, was never set."""

Mask = npt.NDArray[np.bool_]


class Columns(Protocol):
    """Columns of unsorted events, as :class:`pptrace.ingest.kineto.event_columns.Columns` collects them."""

    def take(self, column: int) -> npt.NDArray[Any]:
        """A whole column, by its place: category, name, start, duration, device, lane, correlation; it is empty afterwards.

        The lane is an event's stream on a device and its thread on the host: an event has only one of them.
        """
        ...

    def names(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class SortedEvents:
    """Events in order, with their communication rows still to come. ``order[i]`` is where row ``i`` stood in the file."""

    category: Int8
    name_id: Int32
    start_ns: Int64
    dur_ns: Int64
    device: Int32
    stream: Int64
    thread: Int64
    correlation: Int64
    names: tuple[str, ...]
    order: npt.NDArray[Any]
    num_rows: int
    warnings: tuple[str, ...]

    def places(self, rows: Sequence[int]) -> Int64:
        """Where rows of the file stand now, -1 for those left out. Few are asked for: the others take a byte each."""
        if not rows:
            return np.zeros(0, dtype=np.int64)
        wanted = np.zeros(self.num_rows, dtype=np.bool_)
        wanted[np.asarray(rows, dtype=np.int64)] = True
        found = np.flatnonzero(wanted[self.order])
        place = dict(zip(self.order[found].tolist(), found.tolist(), strict=True))
        return np.array([place.get(row, -1) for row in rows], dtype=np.int64)

    def events(self, comm_args: pd.DataFrame) -> Events:
        return Events(
            self.category,
            self.name_id,
            self.start_ns,
            self.dur_ns,
            self.device,
            self.stream,
            self.thread,
            self.correlation,
            self.names,
            comm_args,
        )


def sorted_events(columns: Columns, base_ns: int) -> SortedEvents:
    """Sort by start; among equal starts longer events first, so that a range comes before what it encloses.

    The order does not depend on the order in the file, nor do the codes of the names. Streams and threads are parted last:
    sorting is when most columns stand in memory.
    """
    start, dur = columns.take(2), columns.take(3)
    good, warnings = _plausible(start, dur, base_ns)
    num_rows = len(good)
    kept = None if good.all() else np.flatnonzero(good).astype(_row_type(num_rows))
    del good

    def kept_of(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return column if kept is None else np.asarray(column[kept])

    start, dur = kept_of(start), kept_of(dur)
    start += base_ns
    name_id, names = _sorted_names(kept_of(columns.take(1)), columns.names())
    taken = {2: start, 3: dur, 1: name_id, 0: kept_of(columns.take(0))}
    order = np.argsort(start, kind="stable").astype(_row_type(num_rows))
    taken |= {place: kept_of(columns.take(place)) for place in (4, 5, 6)}
    _break_ties(order, start, tuple(taken[place] for place in (6, 5, 4, 1, 0)), dur)
    del start, dur, name_id

    def sorted_column(place: int) -> npt.NDArray[Any]:
        """Each column is let go of as soon as it is sorted, so that none but the last stands in memory twice."""
        return np.asarray(taken.pop(place)[order])

    category, name_id, start, dur, device, lane, correlation = map(sorted_column, range(7))
    on_device = category > Category.HOST_LIMIT
    stream = np.where(on_device, lane, -1)
    lane[on_device] = -1
    return SortedEvents(
        category=category,
        name_id=name_id,
        start_ns=start,
        dur_ns=dur,
        device=device,
        stream=stream,
        thread=lane,
        correlation=correlation,
        names=names,
        order=order if kept is None else kept[order],
        num_rows=num_rows,
        warnings=tuple(warnings),
    )


def _row_type(num_rows: int) -> type[np.int32] | type[np.int64]:
    return np.int32 if num_rows <= np.iinfo(np.int32).max else np.int64


def _plausible(start: Int64, dur: Int64, base_ns: int) -> tuple[Mask, list[str]]:
    """Which events have times that can be true, and a line for each kind that has not."""
    bad: Mask = np.zeros(len(start), dtype=np.bool_)
    warnings: list[str] = []

    def leave_out(mask: Mask, one: str, many: str) -> None:
        num = int(np.count_nonzero(mask & ~bad))
        if num:
            warnings.append(f"left out {num} {'event' if num == 1 else 'events'} {one if num == 1 else many}")
        np.logical_or(bad, mask, out=bad)

    leave_out(start == MISSING, 'that has no "ts"', 'that have no "ts"')
    leave_out(
        dur == MISSING,
        'that has no "dur"; was the profiler stopped early?',
        'that have no "dur"; was the profiler stopped early?',
    )
    too_far = (start < -LIMIT_NS - base_ns) | (start > LIMIT_NS - base_ns)
    leave_out(too_far | (start == ABSURD), "with an absurd time", "with absurd times")
    leave_out((dur == ABSURD) | (dur > MAX_DURATION_NS), "with an absurd duration", "with absurd durations")
    leave_out(dur < 0, "with a negative duration", "with negative durations")
    later = start[~bad & (start != 0)]
    if len(later) and later.min() > LONE_ZERO_NS:
        leave_out(start == 0, "whose time was never set (0)", "whose times were never set (0)")
    return ~bad, warnings


def _sorted_names(codes: Int32, given: Sequence[str]) -> tuple[Int32, tuple[str, ...]]:
    """Codes into the sorted names that are in use, without doubles."""
    used = np.zeros(len(given), dtype=np.bool_)
    used[codes] = True
    names = sorted({given[code] for code in np.flatnonzero(used).tolist()})
    new_code = {name: code for code, name in enumerate(names)}
    recode = np.array([new_code.get(name, -1) for name in given], dtype=np.int32)
    return recode[codes], tuple(names)


def _break_ties(order: npt.NDArray[Any], start: Int64, keys: tuple[npt.NDArray[Any], ...], dur: Int64) -> None:
    """Order rows of equal start by duration, the longest first, and then by the keys, the last one first, in place."""
    ordered = start[order]
    same = ordered[1:] == ordered[:-1]
    del ordered
    if not same.any():
        return
    tied = np.zeros(len(order), dtype=np.bool_)
    tied[1:] |= same
    tied[:-1] |= same
    places = np.flatnonzero(tied).astype(order.dtype)
    for part in _parted(places, np.flatnonzero(~same[places[:-1]]) + 1):
        rows = order[part]
        order[part] = rows[np.lexsort((*(key[rows] for key in keys), -dur[rows], start[rows]))]


_TIES_AT_ONCE = 1 << 20
"""So many rows are put in order together: all those of a large trace at once would take more memory than its events."""


def _parted(places: npt.NDArray[Any], cuts: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """The places in parts of about that many, cut where another start begins."""
    at = np.searchsorted(cuts, np.arange(_TIES_AT_ONCE, len(places), _TIES_AT_ONCE))
    return np.split(places, np.unique(cuts[at[at < len(cuts)]]))
