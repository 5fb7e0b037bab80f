"""Accumulate batches of the events of a Kineto file as columns; parts of a file can be accumulated separately and joined.

Columns are growing numpy arrays, so that no event object outlives its batch.

Floating-point operations of torch's operators follow from the shapes of their inputs (``record_shapes``, ``with_flops``): matrix
products, convolutions and attention are counted, as :mod:`torch.utils.flop_counter` does: 2 · m · n · k of a product, the full
square of an attention, whatever its mask. Kineto's files do not have the counts of ``with_flops`` themselves.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Raw, Struct, field
from msgspec.structs import astuple, replace

from pptrace.ingest.common.codes import CategoryCodes, Codes
from pptrace.ingest.common.json_texts import Integers, Scalar, nanoseconds
from pptrace.ingest.common.sort_events import EventColumns
from pptrace.ingest.kineto.comm_args import PEER_INPUT, SHAPED, CommRow
from pptrace.ingest.kineto.event_types import (
    ABSENT,
    Args,
    Begin,
    CallArgs,
    Complete,
    Event,
    Instant,
    Metadata,
    Skipped,
    memory_columns,
    text_of,
    value_of,
)
from pptrace.ingest.kineto.salvage import args_of, args_of_each
from pptrace.model.tables import Int32, Int64
from pptrace.model.traces import Category

Shape = Sequence[int]
UNKNOWN = -1
"""FLOPs of an operator whose shapes were not recorded, or are not those that it takes."""


class ShapeArgs(Struct, frozen=True, gc=False):
    """The ``args`` used of operators whose FLOPs are counted."""

    dims: Raw = field(default=ABSENT, name="Input Dims")
    inputs: Raw = field(default=ABSENT, name="Concrete Inputs")


def flops_of(name: str, args: ShapeArgs) -> int:
    """The FLOPs of an operator of :data:`COUNTED`; :data:`UNKNOWN` where its shapes do not tell."""
    dims, inputs = value_of(args.dims), value_of(args.inputs)
    try:
        counted = COUNTED[name](dims, inputs)
    except (TypeError, ValueError, IndexError, KeyError):
        return UNKNOWN
    return counted if isinstance(counted, int) and 0 <= counted < 2**62 else UNKNOWN


def _product(first: Shape, second: Shape) -> int:
    """FLOPs of a product of matrices, or of as many of them as both have."""
    if not first or not second or first[-1] != second[max(len(second) - 2, 0)]:
        raise ValueError
    return 2 * prod(first) * (second[-1] if len(second) > 1 else 1)


def _attention(dims: Sequence[Shape], products_by_key: int, products_by_value: int) -> int:
    query, key, value = dims
    batch, heads, length, width = query
    _, _, key_length, value_width = value
    if key[2] != key_length:
        raise ValueError
    return 2 * batch * heads * length * key_length * (products_by_key * width + products_by_value * value_width)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in json.loads(text)]


def _convolution(dims: Sequence[Shape], inputs: Sequence[str]) -> int:
    """A product for each place of the output, of a transposed one of the input."""
    (batch, _, *sizes), (_, _, *kernel) = dims[:2]
    if inputs[6] != "True":
        strides, paddings, dilations = map(_numbers, inputs[3:6])
        steps = zip(sizes, kernel, strides, paddings, dilations, strict=True)
        sizes = [
            (size + 2 * pad - dilation * (width - 1) - 1) // step + 1 for size, width, step, pad, dilation in steps
        ]
    return 2 * batch * prod(sizes) * prod(dims[1])


def _convolution_backward(dims: Sequence[Shape], inputs: Sequence[str]) -> int:
    """FLOPs of a backward: as many as the forward's for the gradient of the input, and for that of the weights."""
    output, source, weight = dims[:3]
    places = source if inputs[7] == "True" else output
    num_gradients = sum(bool(flag) for flag in json.loads(inputs[10].lower())[:2])
    num_places = places[0] * prod(places[2:])
    return 2 * num_gradients * num_places * prod(weight)


def _names(text: str) -> list[str]:
    return [f"aten::{name}" for name in text.split()]


Count = Callable[[Sequence[Shape], Sequence[str]], int]
_FORWARDS = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)
COUNTED: Mapping[str, Count] = {
    **dict.fromkeys(_names("mm bmm mv _int_mm _scaled_mm"), lambda dims, _: _product(*dims[:2])),
    **dict.fromkeys(
        _names("addmm addmm_ baddbmm baddbmm_ addmv addmv_ _addmm_activation"), lambda dims, _: _product(*dims[1:3])
    ),
    **{f"aten::_scaled_dot_product_{kind}": lambda dims, _: _attention(dims[:3], 1, 1) for kind in _FORWARDS},
    **{f"aten::_scaled_dot_product_{kind}_backward": lambda dims, _: _attention(dims[1:4], 3, 2) for kind in _FORWARDS},
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
}
"""Counters of the FLOPs of each operator, from the shapes of its inputs and their values."""


_FIRST_ROWS = 4096
_UINT32_NONE = 2**32 - 1
_NODE = "autograd::engine::evaluate_function: "
_MTIA = "mtia_ccp_events"
_OF_MTIA = {
    "dma_request": Category.MEMCPY,
    "event_wait": Category.DEVICE_SYNC,
    "event_record": Category.DEVICE_SYNC,
}
"""Category by name of those events of MTIA's command processors that are no kernels."""
_RANGES = ("ProfilerStep#", "Optimizer.step#", "Optimizer.zero_grad#", "enumerate(DataLoader)#")
"""Beginnings of names of torch's own ranges begin: older versions write them as operators."""
_DTYPES = (np.int8, np.int32, np.int64, np.int64, np.int32, np.int64, np.int64)
"""Types of the columns of :class:`~pptrace.ingest.common.sort_events.EventColumns`, in their order."""
_NAME = 1
_COMM_KEY = b'"Collective name"'
_LABELS = frozenset({"process_name", "process_labels"})
_MAX_LABELS = 10_000  # per file or worker


class _NameCodes(Codes):
    """Codes of names; ``p2p`` collects those of c10d's sends and receives, ``shaped`` those of communication whose shapes tell
    its size, ``nodes`` those of autograd's nodes, ``counted`` those of operators whose FLOPs are counted, ``ranges`` those of
    ranges, whatever their category.
    """

    def __init__(self) -> None:
        super().__init__()
        self.p2p: list[int] = []
        self.shaped: list[int] = []
        self.nodes: list[int] = []
        self.counted: list[int] = []
        self.ranges: list[int] = []
        self.of_mtia: dict[int, Category] = {}

    def __missing__(self, name: str | None) -> int:
        code = super().__missing__(name)
        if name in PEER_INPUT:
            self.p2p.append(code)
        elif name in SHAPED:
            self.shaped.append(code)
        elif name is not None and name.startswith(_NODE):
            self.nodes.append(code)
        elif name in COUNTED:
            self.counted.append(code)
        elif name is not None and name.startswith(_RANGES):
            self.ranges.append(code)
        elif name in _OF_MTIA:
            self.of_mtia[code] = _OF_MTIA[name]
        return code

    def mark(self, codes: Int32, chosen: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Mark those of some codes that are among the chosen ones."""
        is_chosen = np.zeros(len(self), dtype=np.bool_)
        is_chosen[np.asarray(chosen, dtype=np.intp)] = True
        return is_chosen[codes]


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

    @property
    def values(self) -> npt.NDArray[Any]:
        return self._values[: self._length]

    def take(self) -> npt.NDArray[Any]:
        values = self.values
        self._values, self._length = self._values[:0].copy(), 0
        return values

    def __getstate__(self) -> npt.NDArray[Any]:
        """Pickle the used part only."""
        return self.values

    def __setstate__(self, values: npt.NDArray[Any]) -> None:
        self._values, self._length = values, len(values)


class Collected(Struct):
    """The complete events so far, unsorted, with times as in the file; memory instants, and the labels of processes.

    ``flops`` are parts of the column of :class:`~pptrace.model.traces.Events`, by row in the file. ``hosts`` counts the
    operators of each process: of one, but for a file into which several ranks were merged.
    """

    names: _NameCodes = field(default_factory=_NameCodes)
    categories: CategoryCodes = field(default_factory=CategoryCodes)
    comm_rows: list[CommRow] = field(default_factory=list)
    memory: list[Int64] = field(default_factory=list)
    flops: list[Int64] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)
    hosts: Counter[Scalar] = field(default_factory=Counter)
    num_rows: int = 0
    num_begin: int = 0
    num_events: int = 0
    _integers: Integers = field(default_factory=Integers)
    _interned: dict[bytes, Raw] = field(default_factory=dict)  # of communication arguments, which repeat
    _counted: dict[tuple[str, bytes, bytes], int] = field(default_factory=dict)  # FLOPs by name and shapes
    _columns: tuple[_GrowingArray, ...] = field(
        default_factory=lambda: tuple(_GrowingArray(dtype) for dtype in _DTYPES)
    )

    def add(self, events: Sequence[Event]) -> None:
        self.num_events += len(events)
        if complete := [event for event in events if type(event) is Complete]:
            self._add_complete(complete)
        if len(complete) == len(events):
            return
        others = [event for event in events if type(event) is not Complete and type(event) is not Skipped]
        if instants := [event for event in others if isinstance(event, Instant)]:
            self.memory.append(memory_columns(instants))
        self.num_begin += sum(isinstance(event, Begin) for event in others)
        for event in others:
            if isinstance(event, Metadata) and event.name in _LABELS and event.args and len(self.labels) < _MAX_LABELS:
                self.labels.add(text_of(event.args.name) or text_of(event.args.labels))

    def extend(self, other: Collected) -> None:
        """Move in the events of other batches of the same file, which ``other`` no longer has afterwards."""
        recode = self.names.of(other.names)
        for index, (column, other_column) in enumerate(zip(self._columns, other._columns, strict=True)):
            values = other_column.take()
            column.extend(recode[values] if index == _NAME else values)
        self.comm_rows += [(self.num_rows + row, name, args) for row, name, args in other.comm_rows]
        self.categories.unknown |= other.categories.unknown
        self.memory += other.memory
        self.flops += [part + np.array([[self.num_rows], [0]]) for part in other.flops]
        self.labels |= other.labels
        self.hosts += other.hosts
        self.num_rows += other.num_rows
        self.num_begin += other.num_begin
        self.num_events += other.num_events

    @property
    def has_work(self) -> bool:
        """Return whether operators or a device's work are among the events."""
        category = self.columns.category
        return bool(((category == Category.CPU_OP) | (category > Category.HOST_LIMIT)).any())

    @property
    def columns(self) -> EventColumns:
        """Views of the columns of the complete events."""
        return EventColumns(*(column.values for column in self._columns))

    def take(self) -> EventColumns:
        """Move out the columns of the complete events."""
        return EventColumns(*(column.take() for column in self._columns))

    def _add_complete(self, events: Sequence[Complete]) -> None:
        cats, names, pids, tids, ts, dur, args = zip(*map(astuple, events), strict=True)
        category = np.fromiter(map(self.categories.__getitem__, cats), np.int8, len(cats))
        name_id = self.names.of(names)
        self.hosts.update(compress(pids, (category == Category.CPU_OP).tolist()))
        if self.names.ranges:
            category[(category == Category.CPU_OP) & self.names.mark(name_id, self.names.ranges)] = Category.ANNOTATION
        for code, of_mtia in self.names.of_mtia.items():
            named = np.flatnonzero((category == Category.KERNEL) & (name_id == code))
            category[[row for row in named.tolist() if cats[row] == _MTIA]] = of_mtia
        lane = self._integers(tids)
        device, correlation = np.full(len(events), -1, dtype=np.int32), np.full(len(events), -1, dtype=np.int64)
        on_device = category > Category.HOST_LIMIT
        rows = np.flatnonzero(on_device | (category == Category.RUNTIME))
        if len(rows):
            device_args = args_of_each(CallArgs, [args[row] for row in rows.tolist()])
            numbers = self._integers([item.correlation for item in device_args])
            correlation[rows] = np.where((numbers <= 0) | (numbers == _UINT32_NONE), -1, numbers)
            if on_device.any():
                is_on_device = on_device[rows]
                device_args, rows = list(compress(device_args, is_on_device.tolist())), rows[is_on_device]
                devices = self._integers([item.device for item in device_args])
                if devices.min() < 0:  # the pid is the device's number in Kineto's device events
                    pids_of_rows = self._integers([pids[row] for row in rows.tolist()])
                    devices = np.where(devices >= 0, devices, pids_of_rows)
                device[rows] = np.where((devices >= 0) & (devices <= np.iinfo(np.int32).max), devices, -1)
                stream = self._integers([item.stream for item in device_args])
                lane[rows] = np.where(stream >= 0, stream, lane[rows])
        has_number = (category == Category.CPU_OP) | self.names.mark(name_id, self.names.p2p + self.names.nodes)
        if has_number.any():
            rows = np.flatnonzero(has_number)
            correlation[rows] = _sequence_numbers([args[row] for row in rows.tolist()])
        if (rows := np.flatnonzero(self.names.mark(name_id, self.names.counted))).size:
            self._add_flops(rows, [names[row] or "" for row in rows], [args[row] for row in rows])
        comms = _rows_with(_COMM_KEY, args)
        if self.names.p2p or self.names.shaped:
            comms |= set(np.flatnonzero(self.names.mark(name_id, self.names.p2p + self.names.shaped)).tolist())
        for row in sorted(comms):
            self._add_comm(self.num_rows + row, names[row] or "", args[row])
        times = nanoseconds(ts), nanoseconds(dur)
        columns: tuple[npt.NDArray[Any], ...] = (category, name_id, *times, device, lane, correlation)
        for column, values in zip(self._columns, columns, strict=True):
            column.extend(values)
        self.num_rows += len(events)

    def _add_flops(self, rows: npt.NDArray[np.intp], names: Sequence[str], texts: Sequence[Raw]) -> None:
        """Count the FLOPs of operators whose shapes were recorded."""
        found = []
        for row, name, args in zip(rows.tolist(), names, args_of_each(ShapeArgs, texts), strict=True):
            key = (name, bytes(args.dims), bytes(args.inputs))
            if args.dims and key not in self._counted:
                self._counted[key] = flops_of(name, args)
            found += [(self.num_rows + row, self._counted[key])] if args.dims else []
        if found:
            self.flops.append(np.array(found, dtype=np.int64).T)

    def _add_comm(self, row: int, name: str, text: Raw) -> None:
        """Add a communication event; texts are interned, so that none is a view that keeps its event's text in memory."""
        args = args_of(Args, bytes(text))
        if name not in SHAPED:
            args = replace(args, dims=ABSENT, types=ABSENT)
        if args.collective or args.group_id or name in PEER_INPUT or (args.dims and args.types):
            values = (bytes(value) for value in astuple(args))
            interned = (self._interned.get(value) or self._interned.setdefault(value, Raw(value)) for value in values)
            self.comm_rows.append((row, name, Args(*interned)))


_SEQUENCE = re.compile(rb'"Sequence number"\s*:\s*"?(\d{1,18})')


def _sequence_numbers(texts: Sequence[Raw]) -> Int64:
    """The sequence number in each text, -1 where there is none; most have none, and are not decoded."""
    found = [(match.start(), int(match[1])) for match in _SEQUENCE.finditer(b"".join(texts))]
    numbers = np.full(len(texts), -1, dtype=np.int64)
    if found:
        position, number = np.array(found, dtype=np.int64).T
        numbers[np.searchsorted(np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts))), position, "right")] = (
            number
        )
    return numbers


def _rows_with(key: bytes, texts: Sequence[Raw]) -> set[int]:
    """Indices of the texts that contain the key."""
    joined = b"".join(texts)
    position = joined.find(key)
    rows: set[int] = set()
    if position < 0:
        return rows
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    while position >= 0:
        row = int(np.searchsorted(ends, position, side="right"))
        rows.add(row)
        position = joined.find(key, int(ends[row]))
    return rows
