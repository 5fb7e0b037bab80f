"""What a table of a report is, and what its rows are made with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

MAX_ROWS = 12
"""Of a brief table; one with more rows is shortened to its first, its last and its extremes."""
FEW_RANKS = 8
"""So many ranks are shown one by one in a brief table as well."""
MORE = "… {} more: --all shows them"


class Amount(Enum):
    """How much of a run a table shows."""

    BRIEF = auto()
    WHOLE = auto()


@dataclass(frozen=True, slots=True)
class Bar:
    """Shares of a row, one after the other: (what, share of the whole from 0 to 1)."""

    parts: tuple[tuple[str, float], ...]


Cell = str | Bar


@dataclass(frozen=True, slots=True)
class ReportTable:
    """``key`` names the table for pages; the first ``num_labels`` columns are labels and the others numbers."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    num_labels: int = 1


def mean(values: Iterable[int | None]) -> int | None:
    """The mean where all are known, else None."""
    known = list(values)
    return None if not known or None in known else sum(value for value in known if value is not None) // len(known)


def share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole
