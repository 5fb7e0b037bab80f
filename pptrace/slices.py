"""Parts of a table as plain arrays: a run has thousands of steps on each rank, and a frame of each costs more than its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
        return {rows.first(name): rows for rows in _parted(self, self.columns[name])}

    def first(self, name: str) -> Any:
        """The first value of a column."""
        return self.columns[name][:1].tolist()[0]


def slice_of(table: pd.DataFrame) -> Slice:
    """A whole table."""
    return Slice({str(name): _plain(table[name]) for name in table.columns})


def slices(table: pd.DataFrame, by: Sequence[str]) -> dict[tuple[Any, ...], Slice]:
    """The rows of each combination of values, in their order; the combinations as they come first."""
    groups = table.groupby(list(by), sort=False).ngroup().to_numpy()
    return {tuple(map(rows.first, by)): rows for rows in _parted(slice_of(table), groups)}


def _parted(rows: Slice, values: Array) -> Iterator[Slice]:
    """The rows of each value, in the order of the values."""
    order = np.argsort(values, kind="stable")
    ordered, values = rows.where(order), values[order]
    cuts = (np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()
    for start, end in pairwise((0, *cuts, len(values)) if len(values) else ()):
        yield ordered.where(slice(start, end))


def _plain(column: pd.Series[Any]) -> Array:
    return column.to_numpy() if column.dtype.kind in "biuf" else column.to_numpy(dtype=object)
