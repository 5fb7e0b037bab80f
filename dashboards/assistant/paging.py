"""A page of a long table: filtered, sorted, cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pandas as pd

from pptrace.errors import UsageError

MOST_ROWS = 500


@dataclass(frozen=True, slots=True)
class Query:
    """A page to show: ``where`` are values that columns have, ``sort_by`` a column, the largest first with "-" before it."""

    offset: int = 0
    limit: int = 50
    where: Mapping[str, Any] = field(default_factory=dict)
    sort_by: str = ""

    def __post_init__(self) -> None:
        if self.offset < 0 or not 1 <= self.limit <= MOST_ROWS:
            raise UsageError(
                f"offset {self.offset}, limit {self.limit}: expected an offset from 0 on and a limit of 1 to {MOST_ROWS}"
            )

    @property
    def column(self) -> str:
        return self.sort_by.removeprefix("-")


def page_of_rows(rows: Iterable[Any], query: Query) -> dict[str, Any]:
    """A page of dataclasses or mappings. Unknown values, and columns that a row lacks, are None.

    Raises:
        UsageError: a column that the query names is not there.
    """
    plain: list[dict[str, Any]] = [msgspec.to_builtins(row, str_keys=True) for row in rows]
    columns = list(dict.fromkeys(name for row in plain for name in row))
    _require(query, columns, has_rows=bool(plain))
    kept = [row for row in plain if all(row.get(name) == value for name, value in query.where.items())]
    if query.sort_by and kept:
        known = [row for row in kept if row.get(query.column) is not None]
        unknown = [row for row in kept if row.get(query.column) is None]
        kept = sorted(known, key=lambda row: _key(row[query.column]), reverse=query.sort_by.startswith("-")) + unknown
    shown = kept[query.offset : query.offset + query.limit]
    return _page(columns, [[row.get(name) for name in columns] for row in shown], len(kept), query)


def page_of_frame(frame: pd.DataFrame, query: Query) -> dict[str, Any]:
    """A page of a table of the API, in which an unknown number is -1 and an unknown text "".

    Raises:
        UsageError: a column that the query names is not there.
    """
    columns = [str(name) for name in frame.columns]
    _require(query, columns, has_rows=True)
    for name, value in query.where.items():
        frame = frame[frame[name] == value]
    if query.sort_by:
        frame = frame.sort_values(query.column, ascending=not query.sort_by.startswith("-"), kind="stable")
    shown = frame.iloc[query.offset : query.offset + query.limit]
    values = [shown[name].astype(object).tolist() for name in columns]
    return _page(columns, [list(row) for row in zip(*values, strict=True)], len(frame), query)


def _key(value: Any) -> tuple[bool, Any]:
    """Numbers before all else, which is sorted as text."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else str(value)


def _require(query: Query, columns: Sequence[str], has_rows: bool) -> None:
    wanted = [*query.where, *([query.column] if query.sort_by else [])]
    missing = [name for name in wanted if name not in columns]
    if missing and has_rows:
        raise UsageError(f"there is no column {', '.join(missing)}; expected one of {', '.join(columns)}")


def _page(columns: Sequence[str], rows: list[list[Any]], total: int, query: Query) -> dict[str, Any]:
    end = query.offset + len(rows)
    return {
        "columns": list(columns),
        "rows": rows,
        "total_rows": total,
        "offset": query.offset,
        "next_offset": end if end < total else None,
    }
