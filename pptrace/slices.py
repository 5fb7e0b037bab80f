"""Parts of a table as plain arrays: a run has thousands of steps on each rank, and a frame of each costs more than its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Slice:
    """Some rows of a table: its columns, equally long. Texts are arrays of objects."""

    columns: Mapping[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def where(self, chosen: Array | slice) -> Slice:
        """The rows that a mask, places or a slice choose."""
        return Slice({name: column[chosen] for name, column in self.columns.items()})

    def in_order_of(self, name: str) -> Slice:
        """The rows by a column, equal ones as they are."""
        return self.where(np.argsort(self.columns[name], kind="stable"))

    def among(self, name: str, values: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Which rows have one of the values."""
        chosen = np.zeros(len(self), dtype=np.bool_)
        for value in values:
            chosen |= self.columns[name] == value
        return chosen

    def by(self, name: str) -> dict[Any, Slice]:
        """The rows of each value of a column, in the order of the values."""
        values = self.columns[name]
        return {value: self.where(values == value) for value in sorted(set(values.tolist()))}


def slice_of(table: pd.DataFrame) -> Slice:
    """A whole table."""
    return Slice({str(name): _plain(table[name]) for name in table.columns})


def slices(table: pd.DataFrame, by: Sequence[str]) -> dict[tuple[Any, ...], Slice]:
    """The rows of each combination of values, in their order; the combinations as they come first."""
    return dict(_slices(table, by))


def _slices(table: pd.DataFrame, by: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], Slice]]:
    if table.empty:
        return
    group = table.groupby(list(by), sort=False).ngroup().to_numpy()
    order = np.argsort(group, kind="stable")
    rows = slice_of(table).where(order)
    starts = np.flatnonzero(np.diff(group[order], prepend=-1)).tolist()
    keys = zip(*(rows[name][starts].tolist() for name in by), strict=True)
    for key, start, end in zip(keys, starts, [*starts[1:], len(rows)], strict=True):
        yield key, rows.where(slice(start, end))


def _plain(column: pd.Series[Any]) -> Array:
    return column.to_numpy() if column.dtype.kind in "biuf" else column.to_numpy(dtype=object)
