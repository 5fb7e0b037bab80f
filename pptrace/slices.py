"""Parts of a table as plain arrays: a run has thousands of steps on each rank, and a frame of each costs more than its rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct

Array = npt.NDArray[Any]


@runtime_checkable
class Column(Protocol):
    """A column: an array, or :class:`Texts`."""

    def __len__(self) -> int: ...
    def __getitem__(self, chosen: Any, /) -> Any: ...


class Slice(Struct, frozen=True):
    """Some rows of a table: its columns, equally long. Texts are :class:`Texts`, or arrays of objects."""

    columns: Mapping[str, Column]

    @classmethod
    def empty(cls, *names: str, texts: Sequence[str] = ()) -> Slice:
        """A table without rows, of columns of integers and, those of ``texts``, of texts."""
        return cls({name: np.zeros(0, np.str_ if name in texts else np.int64) for name in names})

    @classmethod
    def joined(cls, parts: Sequence[Slice]) -> Slice:
        """The rows of several parts, at least one, with the columns of the first, which are arrays."""
        return cls({name: np.concatenate([part[name] for part in parts]) for name in parts[0].columns})

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def where(self, chosen: Array | slice) -> Slice:
        """The rows that a mask, places or a slice choose; of each column they are taken when it is first asked for."""
        if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_:
            if chosen.all():
                return self
            chosen = np.flatnonzero(chosen)
        return Slice(_Chosen(self.columns, chosen))

    def with_columns(self, columns: Mapping[str, Any]) -> Slice:
        """The rows with other or further columns."""
        return Slice({**self.columns, **columns})

    def only(self, names: Sequence[str]) -> Slice:
        """The rows with some columns alone."""
        return Slice({name: self.columns[name] for name in names})

    def in_order_of(self, name: str) -> Slice:
        """The rows by a column, equal ones as they are."""
        return self.where(np.argsort(self[name], kind="stable"))

    def sorted_by(self, names: Sequence[str]) -> Slice:
        """The rows by some columns, the first of them first, equal ones as they are; these rows themselves if they are."""
        later: npt.NDArray[np.bool_] = np.zeros(max(len(self) - 1, 0), dtype=np.bool_)
        equal = ~later
        for name in names:
            values = self.columns[name]
            later |= equal & (values[1:] < values[:-1])
            equal &= values[1:] == values[:-1]
        return self.where(np.lexsort([self[name] for name in reversed(names)])) if later.any() else self

    def among(self, name: str, values: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Mark the rows that have one of the values."""
        return are_among(self.columns[name], values)

    def by(self, name: str) -> dict[Any, Slice]:
        """The rows of each value of a column, in the order of the values."""
        codes, values = self.codes(name)
        if len(values) == 1:
            return {values[0]: self}
        return {rows.first(name): rows for rows in _parted(self, codes)}

    def first(self, name: str) -> Any:
        """The first value of a column."""
        return self.columns[name][:1].tolist()[0]

    def codes(self, name: str) -> tuple[npt.NDArray[np.int64], tuple[Any, ...]]:
        """(index into the values, the values in ascending order) of a column."""
        column: Any = self.columns[name]
        if isinstance(column, Texts):
            present = np.flatnonzero(np.bincount(column.codes, minlength=len(column.names))).tolist()
            present.sort(key=column.names.__getitem__)
            index = np.zeros(len(column.names), dtype=np.int64)
            index[present] = np.arange(len(present))
            return index[column.codes], tuple(column.names[code] for code in present)
        codes, values = pd.factorize(column)
        ascending = sorted(range(len(values)), key=values.tolist().__getitem__)
        index = np.empty(len(values), dtype=np.int64)
        index[ascending] = np.arange(len(values))
        return index[codes], tuple(values[ascending].tolist())


def compact(values: Array) -> Array:
    """The integers in the smallest type that holds them."""
    if values.dtype.kind not in "iu" or not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    for dtype in (np.int8, np.int16, np.int32, np.uint32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return values.astype(dtype, copy=False)
    return values


class Texts:
    """A column of texts: ``names``, and for each row the index of its text among them.

    It does what slices need of a category of pandas, for which choosing and comparing rows take several times as long.
    """

    __slots__ = ("codes", "names")

    def __init__(self, codes: npt.NDArray[np.integer[Any]], names: tuple[str, ...]) -> None:
        self.codes, self.names = codes, names

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, chosen: Array | slice | int) -> Texts | str:
        """The texts of chosen rows, or that of one row."""
        codes = self.codes[chosen]
        return Texts(codes, self.names) if isinstance(codes, np.ndarray) else self.names[codes]

    def __eq__(self, text: object) -> npt.NDArray[np.bool_]:  # type: ignore[override]
        """Mask of the rows that have a text."""
        if text not in self.names:
            return np.zeros(len(self), dtype=np.bool_)
        equal: npt.NDArray[np.bool_] = self.codes == self.names.index(text)
        return equal

    def __ne__(self, text: object) -> npt.NDArray[np.bool_]:  # type: ignore[override]
        return ~(self == text)

    __hash__ = None  # type: ignore[assignment]

    def tolist(self) -> list[str]:
        return [self.names[code] for code in self.codes.tolist()]


