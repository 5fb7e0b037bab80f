"""Parts of a report as rows of a file: JSON with the names of the report, or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters by which spreadsheets take a text for a formula."""

Row = Any
"""A dataclass of the report, or a mapping by name."""


def json_of(rows: Iterable[Row]) -> str:
    """The rows as a JSON array of objects."""
    return msgspec.json.format(msgspec.json.encode(list(rows)), indent=1).decode() + "\n"


def csv_of(rows: Iterable[Row]) -> str:
    """The rows as CSV: parts of parts have columns of their own (``in_flight_planned``), places are text, the unknown empty.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    flat = [dict(_cells(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _cells(row: Row, before: str = "") -> Iterable[tuple[str, object]]:
    members = row if isinstance(row, Mapping) else {entry.name: getattr(row, entry.name) for entry in fields(row)}
    for name, value in members.items():
        if is_dataclass(value) and not isinstance(value, type):
            yield from _cells(value, f"{before}{name}_")
            continue
        cell = value
        if isinstance(value, Mapping):
            cell = ", ".join(f"{key} {part}" for key, part in value.items())
        elif isinstance(value, Sequence) and not isinstance(value, str):
            cell = " ".join(map(str, value))
        if isinstance(cell, str) and cell.startswith(_FORMULA):
            cell = f"'{cell}"
        yield f"{before}{name}", "" if cell is None else cell
