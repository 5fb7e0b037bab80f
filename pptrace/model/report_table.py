"""The type of a report's tables, and helpers for their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, TypeVar

from msgspec import Struct

from pptrace.model.known import all_known

T = TypeVar("T")
MAX_ROWS = 12
"""Most rows of a brief table; longer ones are shortened to the first, the last and the extremes."""
FEW_RANKS = 8
"""Up to this number of ranks, a brief table shows each."""
MORE = "… {} more: --all shows them"


class Amount(Enum):
    """Level of detail of a table."""

    BRIEF = auto()
    WHOLE = auto()


class Bar(Struct, frozen=True):
    """Shares of a row as a bar: (name, share from 0 to 1), from left to right."""

    parts: tuple[tuple[str, float], ...]


Cell = str | Bar


class ReportTable(Struct, frozen=True):
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

    def without_bars(self) -> tuple[list[str], list[list[Cell]]]:
        """The columns and rows without columns of bars, for pages that show these as pictures."""
        shown = [at for at in range(len(self.columns)) if not any(isinstance(row[at], Bar) for row in self.rows)]
        return [self.columns[at] for at in shown], [[row[at] for at in shown] for row in self.rows]


Columns = Mapping[str, Callable[[T], str]]
"""The columns of a table by their names, each with what it says of the item of a row."""


def rows_of(items: Iterable[T], columns: Columns[T]) -> tuple[tuple[str, ...], ...]:
    """A row for each item."""
    return tuple(tuple(cell(item) for cell in columns.values()) for item in items)


def more(left_out: int) -> list[str]:
    """The note on rows that a brief table leaves out, if there are any."""
    return [MORE.format(left_out)] if left_out > 0 else []


def largest(items: Sequence[T], most: int, key: Callable[[T], Any]) -> list[T]:
    """At most so many of the items, those with the largest keys, in the order in which they come."""
    ranked = sorted(range(len(items)), key=lambda at: -key(items[at]))
    return [items[at] for at in sorted(ranked[:most])]


def mean_and_extremes(
    entries: Sequence[T], amount: Amount, rank_of: Callable[[T], int], key: Callable[[T], int]
) -> list[tuple[str, list[T]]]:
    """The rows of a table by rank, each its label and its entries; brief and of many ranks, all in one, the least, the most."""
    by_rank = [(str(rank_of(entry)), [entry]) for entry in entries]
    if amount is Amount.WHOLE or len(entries) <= FEW_RANKS:
        return by_rank
    ordered = sorted(by_rank, key=lambda row: key(row[1][0]))
    return [("mean", list(entries)), ordered[0], ordered[-1]]


def table_of(
    key: str,
    title: str,
    entries: Iterable[T],
    columns: Columns[T],
    notes: Sequence[str] = (),
    num_labels: int = 1,
    leave_out: tuple[int, ...] = (),
) -> ReportTable:
    """A table with a row for each entry: ``columns`` give its cells by their heads."""
    return ReportTable(key, title, tuple(columns), rows_of(entries, columns), tuple(notes), num_labels, leave_out)


def mean(values: Iterable[int | None]) -> int | None:
    """The mean, or None where a value is unknown."""
    known = all_known(values)
    return sum(known) // len(known) if known else None


def share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole
