"""The type of a report's tables, and helpers for their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

MAX_ROWS = 12
"""Most rows of a brief table; longer ones are shortened to the first, the last and the extremes."""
FEW_RANKS = 8
"""Up to this number of ranks, a brief table shows each."""
MORE = "… {} more: --all shows them"


class Amount(Enum):
    """Level of detail of a table."""

    BRIEF = auto()
    WHOLE = auto()


@dataclass(frozen=True, slots=True)
class Bar:
    """Shares of a row as a bar: (name, share from 0 to 1), from left to right."""

    parts: tuple[tuple[str, float], ...]


Cell = str | Bar


@dataclass(frozen=True, slots=True)
class ReportTable:
    """``key`` names the table for pages; the first ``num_labels`` columns are labels and the others numbers.

    ``leave_out`` lists columns by index: those that a narrow terminal leaves out, the first of them first, each
    with the others of the same name.
    """

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    num_labels: int = 1
    leave_out: tuple[int, ...] = ()


def table_of(
    key: str,
    title: str,
    entries: Iterable[Any],
    columns: Mapping[str, Callable[[Any], str]],
    notes: Sequence[str] = (),
    num_labels: int = 1,
    leave_out: tuple[int, ...] = (),
) -> ReportTable:
    """A table with a row for each entry: ``columns`` give its cells by their heads."""
    rows = tuple(tuple(cell(entry) for cell in columns.values()) for entry in entries)
    return ReportTable(key, title, tuple(columns), rows, tuple(notes), num_labels, leave_out)


def mean(values: Iterable[int | None]) -> int | None:
    """The mean, or None where a value is unknown."""
    listed = list(values)
    return None if not listed or None in listed else sum(value for value in listed if value is not None) // len(listed)


def share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole
