"""Accumulate batches of complete events as the columns of :class:`pptrace.model.traces.Events`.

Columns are growing numpy arrays, so that no event object outlives its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw
from msgspec.structs import astuple
from msgspec.structs import replace as structs_replace

from pptrace.ingest.common.categories import CategoryCodes
from pptrace.ingest.common.exact_numbers import Integers, Scalar, nanoseconds
from pptrace.ingest.kineto.comm_shapes import SHAPED
from pptrace.ingest.kineto.event_types import (
    ABSENT,
    DECODE_ERRORS,
    DEVICE_ARGS_DECODER,
    NO_DEVICE_ARGS,
    NO_NODE_ARGS,
    NODE_ARGS_DECODER,
    Args,
    Complete,
    DeviceArgs,
    NodeArgs,
)
from pptrace.ingest.kineto.json_repair import args_of
from pptrace.model.tables import Int32, Int64
from pptrace.model.traces import Category

_FIRST_ROWS = 4096
_UINT32_NONE = 2**32 - 1
_P2P_OPS = frozenset({"c10d::send", "c10d::recv_", "c10d::recv_any_source_"})
_NODE = "autograd::engine::evaluate_function: "


class _NameCodes(dict[str | None, int]):
    """Code by name, in order of first appearance; ``p2p`` collects the codes of c10d's sends and receives, ``shaped`` those of
    communication whose shapes tell its size, ``nodes`` those of autograd's nodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.p2p: list[int] = []
        self.shaped: list[int] = []
        self.nodes: list[int] = []

    def __missing__(self, name: str | None) -> int:
        code = len(self)
        self[name] = code
        if name in _P2P_OPS:
            self.p2p.append(code)
        elif name in SHAPED:
            self.shaped.append(code)
        elif name is not None and name.startswith(_NODE):
            self.nodes.append(code)
        return code


# Of the arrays collected: category, name, start, duration, device, lane, correlation.
_DTYPES = (np.int8, np.int32, np.int64, np.int64, np.int32, np.int64, np.int64)
_NAME = 1
_COMM_KEY = b'"Collective name"'


class _GrowingArray:
    """An array that grows by doubling; unused capacity is not touched, so it takes no memory."""

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

    def __getstate__(self) -> npt.NDArray[Any]:
        """Pickle the used part only."""
        return self._values[: self._length]

    def __setstate__(self, values: npt.NDArray[Any]) -> None:
        self._values, self._length = values, len(values)


@dataclass(frozen=True, slots=True)
class CommRow:
    """Row of an event in the file, with its communication arguments."""

    row: int
    name: str
    args: Args