class _Chosen(Mapping[str, Any]):
    """The chosen rows of some columns: of the columns of a table most places need a few."""

    __slots__ = ("_chosen", "_of", "_taken")

    def __init__(self, columns: Mapping[str, Any], chosen: Array | slice) -> None:
        self._of, self._chosen = columns, chosen
        self._taken: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        taken = self._taken.get(name)
        if taken is None:
            taken = self._taken[name] = self._of[name][self._chosen]
        return taken

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        """Other processes get the chosen rows alone."""
        return dict, (dict(self),)


def slices_by_rank(table: pd.DataFrame, then: Sequence[str]) -> dict[int, Slice]:
    """The rows of each rank, each part in the order of the columns ``then``, equal ones as they are.

    The parts are views where the table is in that order already.
    """
    rows = slice_of(table)
    if not len(rows):
        return {}
    if (rows["rank"][1:] < rows["rank"][:-1]).any():
        rows = rows.in_order_of("rank")
    return {part.first("rank"): part.sorted_by(then) for part in _ordered_parts(rows, rows["rank"])}


def rows_where(table: pd.DataFrame, mask: Any) -> pd.DataFrame:
    """The rows that a mask chooses; the table itself, and no copy, where these are all."""
    return table if bool(np.asarray(mask).all()) else table[mask]


def rows_among(column: pd.Series[Any], values: Collection[str]) -> npt.NDArray[np.bool_]:
    """Mask of the rows that have one of the values, in a tenth of the time that ``isin`` of a short category takes."""
    if not isinstance(column.dtype, pd.CategoricalDtype):
        return column.isin(values).to_numpy()
    return are_among(_plain(column), values)


def are_among(column: Any, values: Iterable[str]) -> npt.NDArray[np.bool_]:
    """The same of an array of texts, or of :class:`Texts`."""
    chosen = np.zeros(len(column), dtype=np.bool_)
    for value in values:
        chosen |= column == value
    return chosen


def are_of(values: Array, known: Array) -> npt.NDArray[np.bool_]:
    """Mark the integers that are among some known ones, which ``np.isin`` sorts where they are not dense, as few as there are."""
    _, extent = _range(known)
    is_dense = extent <= _SPARSE * (len(values) + len(known))
    return np.isin(values, known, kind="table" if is_dense else None)


def slice_of(table: pd.DataFrame) -> Slice:
    """A whole table."""
    return Slice({str(name): _plain(table[name]) for name in table.columns})


def slices(table: pd.DataFrame, by: Sequence[str]) -> dict[tuple[Any, ...], Slice]:
    """The rows of each combination of values, in their order; the combinations as they come first."""
    if not len(table):
        return {}
    groups, _ = distinct_of([table[name] for name in by])
    return {tuple(map(rows.first, by)): rows for rows in _parted(slice_of(table), groups)}


def _parted(rows: Slice, values: Array) -> Iterator[Slice]:
    """The rows of each value, in the order of the values."""
    order = np.argsort(values, kind="stable")
    return _ordered_parts(rows.where(order), values[order])


def _ordered_parts(ordered: Slice, values: Array) -> Iterator[Slice]:
    """The rows of each value, which stand together."""
    cuts = (np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()
    for start, end in pairwise((0, *cuts, len(values)) if len(values) else ()):
        yield ordered.where(slice(start, end))


def places_of_each(values: Array) -> dict[int, npt.NDArray[np.int64]]:
    """The places of each value, of integers, in the order of the values."""
    if not len(values):
        return {}
    order = np.argsort(values, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(values[order])) + 1)
    return {int(values[places[0]]): places for places in parts}


def _plain(column: pd.Series[Any]) -> Any:
    if isinstance(column.dtype, pd.CategoricalDtype):
        return Texts(column.array.codes, tuple(column.array.categories))
    return column.to_numpy() if column.dtype.kind in "biuf" else column.to_numpy(dtype=object)


