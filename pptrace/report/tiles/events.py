"""Kernels, operators and calls of a rank in lanes, one for each stream and thread, read when they are asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.errors import PptraceError
from pptrace.model.traces import Category, Events
from pptrace.recognise.device.work import communication_rows
from pptrace.report.tiles.cut import Range, cut
from pptrace.report.tiles.encode import encode, tile_arrays
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


class RankEvents(Struct, frozen=True):
    """The events of a rank as tracks, by the lanes of its streams and threads, whose names ``table.lanes`` has."""

    table: Table

    def describe(self) -> dict[str, Any]:
        """The lanes that have events, in their order, with how many tracks and events each has; and the classes seen."""
        tracks = self.table.tracks
        counts = np.bincount(np.repeat(tracks.lane, np.diff(tracks.ptr)), minlength=len(self.table.lanes))
        lanes = [
            {"name": name, "depths": tracks.depths[lane], "count": int(counts[lane])}
            for lane, name in enumerate(self.table.lanes)
        ]
        return {"lanes": lanes, "classes": np.unique(tracks.group).tolist()}

    def tile(self, time: Range) -> bytes:
        """The tile of all lanes, with the names of the events that are bars in it."""
        tracks = self.table.tracks
        wanted = np.arange(len(tracks.rank))
        tile = cut(tracks, self.table.levels, wanted, time)
        arrays = tile_arrays(EVENTS, self.table, tile)
        codes, names = np.unique(tracks.columns["name"][tile.rows], return_inverse=True)
        texts = self.table.texts["name"]
        section = {
            "rank": tracks.rank.tolist(),
            "lane": tracks.lane.tolist(),
            "depth": tracks.depth.tolist(),
            "earlier": tile.num_earlier,
            "count": tile.count,
            "names": [texts[code] for code in codes.tolist()],
        }
        return encode({EVENTS: section}, {EVENTS: arrays | {"name": names.astype(np.int32)}})


class EventStore:
    """The events of ranks, by the index of the rank. Usable from any thread."""

    def __init__(self, analysis: Analysis | None, position: Mapping[int, int], origin_ns: int) -> None:
        """Take the analysis, None where it was let go."""
        self._analysis, self._origin_ns = analysis, origin_ns
        known = frozenset() if analysis is None else has_events(analysis)
        self.ranks = {position[rank]: rank for rank in sorted(known) if rank in position}
        self._lock = threading.Lock()
        self._reading = {at: threading.Lock() for at in self.ranks}
        self._kept: OrderedDict[int, RankEvents] = OrderedDict()

    def of(self, at: int) -> RankEvents:
        """The events of a rank, read if they are not kept.

        Raises:
            LookupError: it has none, or its file can no longer be read.
        """
        if at not in self.ranks:
            raise LookupError(at)
        with self._reading[at]:  # others are answered meanwhile
            known = self._known(at)
            return known or self._keep(at, self._read(at))

    def _known(self, at: int) -> RankEvents | None:
        with self._lock:
            if at in self._kept:
                self._kept.move_to_end(at)
            return self._kept.get(at)

    def _keep(self, at: int, events: RankEvents) -> RankEvents:
        with self._lock:
            self._kept[at] = events
            while len(self._kept) > 1 and sum(len(kept.table.tracks) for kept in self._kept.values()) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return events

    def _read(self, at: int) -> RankEvents:
        if self._analysis is None:
            raise LookupError(at)
        try:
            events = events_of_rank(self._analysis, self.ranks[at])
        except (PptraceError, OSError) as err:
            raise LookupError(at) from err
        if events is None:
            raise LookupError(at)
        return RankEvents(events_table(events, at, self._origin_ns))


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


def _lanes(events: Events, rows: Array) -> tuple[Array, tuple[str, ...]]:
    """(code of the lane of each row, names of the lanes)."""
    category = events.category[rows]
    on_device = category >= Category.HOST_LIMIT
    place = np.where(on_device, events.stream[rows], events.thread[rows])
    is_work = np.isin(category, (Category.KERNEL, Category.MEMCPY, Category.MEMSET))
    part = np.where(on_device, ~is_work, category == Category.PYTHON)
    device = np.where(on_device, events.device[rows], -1)
    packed = (place * _DEVICES + device + 1) * 4 + 2 * ~on_device + part
    lane, keys = pd.factorize(packed)
    counts = np.bincount(lane, minlength=len(keys))
    described = [_Lane.of(int(key)) for key in keys]
    busiest: dict[tuple[int, ...], int] = {}
    for own, count in zip(described, counts.tolist(), strict=True):
        busiest[own.place] = busiest.get(own.place, 0) + count
    order = sorted(range(len(described)), key=lambda number: described[number].order(busiest))
    code_of = np.empty(len(order), dtype=np.int64)
    code_of[order] = np.arange(len(order))
    num_devices = len({own.device for own in described if not own.on_host})
    return code_of[lane], tuple(described[number].name(num_devices) for number in order)


_DEVICES = 512


class _Lane(Struct, frozen=True):
    """A stream or thread; ``is_apart``: the ranges on it, or Python's functions."""

    on_host: bool
    device: int
    number: int
    is_apart: bool

    @classmethod
    def of(cls, packed: int) -> _Lane:
        rest, low = divmod(packed, 4)
        number, device = divmod(rest, _DEVICES)
        return cls(bool(low & 2), device - 1, number, bool(low & 1))

    @property
    def place(self) -> tuple[int, ...]:
        return (self.on_host, self.device, self.number)

    def order(self, busiest: Mapping[tuple[int, ...], int]) -> tuple[int, ...]:
        """Streams by number, then threads, the busiest first."""
        return (self.on_host, self.device, -busiest[self.place] if self.on_host else 0, self.number, self.is_apart)

    def name(self, num_devices: int) -> str:
        if self.on_host:
            return f"thread {self.number}{' Python' if self.is_apart else ''}"
        return f"{f'GPU {self.device} ' if num_devices > 1 else ''}stream {self.number}{' ranges' if self.is_apart else ''}"
