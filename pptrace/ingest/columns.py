"""Batches of complete events → the columns of :class:`pptrace.tables.Events`.

Columns are numpy arrays that grow, so that no event outlives its batch as an object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Raw
from msgspec.structs import astuple

from pptrace.ingest.categories import CategoryCodes
from pptrace.ingest.exact import Integers, nanoseconds
from pptrace.ingest.shapes import NO_ARGS, Args, Complete, Scalar
from pptrace.tables import Category, Int32, Int64

_FIRST_ROWS = 4096
_UINT32_NONE = 2**32 - 1
_P2P_OPS = frozenset({"c10d::send", "c10d::recv_", "c10d::recv_any_source_"})


class _NameCodes(dict[str | None, int]):
    """Code by name, in order of first appearance; ``p2p`` collects the codes of c10d's sends and receives."""

    def __init__(self) -> None:
        super().__init__()
        self.p2p: list[int] = []

    def __missing__(self, name: str | None) -> int:
        code = len(self)
        self[name] = code
        if name in _P2P_OPS:
            self.p2p.append(code)
        return code


_Batch = tuple[npt.NDArray[Any], ...]
_DTYPES = (np.int8, np.int32, np.int64, np.int64, np.int32, np.int64, np.int64, np.int64)  # of Events' arrays, in order


class _Growing:
    """An array that grows by doubling; memory that it has not filled yet is not touched."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._values: npt.NDArray[Any] = np.empty(0, dtype=dtype)
        self._length = 0

    def extend(self, values: npt.NDArray[Any]) -> None:
        end = self._length + len(values)
        if end > len(self._values):
            grown = np.empty(max(end, 2 * len(self._values), _FIRST_ROWS), dtype=self._values.dtype)
            grown[: self._length] = self._values[: self._length]
            self._values = grown
        self._values[self._length : end] = values
        self._length = end

    def take(self) -> npt.NDArray[Any]:
        values = self._values[: self._length]
        self._values, self._length = self._values[:0].copy(), 0
        return values


@dataclass(frozen=True, slots=True)
class CommRow:
    """The row of an event, as yet unsorted, with the arguments that make it communication."""

    row: int
    name: str
    args: Args


@dataclass(slots=True)
class Columns:
    """All complete events so far, unsorted; times are as in the file, without a base added."""

    comm_rows: list[CommRow] = field(default_factory=list)
    categories: CategoryCodes = field(default_factory=CategoryCodes)
    num_rows: int = 0
    _names: _NameCodes = field(default_factory=_NameCodes)
    _integers: Integers = field(default_factory=Integers)
    _columns: tuple[_Growing, ...] = field(default_factory=lambda: tuple(_Growing(dtype) for dtype in _DTYPES))

    def add(self, events: Sequence[Complete]) -> None:
        if not events:
            return
        cats, names, pids, tids, ts, dur, raw_args = zip(*map(astuple, events), strict=True)
        args: Sequence[Args] = [item or NO_ARGS for item in raw_args] if None in raw_args else raw_args
        category = np.fromiter(map(self.categories.__getitem__, cats), np.int8, len(cats))
        name_id = np.fromiter(map(self._names.__getitem__, names), np.int32, len(names))
        thread = self._integers(tids)
        device, stream, correlation = (
            np.full(len(events), -1, dtype=dtype) for dtype in (np.int32, np.int64, np.int64)
        )
        on_device = category > Category.HOST_LIMIT
        rows = np.flatnonzero(on_device | (category == Category.RUNTIME))
        if len(rows):
            correlation[rows] = self._correlations([args[row] for row in rows.tolist()])
        rows = np.flatnonzero(on_device)
        if len(rows):
            chosen = rows.tolist()
            device[rows] = self._devices([args[row] for row in chosen], [pids[row] for row in chosen])
            stream_given = self._integers([args[row].stream for row in chosen])
            stream[rows] = np.where(stream_given >= 0, stream_given, thread[rows])
            thread[rows] = -1
        self._note_comms(names, name_id, args)
        batch: _Batch = (category, name_id, nanoseconds(ts), nanoseconds(dur), device, stream, thread, correlation)
        for column, values in zip(self._columns, batch, strict=True):
            column.extend(values)
        self.num_rows += len(events)

    def _correlations(self, args: Sequence[Args]) -> Int64:
        values = self._integers([item.correlation for item in args])
        return np.where((values <= 0) | (values == _UINT32_NONE), -1, values)

    def _devices(self, args: Sequence[Args], pids: Sequence[Scalar]) -> Int64:
        """The device in the arguments, else the process, which is the device's number in Kineto's rows of a device."""
        given = self._integers([item.device for item in args])
        values = np.where(given >= 0, given, self._integers(pids))
        return np.where((values >= 0) & (values <= np.iinfo(np.int32).max), values, -1)

    def _note_comms(self, names: Sequence[str | None], name_id: Int32, args: Sequence[Args]) -> None:
        rows = [row for row, item in enumerate(args) if item.collective or item.group_id]
        if self._names.p2p:
            rows += np.flatnonzero(np.isin(name_id, self._names.p2p)).tolist()
        self.comm_rows += [CommRow(self.num_rows + row, names[row] or "", _detached(args[row])) for row in rows]

    def take(self, column: int) -> npt.NDArray[Any]:
        """A whole column, by its place in :class:`pptrace.tables.Events`; it is empty afterwards."""
        return self._columns[column].take()

    def names(self) -> list[str]:
        return [name or "" for name in self._names]


def _detached(args: Args) -> Args:
    """The arguments with copies of their texts, which otherwise keep the whole block alive."""
    values: list[Any] = [value.copy() if isinstance(value, Raw) else value for value in astuple(args)]
    return Args(*values)
