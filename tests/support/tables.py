"""Tables of runs, from rows that name some of their columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pptrace.model.tables import COMMS, Schema, make_table
from pptrace.slices import Slice

Row = Mapping[str, object]
Match = tuple[int, str, int, int, int]
"""(rank, kind, match, start, end)."""
TEXTS = ("axis", "kind", "direction", "clock", "name", "pair", "splits")


def table_of(schema: Schema, rows: Sequence[Row], number: int = 0) -> pd.DataFrame:
    """Rows as a table of a schema; what a row does not name is ``number`` or an empty text."""
    blank = {name: number if dtype == "int64" else "" for name, dtype in schema.items()}
    return make_table(schema, {name: [row.get(name, blank[name]) for row in rows] for name in schema})


def named(names: str, rows: Iterable[Sequence[object]]) -> list[dict[str, object]]:
    """Rows with the names of their columns, which spaces separate."""
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


def matched_comms(rows: Iterable[Match]) -> pd.DataFrame:
    """Communication of which clocks are estimated."""
    return table_of(COMMS, named("rank kind match start_ns end_ns", rows), number=-1)


def slice_with(rows: Sequence[Mapping[str, Any]], names: Collection[str] | None = None) -> Slice:
    """These columns of rows, or all those of the first one."""
    if names is None:
        names = rows[0] if rows else ()
    return Slice(
        {name: np.array([row[name] for row in rows], dtype=object if name in TEXTS else np.int64) for name in names}
    )


def rows_of(table: Slice) -> list[dict[str, Any]]:
    columns = {name: table[name].tolist() for name in table.columns}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
