"""A table as columns by name, written as CSV or as the rows of JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any


def as_csv(columns: Mapping[str, Sequence[Any]]) -> str:
    """Columns as CSV, an empty cell for None."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return out.getvalue()


def as_rows(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Columns as an object for each row."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