@dataclass(slots=True)
class Columns:
    """All complete events so far, unsorted, with times as in the file, without the base time."""

    comm_rows: list[CommRow] = field(default_factory=list)
    categories: CategoryCodes = field(default_factory=CategoryCodes)
    num_rows: int = 0
    _names: _NameCodes = field(default_factory=_NameCodes)
    _integers: Integers = field(default_factory=Integers)
    _interned: dict[bytes, Raw] = field(default_factory=dict)  # of communication arguments, which repeat
    _columns: tuple[_GrowingArray, ...] = field(
        default_factory=lambda: tuple(_GrowingArray(dtype) for dtype in _DTYPES)
    )

    def add(self, events: Sequence[Complete]) -> None:
        if not events:
            return
        cats, names, pids, tids, ts, dur, args = zip(*map(astuple, events), strict=True)
        category = np.fromiter(map(self.categories.__getitem__, cats), np.int8, len(cats))
        name_id = np.fromiter(map(self._names.__getitem__, names), np.int32, len(names))
        lane = self._integers(tids)
        device, correlation = np.full(len(events), -1, dtype=np.int32), np.full(len(events), -1, dtype=np.int64)
        on_device = category > Category.HOST_LIMIT
        rows = np.flatnonzero(on_device | (category == Category.RUNTIME))
        if len(rows):
            device_args = _device_args([args[row] for row in rows.tolist()])
            correlation[rows] = self._correlations(device_args)
            if on_device.any():
                is_on_device = on_device[rows]
                device_args, rows = list(compress(device_args, is_on_device.tolist())), rows[is_on_device]
                device[rows] = self._devices(device_args, [pids[row] for row in rows.tolist()])
                stream = self._integers([item.stream for item in device_args])
                lane[rows] = np.where(stream >= 0, stream, lane[rows])
        if self._names.p2p or self._names.nodes:
            rows = np.flatnonzero(np.isin(name_id, self._names.p2p + self._names.nodes))
            correlation[rows] = self._sequences([args[row] for row in rows.tolist()])
        self._note_comms(names, name_id, args)
        batch: tuple[npt.NDArray[Any], ...] = (
            category,
            name_id,
            nanoseconds(ts),
            nanoseconds(dur),
            device,
            lane,
            correlation,
        )
        for column, values in zip(self._columns, batch, strict=True):
            column.extend(values)
        self.num_rows += len(events)

    def extend(self, other: Columns) -> None:
        """Move in the rows of another one, which is empty afterwards."""
        recode = np.fromiter(map(self._names.__getitem__, other._names), np.int32, len(other._names))
        for index, (column, other_column) in enumerate(zip(self._columns, other._columns, strict=True)):
            values = other_column.take()
            column.extend(recode[values] if index == _NAME else values)
        self.comm_rows += [replace(row, row=self.num_rows + row.row) for row in other.comm_rows]
        self.categories.unknown |= other.categories.unknown
        self.num_rows += other.num_rows
        other.comm_rows.clear()
        other.num_rows = 0

    def _correlations(self, args: Sequence[DeviceArgs]) -> Int64:
        values = self._integers([item.correlation for item in args])
        return np.where((values <= 0) | (values == _UINT32_NONE), -1, values)

    def _sequences(self, args: Sequence[Raw]) -> Int64:
        """Sequence numbers of autograd's nodes; for a message that of the next node created on its thread."""
        values = self._integers([item.sequence for item in _node_args(args)]) if args else np.empty(0, dtype=np.int64)
        return np.where(values < 0, -1, values)

    def _devices(self, args: Sequence[DeviceArgs], pids: Sequence[Scalar]) -> Int64:
        """The device in the arguments, else the pid, which is the device number in Kineto's device events."""
        devices = self._integers([item.device for item in args])
        values = devices if devices.min() >= 0 else np.where(devices >= 0, devices, self._integers(pids))
        return np.where((values >= 0) & (values <= np.iinfo(np.int32).max), values, -1)

    def _note_comms(self, names: Sequence[str | None], name_id: Int32, args: Sequence[Raw]) -> None:
        rows = _rows_with(_COMM_KEY, args)
        if self._names.p2p or self._names.shaped:
            rows |= set(np.flatnonzero(np.isin(name_id, self._names.p2p + self._names.shaped)).tolist())
        for row in sorted(rows):
            decoded = args_of(Args, bytes(args[row]))
            if names[row] not in SHAPED:
                decoded = structs_replace(decoded, dims=ABSENT, types=ABSENT)
            comm = self._interned_args(decoded)
            if comm.collective or comm.group_id or names[row] in _P2P_OPS or (comm.dims and comm.types):
                self.comm_rows.append(CommRow(self.num_rows + row, names[row] or "", comm))

    def _interned_args(self, args: Args) -> Args:
        """Intern the texts of arguments, so that none is a view that keeps its event's text in memory."""
        values = (bytes(value) for value in astuple(args))
        return Args(*(self._interned.get(value) or self._interned.setdefault(value, Raw(value)) for value in values))

    def take(self, column: int) -> npt.NDArray[Any]:
        """Move out a column (:class:`pptrace.ingest.common.sort_events.Columns`); it is empty afterwards."""
        return self._columns[column].take()

    def names(self) -> list[str]:
        return [name or "" for name in self._names]


def _device_args(texts: Sequence[Raw]) -> list[DeviceArgs]:
    """Decode the arguments of each event, all at once if they are well-formed."""
    decoded = _at_once(DEVICE_ARGS_DECODER, texts) or [args_of(DeviceArgs, bytes(text)) for text in texts]
    return [item or NO_DEVICE_ARGS for item in decoded] if None in decoded else decoded


def _node_args(texts: Sequence[Raw]) -> list[NodeArgs]:
    decoded = _at_once(NODE_ARGS_DECODER, texts) or [args_of(NodeArgs, bytes(text)) for text in texts]
    return [item or NO_NODE_ARGS for item in decoded] if None in decoded else decoded


def _at_once(decoder: msgspec.json.Decoder[list[Any]], texts: Sequence[Raw]) -> list[Any]:
    """Decode texts as one list; [] if some are malformed."""
    try:
        decoded = decoder.decode(b"".join((b"[", b",".join(texts), b"]")))
    except DECODE_ERRORS:
        return []
    return decoded if len(decoded) == len(texts) else []


def _rows_with(key: bytes, texts: Sequence[Raw]) -> set[int]:
    """Indices of the texts that contain the key."""
    joined = b"".join(texts)
    position = joined.find(key)
    if position < 0:
        return set()
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    rows = set()
    while position >= 0:
        row = int(np.searchsorted(ends, position, side="right"))
        rows.add(row)
        position = joined.find(key, int(ends[row]))
    return rows
