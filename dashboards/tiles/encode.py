"""Tiles as bytes: a header of JSON, then arrays that a browser takes as they are.

    bytes  = length header padding {array}
    length = the header's, 4 bytes, little-endian; the arrays begin at the next multiple of 8

The header has ``sections``: of each the name, and name, type, place and length of its arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from dashboards.tiles.cut import Tile
from dashboards.tiles.measured import COMMS, OPS, Table
from dashboards.tiles.tracks import Array

_ALIGNED = 8
_JS_TYPES = {"i1": "Int8", "u1": "Uint8", "i2": "Int16", "u2": "Uint16", "i4": "Int32", "u4": "Uint32", "f8": "Float64"}
_BAR_COLUMNS: Mapping[str, tuple[str, ...]] = {
    OPS: ("kind", "stage", "chunk", "microbatch", "step"),
    COMMS: ("kind", "microbatch", "peer", "match", "before", "after"),
}
"""Columns of bars that the browser draws or shows at once; details are asked for one by one."""


def tile_arrays(name: str, table: Table, tile: Tile) -> dict[str, Array]:
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
    for column in _BAR_COLUMNS.get(name, ()):
        arrays[column] = _plain(tracks.columns[column][rows])
    return arrays


def _plain(values: Array) -> Array:
    return values.astype(np.float64) if values.dtype.itemsize == _ALIGNED else values


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
