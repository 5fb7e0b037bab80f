"""Bars of a run as an entry of the cache, with their mipmaps: see :mod:`pptrace.workflow.reopen`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from pptrace.ingest.job.disk_cache import Packed
from pptrace.report.tiles.layout import Layout, RankRow
from pptrace.report.tiles.measured import TABLES, Picture, Table
from pptrace.report.tiles.memory import MemoryTracks
from pptrace.report.tiles.pyramid import Level
from pptrace.report.tiles.tracks import NUM_CLASSES, Array, Tracks

ENTRY = "timeline, sources of ops"
DAMAGE = (KeyError, ValueError, TypeError, IndexError)


class Bars(Struct, frozen=True):
    """Tracks that are made of an analysis for its timeline, once: times are ns from ``origin_ns``.

    ``message_ns`` is what the messages of each step took (:func:`pptrace.report.tiles.timeline.message_times`).
    """

    origin_ns: int
    layout: Layout
    measured: Picture
    memory: MemoryTracks
    message_ns: Mapping[int, int]

    @property
    def span_ns(self) -> int:
        """Time from the first bar's start to the last one's end."""
        tracks = [table.tracks for table in self.measured.tables.values() if len(table.tracks)]
        return max(
            (int((part.start[part.ptr[1:] - 1] + part.length[part.ptr[1:] - 1]).max()) for part in tracks), default=1
        )


class _KeptTable(Struct, frozen=True):
    """Parts of a table that are no arrays. ``lengths`` are those of columns of one value, of which the arrays have one entry."""

    lanes: tuple[str, ...]
    texts: Mapping[str, tuple[str, ...]]
    columns: tuple[str, ...]
    has_second: bool
    shifts: tuple[int, ...]
    lengths: Mapping[str, int]


class _KeptBars(Struct, frozen=True):
    origin_ns: int
    rows: tuple[RankRow, ...]
    tables: Mapping[str, _KeptTable]
    memory: tuple[int, ...]
    message_ns: Mapping[int, int]


def pack_bars(bars: Bars) -> Packed:
    arrays: dict[str, Array] = {}
    tables = {name: _pack_table(name, bars.measured.tables[name], arrays) for name in TABLES}
    for rank, (times, num_bytes) in bars.memory.items():
        arrays[f"memory.{rank}.t"], arrays[f"memory.{rank}.bytes"] = times, num_bytes
    kept = _KeptBars(bars.origin_ns, bars.layout.rows, tables, tuple(bars.memory), bars.message_ns)
    return Packed(msgspec.json.encode(kept).decode(), arrays)


def unpack_bars(packed: Packed) -> Bars:
    """Restore the bars.

    Raises:
        KeyError, ValueError, TypeError, IndexError: the entry is damaged.
    """
    kept = msgspec.json.decode(packed.facts, type=_KeptBars)
    tables = {name: _unpack_table(name, kept.tables[name], packed.arrays) for name in TABLES}
    memory = {rank: (packed.arrays[f"memory.{rank}.t"], packed.arrays[f"memory.{rank}.bytes"]) for rank in kept.memory}
    return Bars(kept.origin_ns, Layout(kept.rows), Picture(tables), memory, kept.message_ns)


def _pack_table(name: str, table: Table, arrays: dict[str, Array]) -> _KeptTable:
    tracks, lengths = table.tracks, {}
    columns = {column: getattr(tracks, column) for column in _TRACKS}
    columns |= {f"columns.{column}": values for column, values in tracks.columns.items()}
    if tracks.second is not None:
        columns["second"] = tracks.second
    for column, values in columns.items():
        if len(values) > 1 and values.strides == (0,):
            lengths[column] = len(values)
            values = values[:1]
        arrays[f"{name}.{column}"] = values
    for number, level in enumerate(table.levels):
        for column in _LEVEL:
            arrays[f"{name}.{number}.{column}"] = getattr(level, column).reshape(-1)
    shifts = tuple(level.shift for level in table.levels)
    return _KeptTable(table.lanes, table.texts, tuple(tracks.columns), tracks.second is not None, shifts, lengths)


def _unpack_table(name: str, kept: _KeptTable, arrays: Mapping[str, Array]) -> Table:
    def column(of: str) -> Array:
        values = arrays[f"{name}.{of}"]
        return np.broadcast_to(values, kept.lengths[of]) if of in kept.lengths else values

    known: dict[str, Any] = {of: column(of) for of in _TRACKS}
    tracks = Tracks(
        **known,
        second=column("second") if kept.has_second else None,
        columns={of: column(f"columns.{of}") for of in kept.columns},
    )
    if any(len(values) != len(tracks) for values in (tracks.length, tracks.group, *tracks.columns.values())):
        raise ValueError(f"{name}: columns of different lengths")
    table = Table(tracks, kept.lanes, kept.texts)
    vars(table)["levels"] = tuple(_unpack_level(f"{name}.{at}", shift, arrays) for at, shift in enumerate(kept.shifts))
    return table


def _unpack_level(name: str, shift: int, arrays: Mapping[str, Array]) -> Level:
    known: dict[str, Any] = {column: arrays[f"{name}.{column}"] for column in _LEVEL}
    return Level(**{**known, "busy": known["busy"].reshape(-1, NUM_CLASSES)}, shift=shift)


_TRACKS = ("ptr", "rank", "lane", "depth", "start", "length", "group")
_LEVEL = tuple(name for name in Level.__struct_fields__ if name != "shift")
