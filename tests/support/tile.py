"""Tiles of a timeline, as a browser reads them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

_TYPES = {"Int8": "i1", "Uint8": "u1", "Int16": "i2", "Uint16": "u2", "Int32": "i4", "Uint32": "u4", "Float64": "f8"}


def sections_of(content: bytes) -> dict[str, Any]:
    """Sections of a tile by their tables, each with its arrays by name."""
    length = int.from_bytes(content[:4], "little")
    sections: dict[str, Any] = json.loads(content[4 : 4 + length])["sections"]
    for section in sections.values():
        for name, (kind, place, count) in section["arrays"].items():
            section[name] = np.frombuffer(content, _TYPES[kind], count, 4 + length + place)
    return sections
