"""Sort collected columns into :class:`pptrace.model.traces.Events`, dropping events with impossible times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.ingest.common.exact_numbers import ABSURD, LIMIT_NS, MISSING
from pptrace.model.damage import Damage, RankDamage
from pptrace.model.tables import COMM_ARGS, Int32, Int64, empty_table
from pptrace.model.traces import Category, Events

MAX_DURATION_NS = 30 * 24 * 3600 * 10**9
"""Longest duration of an event, thirty days; longer ones are overflows."""
LONE_ZERO_NS = 3600 * 10**9
"""A timestamp of 0 that is at least this long (an hour) before all others was never set."""

Mask = npt.NDArray[np.bool_]


class Columns(Protocol):
    """Columns of unsorted events, as :class:`pptrace.ingest.kineto.event_columns.Columns` collects them."""

    def take(self, column: int) -> npt.NDArray[Any]:
        """Move out a column by its index: category, name, start, duration, device, lane, correlation; it is empty afterwards.

        The lane is the stream of a device event and the thread of a host event.
        """
        ...

    def names(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class SortedEvents:
    """Sorted events. ``order[i]`` is the row in the file of sorted row ``i``."""

    without_comm_args: Events
    order: npt.NDArray[Any]
    num_rows: int
    warnings: tuple[str, ...]
    damage: RankDamage

    def sorted_rows(self, rows: Sequence[int]) -> Int64:
        """The sorted positions of some rows of the file, -1 for dropped ones. Takes one byte per row, not an inverse order."""
        if not rows:
            return np.zeros(0, dtype=np.int64)
        is_requested = np.zeros(self.num_rows, dtype=np.bool_)
        is_requested[np.asarray(rows, dtype=np.int64)] = True
        positions = np.flatnonzero(is_requested[self.order])
        position = dict(zip(self.order[positions].tolist(), positions.tolist(), strict=True))
        return np.array([position.get(row, -1) for row in rows], dtype=np.int64)

    def events(self, comm_args: pd.DataFrame) -> Events:
        return replace(self.without_comm_args, comm_args=comm_args)


def sorted_events(columns: Columns, base_ns: int) -> SortedEvents:
    """Sort by start; among equal starts longer events first, so that a range comes before what it encloses.

    Neither the order nor the codes of the names depend on the order in the file. Streams and threads are separated last,
    since memory peaks while sorting.
    """
    start, dur = columns.take(2), columns.take(3)
    is_plausible, warnings, damage = _plausible_times(start, dur, base_ns)
    num_rows = len(is_plausible)
    kept_rows = None if is_plausible.all() else np.flatnonzero(is_plausible).astype(_row_type(num_rows))
    del is_plausible

    def select_kept(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return column if kept_rows is None else np.asarray(column[kept_rows])

    start, dur = select_kept(start), select_kept(dur)
    start += base_ns
    name_id, names = _sorted_names(select_kept(columns.take(1)), columns.names())
    columns_by_index = {2: start, 3: dur, 1: name_id, 0: select_kept(columns.take(0))}
    order = np.argsort(start, kind="stable").astype(_row_type(num_rows))
    columns_by_index |= {column_index: select_kept(columns.take(column_index)) for column_index in (4, 5, 6)}
    _break_ties(order, start, tuple(columns_by_index[column_index] for column_index in (6, 5, 4, 1, 0)), dur)
    del start, dur, name_id

    def sorted_column(column_index: int) -> npt.NDArray[Any]:
        """Sort a column and release the unsorted one, so that at most one column is in memory twice."""
        return np.asarray(columns_by_index.pop(column_index)[order])

    category, name_id, start, dur, device, lane, correlation = map(sorted_column, range(7))
    on_device = category > Category.HOST_LIMIT
    stream = np.where(on_device, lane, -1)
    lane[on_device] = -1
    events = Events(
        category=category,
        name_id=name_id,
        start_ns=start,
        dur_ns=dur,
        device=device,
        stream=stream,
        thread=lane,
        correlation=correlation,
        names=names,
        comm_args=empty_table(COMM_ARGS),
    )
    return SortedEvents(events, order if kept_rows is None else kept_rows[order], num_rows, tuple(warnings), damage)


def _row_type(num_rows: int) -> type[np.int32] | type[np.int64]:
    return np.int32 if num_rows <= np.iinfo(np.int32).max else np.int64


def _plausible_times(start: Int64, dur: Int64, base_ns: int) -> tuple[Mask, list[str], RankDamage]:
    """(mask of the events with possible times, a warning for each kind of impossible time, what was left out)."""
    is_implausible: Mask = np.zeros(len(start), dtype=np.bool_)
    warnings: list[str] = []

    def leave_out(mask: Mask, singular: str, plural: str) -> None:
        num = int(np.count_nonzero(mask & ~is_implausible))
        if num:
            warnings.append(f"left out {num} {'event' if num == 1 else 'events'} {singular if num == 1 else plural}")
        np.logical_or(is_implausible, mask, out=is_implausible)

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
    later = start[~is_implausible & (start != 0)]
    unset = 0
    if len(later) and later.min() > LONE_ZERO_NS:
        unset = int(np.count_nonzero((start == 0) & ~is_implausible))
        leave_out(start == 0, "whose time was never set (0)", "whose times were never set (0)")
    impossible = int(np.count_nonzero(is_implausible)) - unset
    counts = (Damage.UNSET_TIMES, unset), (Damage.IMPOSSIBLE_TIMES, impossible)
    return ~is_implausible, warnings, RankDamage.joined(RankDamage.counted(kind, count) for kind, count in counts)


def _sorted_names(codes: Int32, names_by_code: Sequence[str]) -> tuple[Int32, tuple[str, ...]]:
    """Recode names as indices into the sorted, distinct names in use."""
    used = np.zeros(len(names_by_code), dtype=np.bool_)
    used[codes] = True
    names = sorted({names_by_code[code] for code in np.flatnonzero(used).tolist()})
    new_code = {name: code for code, name in enumerate(names)}
    recode = np.array([new_code.get(name, -1) for name in names_by_code], dtype=np.int32)
    return recode[codes], tuple(names)


def _break_ties(order: npt.NDArray[Any], start: Int64, keys: tuple[npt.NDArray[Any], ...], dur: Int64) -> None:
    """Order rows of equal start by duration, the longest first, and then by the keys, the last key first; modifies ``order``."""
    ordered = start[order]
    is_tied = ordered[1:] == ordered[:-1]
    del ordered
    if not is_tied.any():
        return
    tied = np.zeros(len(order), dtype=np.bool_)
    tied[1:] |= is_tied
    tied[:-1] |= is_tied
    sorted_rows = np.flatnonzero(tied).astype(order.dtype)
    for part in _split_at_cuts(sorted_rows, np.flatnonzero(~is_tied[sorted_rows[:-1]]) + 1):
        rows = order[part]
        order[part] = rows[np.lexsort((*(key[rows] for key in keys), -dur[rows], start[rows]))]


_TIES_AT_ONCE = 1 << 20
"""Rows whose ties are broken at once: all those of a large trace would take more memory than its events."""


def _split_at_cuts(sorted_rows: npt.NDArray[Any], cuts: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Split rows into parts of about _TIES_AT_ONCE, at cuts between different starts."""
    cut_index = np.searchsorted(cuts, np.arange(_TIES_AT_ONCE, len(sorted_rows), _TIES_AT_ONCE))
    return np.split(sorted_rows, np.unique(cuts[cut_index[cut_index < len(cuts)]]))
