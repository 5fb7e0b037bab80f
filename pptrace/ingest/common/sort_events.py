"""Sort collected columns into :class:`pptrace.model.traces.Events`, dropping events with impossible times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.ingest.common.json_texts import ABSURD, LIMIT_NS, MISSING
from pptrace.model.damage import Damage, RankDamage
from pptrace.model.tables import Int32, Int64
from pptrace.model.traces import Category, Events, moved_flops

MAX_DURATION_NS = 30 * 24 * 3600 * 10**9
"""Longest duration of an event, thirty days; longer ones are overflows."""
LONE_ZERO_NS = 3600 * 10**9
"""A timestamp of 0 that is at least this long (an hour) before all others was never set."""

_ROCM_MOVES = ("__amd_rocclr_", "MEMORY_COPY_")
_MOVES = (
    (re.compile(r"__amd_rocclr_copy\w*(\.kd)?|MEMORY_COPY_(HOST|DEVICE)_TO_(HOST|DEVICE)"), Category.MEMCPY),
    (re.compile(r"__amd_rocclr_fill\w*(\.kd)?"), Category.MEMSET),
)
"""Kernels by which the runtime of ROCm copies and fills memory, which its recorders before 7.2 call kernels like all others."""
Mask = npt.NDArray[np.bool_]


class EventColumns(Struct):
    """Unsorted events, one entry per event in every array; -1 where a number is unknown.

    ``name`` are indices into a list of names. ``lane`` is the stream of a device event and the thread of a host event.
    ``process`` is for readers of files that hold several processes.
    """

    category: npt.NDArray[np.int8]
    name: Int32
    start_ns: Int64
    dur_ns: Int64
    device: Int32
    lane: npt.NDArray[Any]
    correlation: Int64
    process: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    @classmethod
    def of(
        cls,
        category: Any,
        name: Int32,
        start_ns: Int64,
        end_ns: Int64,
        device: Any = -1,
        lane: Any = -1,
        correlation: Any = -1,
        process: Any = -1,
    ) -> EventColumns:
        """The events of a table; a number stands for all rows."""

        def column(values: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            return values if isinstance(values, np.ndarray) else np.full(len(start_ns), values, dtype=dtype)

        places = (column(device, np.int32), column(lane, np.int32), column(correlation, np.int64))
        return cls(column(category, np.int8), name, start_ns, end_ns - start_ns, *places, column(process, np.int32))

    def __len__(self) -> int:
        return len(self.start_ns)

    def select(self, rows: npt.NDArray[Any]) -> EventColumns:
        columns = (getattr(self, name) for name in self.__struct_fields__)
        return EventColumns(*(column[rows] if len(column) else column for column in columns))


def joined_columns(parts: Sequence[EventColumns]) -> EventColumns:
    """All events in one; the columns are moved out of the parts."""
    none = np.zeros(0, dtype=np.int64)
    empty = EventColumns(none.astype(np.int8), none.astype(np.int32), none, none, none.astype(np.int32), none, none)
    return EventColumns(*(_take([empty, *parts], name) for name in EventColumns.__struct_fields__))


def _take(parts: Sequence[EventColumns], name: str) -> npt.NDArray[Any]:
    """Move a column out of the parts and join it, so that no column is in memory twice for long."""
    values = [getattr(part, name) for part in parts]
    for part in parts:
        setattr(part, name, np.empty(0, dtype=getattr(part, name).dtype))
    return np.concatenate(values) if len(values) > 1 else np.asarray(values[0])


class SortedEvents(Struct, frozen=True):
    """Sorted events. ``order[i]`` is the row in the file of sorted row ``i``."""

    without_comm_args: Events
    order: npt.NDArray[Any]
    num_rows: int
    warnings: tuple[str, ...]
    damage: RankDamage

    def sorted_rows(self, rows: npt.ArrayLike) -> Int64:
        """The sorted positions of some rows of the file, -1 for dropped ones. Takes one byte per row, not an inverse order."""
        requested = np.asarray(rows, dtype=np.int64)
        is_requested = np.zeros(self.num_rows, dtype=np.bool_)
        is_requested[requested] = True
        positions = np.flatnonzero(is_requested[self.order])
        in_file = self.order[positions]
        positions, in_file = (column[np.argsort(in_file, kind="stable")] for column in (positions, in_file))
        at = np.searchsorted(in_file, requested)
        is_kept = at < len(in_file)
        is_kept[is_kept] = in_file[at[is_kept]] == requested[is_kept]
        return np.where(is_kept, np.append(positions, -1)[np.where(is_kept, at, -1)], -1)

    def damage_with(self, *, is_cut: bool, num_lost: int = 0) -> RankDamage:
        """The damage of the events, of a file that was cut, and of events that could not be read."""
        counts = ((Damage.CUT_FILE, int(is_cut)), (Damage.UNREADABLE_EVENTS, num_lost))
        return RankDamage.joined((self.damage, *(RankDamage.counted(kind, count) for kind, count in counts)))

    def events(self, comm_args: pd.DataFrame, flops: Int64 | None = None) -> Events:
        """The events with what is sparse: ``flops`` by the row in the file."""
        events = replace(self.without_comm_args, comm_args=comm_args)
        return events if flops is None else replace(events, flops=moved_flops(flops, self.sorted_rows(flops[0])))


def sorted_events(parts: Sequence[EventColumns], names: Sequence[str], base_ns: int) -> SortedEvents:
    """Sort by start; among equal starts longer events first, so that a range comes before what it encloses.

    The columns are moved out of ``parts``, of which there is at least one. Neither the order nor the codes of the names depend on
    the order in the file. Streams and threads are separated last, since memory peaks while sorting.
    """
    start, dur = _take(parts, "start_ns"), _take(parts, "dur_ns")
    is_plausible, warnings, damage = _plausible_times(start, dur, base_ns)
    num_rows = len(is_plausible)
    row_type = np.int32 if num_rows <= np.iinfo(np.int32).max else np.int64
    kept_rows = None if is_plausible.all() else np.flatnonzero(is_plausible).astype(row_type)
    del is_plausible

    def select_kept(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return column if kept_rows is None else np.asarray(column[kept_rows])

    start, dur = select_kept(start), select_kept(dur)
    start += base_ns
    name_id, sorted_names = _sorted_names(select_kept(_take(parts, "name")), names)
    unsorted = {"name": name_id, "start_ns": start, "dur_ns": dur}
    order = np.argsort(start, kind="stable").astype(row_type)
    unsorted |= {name: select_kept(_take(parts, name)) for name in ("category", "device", "lane", "correlation")}
    keys = tuple(unsorted[name] for name in ("correlation", "lane", "device", "name", "category"))
    _break_ties(order, start, keys, dur)
    del start, dur, name_id, keys

    def sorted_column(name: str) -> npt.NDArray[Any]:
        """Sort a column and release the unsorted one, so that at most one column is in memory twice."""
        return np.asarray(unsorted.pop(name)[order])

    category, lane = sorted_column("category"), sorted_column("lane").astype(np.int64, copy=False)
    name_id = sorted_column("name")
    for code, moves in _moves_of_runtime(sorted_names):
        category[(name_id == code) & (category == Category.KERNEL)] = moves
    on_device = category > Category.HOST_LIMIT
    stream = np.where(on_device, lane, -1)
    lane[on_device] = -1
    events = Events(
        category=category,
        name_id=name_id,
        start_ns=sorted_column("start_ns"),
        dur_ns=sorted_column("dur_ns"),
        device=sorted_column("device"),
        stream=stream,
        thread=lane,
        correlation=sorted_column("correlation"),
        names=sorted_names,
    )
    return SortedEvents(events, order if kept_rows is None else kept_rows[order], num_rows, tuple(warnings), damage)


def _moves_of_runtime(names: Sequence[str]) -> list[tuple[int, Category]]:
    """(index, category) of the names of kernels by which a runtime copies or fills."""
    named = [(code, name) for code, name in enumerate(names) if name.startswith(_ROCM_MOVES)]
    return [(code, category) for code, name in named for pattern, category in _MOVES if pattern.fullmatch(name)]


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
    cuts = np.flatnonzero(~is_tied[sorted_rows[:-1]]) + 1
    at = np.searchsorted(cuts, np.arange(_TIES_AT_ONCE, len(sorted_rows), _TIES_AT_ONCE))
    for part in np.split(sorted_rows, np.unique(cuts[at[at < len(cuts)]])):
        rows = order[part]
        order[part] = rows[np.lexsort((*(key[rows] for key in keys), -dur[rows], start[rows]))]


_TIES_AT_ONCE = 1 << 20
"""Rows whose ties are broken at once, cut between different starts: all of a large trace take more memory than its events."""
