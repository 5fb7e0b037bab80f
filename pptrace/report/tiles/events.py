"""Kernels, operators and calls of a rank in lanes, one for each stream and thread, read when they are asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from pptrace.errors import PptraceError
from pptrace.model.traces import Category, Events
from pptrace.recognise.device.work import communication_rows
from pptrace.report.tiles.cut import Range, cut
from pptrace.report.tiles.encode import encode, section_of, tile_arrays
from pptrace.report.tiles.measured import Table
from pptrace.report.tiles.tracks import Array, make_tracks
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.events import events_of_rank, has_events

EVENTS = "events"
CLASSES = ("operator", "function", "range", "call", "kernel", "communication", "copy", "wait", "other")
"""Classes of events, as their colours and the legend have them."""
CLASS_NAMES = (
    "operator",
    "Python function",
    "range",
    "runtime call",
    "kernel",
    "communication kernel",
    "copy or fill",
    "wait on a stream",
    "other event",
)
_CLASS_OF: Mapping[Category, str] = {
    Category.CPU_OP: "operator",
    Category.ANNOTATION: "range",
    Category.RUNTIME: "call",
    Category.PYTHON: "function",
    Category.OVERHEAD: "other",
    Category.OTHER: "other",
    Category.KERNEL: "kernel",
    Category.MEMCPY: "copy",
    Category.MEMSET: "copy",
    Category.DEVICE_ANNOTATION: "range",
    Category.DEVICE_SYNC: "wait",
}
_MOST_KEPT = 20_000_000
"""Events that stay in memory; of more, those of the ranks that were looked at last."""


def describe_lanes(table: Table) -> dict[str, Any]:
    """The lanes of a rank's events in their order, with how many tracks each has; and the classes seen."""
    lanes = [{"name": name, "depths": table.tracks.depths[lane]} for lane, name in enumerate(table.lanes)]
    return {"lanes": lanes, "classes": np.unique(table.tracks.group).tolist()}


def events_tile(table: Table, time: Range) -> bytes:
    """The tile of all lanes of a rank's events, with the names of those that are bars in it."""
    tracks = table.tracks
    wanted = np.arange(len(tracks.rank))
    tile = cut(tracks, table.levels, wanted, time)
    arrays = tile_arrays(EVENTS, table, tile)
    codes, names = np.unique(tracks.columns["name"][tile.rows], return_inverse=True)
    section = section_of(tracks, wanted, tile) | {"names": [table.texts["name"][code] for code in codes.tolist()]}
    return encode({EVENTS: section}, {EVENTS: arrays | {"name": names.astype(np.int32)}})


class EventStore:
    """The events of ranks as tracks, by the index of the rank. Usable from any thread."""

    def __init__(self, analysis: Analysis | None, position: Mapping[int, int], origin_ns: int) -> None:
        """Take the analysis, None where it was let go."""
        self._analysis, self._origin_ns = analysis, origin_ns
        known = frozenset() if analysis is None else has_events(analysis)
        self.ranks = {position[rank]: rank for rank in sorted(known) if rank in position}
        self._lock = threading.Lock()
        self._reading = {at: threading.Lock() for at in self.ranks}
        self._kept: OrderedDict[int, Table] = OrderedDict()

    def of(self, at: int) -> Table:
        """The events of a rank by the lanes of its streams and threads, read if they are not kept.

        Raises:
            LookupError: it has none, or its file can no longer be read.
        """
        if at not in self.ranks:
            raise LookupError(at)
        with self._reading[at]:  # others are answered meanwhile
            with self._lock:
                known = self._kept.get(at)
            events = known or self._read(at)
            with self._lock:
                self._kept[at] = events
                self._kept.move_to_end(at)
                while len(self._kept) > 1 and sum(len(kept.tracks) for kept in self._kept.values()) > _MOST_KEPT:
                    self._kept.popitem(last=False)
            return events

    def _read(self, at: int) -> Table:
        if self._analysis is None:
            raise LookupError(at)
        try:
            events = events_of_rank(self._analysis, self.ranks[at])
        except (PptraceError, OSError) as err:
            raise LookupError(at) from err
        if events is None:
            raise LookupError(at)
        return events_table(events, at, self._origin_ns)


def events_table(events: Events, at: int, origin_ns: int) -> Table:
    """The events of a rank as tracks: streams first, each with the ranges on it apart, then threads, Python's functions apart."""
    on_device = events.category >= Category.HOST_LIMIT
    rows = np.flatnonzero(on_device | (events.thread >= 0))
    lane, names = _lanes(events, rows)
    class_of = np.full(max(Category) + 1, CLASSES.index("other"), dtype=np.int8)
    for category, name in _CLASS_OF.items():
        class_of[category] = CLASSES.index(name)
    group = class_of[events.category]
    group[communication_rows(events)] = CLASSES.index("communication")
    tracks = make_tracks(
        np.full(len(rows), at),
        lane,
        events.start_ns[rows] - origin_ns,
        events.dur_ns[rows],
        group[rows],
        columns={"name": events.name_id[rows]},
    )
    return Table(tracks, names, {"name": events.names})


_DEVICES = 512


def _lanes(events: Events, rows: Array) -> tuple[Array, tuple[str, ...]]:
    """(code of the lane of each row, names of the lanes)."""
    category = events.category[rows]
    on_device = category >= Category.HOST_LIMIT
    place = np.where(on_device, events.stream[rows], events.thread[rows])
    is_work = np.isin(category, (Category.KERNEL, Category.MEMCPY, Category.MEMSET))
    part = np.where(on_device, ~is_work, category == Category.PYTHON)
    device = np.where(on_device, events.device[rows], -1)
    code, keys = pd.factorize((place * _DEVICES + device + 1) * 4 + 2 * ~on_device + part)
    lanes = pd.DataFrame({"on_host": keys & 2 > 0, "is_apart": keys & 1 > 0, "device": keys // 4 % _DEVICES - 1})
    lanes = lanes.assign(number=keys // (4 * _DEVICES), count=np.bincount(code, minlength=len(keys)))
    busiest = lanes.groupby(["on_host", "device", "number"])["count"].transform("sum")
    lanes["place"] = np.where(lanes["on_host"], -busiest, 0)  # streams by number, then threads, the busiest first
    order: Any = lanes.sort_values(["on_host", "device", "place", "number", "is_apart"])
    code_of = np.argsort(order.index)
    several = lanes.loc[~lanes["on_host"], "device"].nunique() > 1
    names = [
        f"thread {lane.number}{' Python' * lane.is_apart}"
        if lane.on_host
        else f"{f'GPU {lane.device} ' * several}stream {lane.number}{' ranges' * lane.is_apart}"
        for lane in order.itertuples()
    ]
    return code_of[code], tuple(names)