def group_codes(columns: Sequence[pd.Series[Any] | Array]) -> npt.NDArray[np.int64]:
    """One number for each combination of values, row by row: equal numbers for equal rows."""
    codes, size = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        values = _numbers(column)
        least, extent = _range(values)
        if size * extent > _LARGEST_CODE:
            values = pd.factorize(values)[0]
            least, extent = _range(values)
        if size * extent > _LARGEST_CODE:
            _, codes = np.unique(codes, return_inverse=True)
            size = int(codes.max()) + 1
        codes, size = codes * extent + (values - least), size * extent
    return codes


def _numbers(column: pd.Series[Any] | Array) -> npt.NDArray[Any]:
    """A number for each row, equal ones for equal values."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        return np.asarray(column.array.codes, dtype=np.int64)
    return np.asarray(column) if column.dtype.kind in "biu" else pd.factorize(column)[0]


def last_like(rows: Sequence[Array], known: Sequence[Array]) -> npt.NDArray[np.int64]:
    """Last row of other columns that equals each row of some columns of integers; −1 where none is."""
    num_rows, num_known = len(rows[0]), len(known[0])
    if not num_rows or not num_known:
        return np.full(num_rows, -1)
    codes = group_codes([np.concatenate(pair) for pair in zip(rows, known, strict=True)])
    index, distinct = pd.factorize(codes)
    last = np.full(len(distinct), -1)
    last[index[num_rows:]] = np.arange(num_known)  # of equal ones the last assignment stays
    return last[index[:num_rows]]


def first_like(rows: Sequence[Array], known: Sequence[Array]) -> npt.NDArray[np.int64]:
    """First row of other columns that equals each row of some columns of integers; −1 where none is."""
    last = last_like(rows, [column[::-1] for column in known])
    return np.where(last >= 0, len(known[0]) - 1 - last, -1)


def distinct_of(columns: Sequence[pd.Series[Any] | Array]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(number of the combination of values of each row, the first row of each combination); combinations as they come first."""
    number, values = pd.factorize(group_codes(columns))
    first = np.zeros(len(values), dtype=np.int64)
    first[number[::-1]] = np.arange(len(number))[::-1]  # of equal ones the last assignment stays
    return number.astype(np.int64), first


def distinct_rows(matrix: npt.NDArray[np.int64]) -> tuple[list[list[int]], npt.NDArray[np.intp]]:
    """(the distinct rows of a matrix of integers, by row the index of its like)."""
    if not matrix.shape[1]:
        return [[]], np.zeros(len(matrix), dtype=np.intp)
    codes = group_codes(list(matrix.T))
    _, first, row_of = np.unique(codes, return_index=True, return_inverse=True)
    return matrix[first].tolist(), row_of


def _range(values: npt.NDArray[Any]) -> tuple[int, int]:
    """(the least value, how many values there are from it to the largest)."""
    least = int(values.min()) if len(values) else 0
    return least, int(values.max()) - least + 1 if len(values) else 1


_LARGEST_CODE = 2**62
_SPARSE = 32
"""Range of integers, over their number, up to which marking each in a table is faster than sorting them."""


def group_sums(values: npt.NDArray[np.int64], group: npt.NDArray[Any], num_groups: int) -> npt.NDArray[np.int64]:
    """The sums of the columns of each group, shape (rows, groups)."""
    sums = np.zeros((values.shape[0], num_groups), dtype=np.int64)
    order = np.argsort(group, kind="stable")
    first = np.searchsorted(group[order], np.arange(num_groups))
    present = np.flatnonzero(np.bincount(group, minlength=num_groups))
    if len(present):
        sums[:, present] = np.add.reduceat(values[:, order], first[present], axis=1)
    return sums


def reduce_groups(
    function: np.ufunc, values: npt.NDArray[np.int64], group: npt.NDArray[Any], num_groups: int
) -> npt.NDArray[np.int64]:
    """``np.add``, ``np.minimum`` or ``np.maximum`` of the values of each group; of none 0, the largest or the least number."""
    limits = np.iinfo(np.int64)
    of_none = 0 if function is np.add else limits.max if function is np.minimum else limits.min
    reduced = np.full(num_groups, of_none, dtype=np.int64)
    function.at(reduced, group, values)
    return reduced


def group_medians(values: npt.NDArray[np.int64], group: npt.NDArray[Any], num_groups: int) -> npt.NDArray[np.int64]:
    """The medians of the columns of each group, rounded down, shape (rows, groups); 0 of a group without any."""
    medians = np.zeros((values.shape[0], num_groups), dtype=np.int64)
    for number in np.unique(group).tolist():
        medians[:, number] = np.median(values[:, group == number], axis=1)
    return medians
