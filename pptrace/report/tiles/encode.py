"""Tiles as bytes: a header of JSON, then arrays that a browser takes as they are.

    bytes  = length header padding {array}
    length = the header's, 4 bytes, little-endian; the arrays begin at the next multiple of 8

The header has ``sections``: of each the name, and name, type, place and length of its arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pptrace.report.tiles.cut import Range, Tile, cut, cut_together, shares_of
from pptrace.report.tiles.measured import COMMS, COMPUTE_LANE, OPS, TABLES, Picture, Table
from pptrace.report.tiles.memory import MemoryTracks, most_of_buckets, samples_of
from pptrace.report.tiles.tracks import Array, Tracks

_ALIGNED = 8
_JS_TYPES = {"i1": "Int8", "u1": "Uint8", "i2": "Int16", "u2": "Uint16", "i4": "Int32", "u4": "Uint32", "f8": "Float64"}
_BAR_COLUMNS: Mapping[str, tuple[str, ...]] = {
    OPS: ("kind", "stage", "chunk", "microbatch", "step"),
    COMMS: ("kind", "microbatch", "peer", "match", "before", "after"),
}
"""Columns of bars that the browser draws or shows at once; the dashboard is asked for details one by one."""
DETAILS: Mapping[str, tuple[str, ...]] = {
    OPS: ("phase", "source", "clock", "pair"),
    COMMS: ("axis", "direction", "bytes", "step"),
}
"""Columns of details, of pages that ask nobody."""
_MOST_SAMPLES = 6_000
"""A tile of memory of a page with up to this number of events has each of them."""


def rank_tile(
    picture: Picture, ranks: Sequence[int], time: Range, details: Mapping[str, tuple[str, ...]] | None = None
) -> tuple[bytes, bool]:
    """The tile of some ranks, a section for each table; and whether it has each bar, so that a finer one tells no more.

    ``details`` are further columns of the bars.
    """
    sections: dict[str, dict[str, Any]] = {}
    arrays, is_whole = {}, True
    for name in TABLES:
        table = picture[name]
        wanted = table.tracks.tracks_of(ranks)
        tile = cut(table.tracks, table.levels, wanted, time)
        is_whole = is_whole and not len(tile.cell_track)
        sections[name] = section_of(table.tracks, wanted, tile)
        arrays[name] = tile_arrays(name, table, tile, (details or {}).get(name, ()))
        if details:  # nobody is asked for the longest bar of a cell
            arrays[name]["cellLongest"] = np.zeros_like(arrays[name]["cellLongest"])
    sections[OPS]["kinds"] = picture[OPS].texts["kind"]
    return encode(sections, arrays), is_whole


def memory_tile(memory: MemoryTracks, ranks: Sequence[int], time: Range) -> bytes:
    """The tile of the memory of some ranks: the most bytes in each bucket, of those that have memory events."""
    known = [rank for rank in ranks if rank in memory]
    most = most_of_buckets(memory, known, time)
    return encode({"memory": {"rank": known}}, {"memory": {"bytes": most.reshape(-1).astype(np.float64)}})


def memory_samples_tile(memory: MemoryTracks, ranks: Sequence[int], time: Range) -> tuple[bytes, bool]:
    """The tile of the memory of some ranks as events, if these are few enough, else as buckets; and whether it has each event."""
    known = [rank for rank in ranks if rank in memory]
    row, at, held = samples_of(memory, known, time)
    if len(row) > _MOST_SAMPLES:
        return memory_tile(memory, ranks, time), False
    arrays: dict[str, Array] = {
        "row": row.astype(np.uint16),
        "start": at.astype(np.float64),
        "held": held.astype(np.float64),
    }
    return encode({"memory": {"rank": known}}, {"memory": arrays}), True


def group_tile(picture: Picture, groups: Sequence[tuple[str, Sequence[int]]], time: Range) -> bytes:
    """The tile of groups of ranks: of each, the shares of its ranks' time in each class of ops by bucket."""
    table = picture[OPS]
    tracks = table.tracks
    shares = []
    for _, ranks in groups:
        wanted = tracks.tracks_of(ranks)
        busy = cut_together(tracks, table.levels, wanted[tracks.lane[wanted] == COMPUTE_LANE], time)
        shares.append(shares_of(busy, len(ranks) << time.shift))
    return encode({"groups": {"num": len(shares)}}, {"groups": {"shares": np.concatenate(shares).reshape(-1)}})


def section_of(tracks: Tracks, wanted: Array, tile: Tile) -> dict[str, Any]:
    """The facts of a tile of the ``wanted`` tracks: where each of them is, and how many bars it has."""
    places = {name: getattr(tracks, name)[wanted].tolist() for name in ("rank", "lane", "depth")}
    return places | {"earlier": tile.num_earlier, "count": tile.count}


def tile_arrays(name: str, table: Table, tile: Tile, details: Sequence[str] = ()) -> dict[str, Array]:
    """The arrays of a tile of one table; times are ns as floats, which are exact up to 104 days."""
    tracks, rows = table.tracks, tile.rows
    arrays: dict[str, Array] = {
        "row": rows.astype(np.int32),
        "track": tile.track.astype(np.uint16),
        "start": tracks.start[rows].astype(np.float64),
        "length": tracks.length[rows].astype(np.float64),
        "group": tracks.group[rows].astype(np.uint8),
        "cellTrack": tile.cell_track.astype(np.uint16),
        "cellBucket": tile.cell_bucket.astype(np.uint16),
        "cellCount": tile.cell_count.astype(np.int32),
        "cellLongest": tile.cell_longest.astype(np.int32),
        "cellShares": tile.cell_shares.reshape(-1),
    }
    for column in (*_BAR_COLUMNS.get(name, ()), *details):
        values = tracks.columns[column][rows]
        arrays[column] = values.astype(np.float64) if values.dtype.itemsize == _ALIGNED else values
    return arrays


def encode(sections: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, Mapping[str, Array]]) -> bytes:
    """The bytes of some sections: what each says, and its arrays by name."""
    place, described, blocks = 0, {}, []
    for name, fields in sections.items():
        of_section = {}
        for column, values in arrays[name].items():
            code = values.dtype.str[1:]
            block = np.ascontiguousarray(values).tobytes()
            of_section[column] = [_JS_TYPES[code], place, len(values)]
            blocks.append(block + b"\0" * (-len(block) % _ALIGNED))
            place += len(blocks[-1])
        described[name] = {**fields, "arrays": of_section}
    header = json.dumps({"sections": described}, separators=(",", ":")).encode()
    padding = b" " * (-(len(header) + 4) % _ALIGNED)
    header += padding
    return len(header).to_bytes(4, "little") + header + b"".join(blocks)
