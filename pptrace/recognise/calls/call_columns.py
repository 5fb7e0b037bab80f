"""Communication calls of a rank as columns, and how nested host events join to calls: by their order alone, times and arguments
are filled in where the nesting occurs.

One communication shows on its thread as an operator, the record of it with its arguments, and the range of the process group's
work or of the library, each inside the one before it where all are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct, field

from pptrace.marks import P2P
from pptrace.model.tables import Int64, as_category, category_of_codes
from pptrace.recognise.device.work import KINDS, kind_of
from pptrace.slices import Slice

CODE_OF_KIND: Mapping[str, int] = {kind: code for code, kind in enumerate(KINDS)}
"""The codes of the kinds of calls; 0 is none."""
HINTS = ("", "ep", "tp")
"""The axes that a library may serve, by their codes."""

COLUMNS: Mapping[str, tuple[str, int]] = {
    "kind": ("int8", 0),  # index into KINDS
    "thread": ("int64", -1),
    "start_ns": ("int64", 0),
    "until_ns": ("int64", 0),  # where the host call returned
    "end_ns": ("int64", -1),  # where the communication was done, as far as an event of the host shows that
    "local_peer": ("int64", -1),
    "args": ("int64", -1),  # row of the table of communication arguments
    "shapes": ("int64", -1),  # row of the same with its recorded shapes and splits
    "elements": ("int64", -1),  # of its input, as recorded shapes tell them
    "num_bytes": ("int64", -1),  # of its message, as recorded shapes tell them
    "worker": ("int64", -1),  # thread that ran its work, where that is sure
    "hint": ("int8", 0),  # index into HINTS
    "of_library": ("bool", 0),  # known by NCCL's own range alone, which does not say what it is part of
    "on_worker": ("bool", 0),  # the range of a work without the call that posted it
    "is_enqueued": ("bool", 0),  # a device does it later: no worker thread runs it
    "in_parts": ("bool", 0),  # several works may do it
    "is_functional": ("bool", 0),
    "kernel": ("int64", -1),  # the first of its kernels and copies, as an event
    "kernel_start_ns": ("int64", 0),  # when the first of them begins, and the last ends
    "kernel_end_ns": ("int64", 0),
}
"""The columns of calls, their types, and the values where nothing is known: *calls* in this folder are slices of them."""


def make_calls(num_calls: int, columns: Mapping[str, npt.NDArray[Any]]) -> Slice:
    """Make so many calls with some columns; the others hold what stands for unknown."""
    made = {
        name: np.asarray(columns[name], dtype=dtype) if name in columns else np.full(num_calls, unknown, dtype=dtype)
        for name, (dtype, unknown) in COLUMNS.items()
    }
    return Slice(made)


class CommArgs:
    """The communication arguments of a rank's events (schema ``COMM_ARGS``) by event; the last row of an event counts."""

    def __init__(self, table: pd.DataFrame) -> None:
        self._table = table
        event = table["event"].to_numpy()
        self._order = np.argsort(event, kind="stable")
        self._events = event[self._order]
        self._codes: dict[str, tuple[Int64, Sequence[str]]] = {}

    def rows_of(self, events: npt.NDArray[np.integer[Any]]) -> Int64:
        """The row of each of these events, −1 where it has none."""
        index = np.searchsorted(self._events, events, side="right") - 1
        is_known = np.append(self._events, -1)[index] == events
        rows: Int64 = np.where(is_known, np.append(self._order, -1)[index], -1)
        return rows

    def numbers(self, name: str, rows: Int64) -> Int64:
        """A column of numbers in some rows; −1 for the row −1."""
        values: Int64 = np.append(self._table[name].to_numpy(), -1).astype(np.int64)[rows]
        return values

    def texts(self, name: str, rows: Int64) -> pd.Categorical[Any]:
        """A column of texts in some rows; "" for the row −1."""
        codes, texts = self.codes(name)
        return category_of_codes(codes[rows], texts)

    def kinds(self, rows: Int64) -> Int64:
        """The code of the kind that the arguments in some rows name, 0 without one."""
        codes, texts = self.codes("collective")
        return np.array([CODE_OF_KIND[kind_of(text)] for text in texts], dtype=np.int64)[codes[rows]]

    def message_bytes(self, rows: Int64) -> Int64:
        """Bytes of the larger of input and output; −1 where they were not recorded."""
        return np.maximum(self.numbers("in_bytes", rows), self.numbers("out_bytes", rows))

    def codes(self, name: str) -> tuple[Int64, Sequence[str]]:
        """(for each row, and for the row −1 at the end, an index into the texts; the texts) of a column of texts."""
        if name not in self._codes:
            column = self._table[name].array
            column = column if isinstance(column, pd.Categorical) else as_category(self._table[name])
            texts = [*map(str, column.categories), ""]
            self._codes[name] = np.append(column.codes.astype(np.int64), len(texts) - 1), texts
        return self._codes[name]


class Role(IntEnum):
    """Role of a host event in a communication, by how much it records."""

    NONE = 0
    WORK = 1  # the range of a process group's Work object
    LIBRARY = 2  # NCCL's own NVTX range
    OPERATOR = 3  # the dispatcher's operator
    RECORD = 4  # record_param_comms, with arguments


LASTING_ROLES = (Role.LIBRARY, Role.OPERATOR, Role.RECORD)
"""Events of which others that begin while one lasts may be a part."""


class RangeName(Struct, frozen=True):
    """Facts that the name of an event tells; of a record the kind is that of its arguments."""

    role: Role
    kind: str = ""
    ends_with_work: bool = False  # the range ends when the communication is done, not when the call returns
    in_parts: bool = False
    is_functional: bool = False
    is_other_call: bool = False  # a record whose arguments name no communication, such as a wait's


Nesting = tuple[Slice, Mapping[str, tuple[Int64, Int64]], Int64]
"""(calls, sources, operators): the calls that some nested events are, as indices of these events.

Of the calls, ``start`` and ``until`` are the events of which each has its beginning and the return of its host call, ``record``
the one with its arguments (−1: none), ``at`` the one by which it is known; the other columns are what nesting and names tell
alone (``COLUMNS``, and ``is_operator``: known by its operator alone). The sources are pairs of calls and events, in the order
in which they count: of ``ends``, ``peers`` and ``sizes``. The operators are the outermost ones.
"""


class _Call(Struct):
    """A communication while its events are being gathered, by their indices."""

    kind: str
    start: int
    until: int
    at: int
    record: int = -1
    ends: list[int] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    of_library: bool = False
    on_worker: bool = False
    is_enqueued: bool = False
    in_parts: bool = False
    is_functional: bool = False
    is_operator: bool = False


EVENTS_OF_CALL = ("start", "until", "record", "at")
_FLAGS = ("of_library", "on_worker", "is_enqueued", "in_parts", "is_functional", "is_operator")


def join_nested(names: Sequence[RangeName], starts_ns: Sequence[int], ends_ns: Sequence[int]) -> Nesting:
    """Join the events of one thread, given in order of their starts, to calls."""
    gatherer = _Gatherer(names, starts_ns, ends_ns)
    for event in range(len(names)):
        gatherer.add(event)
    calls = gatherer.done()
    columns = {name: [int(getattr(call, name)) for call in calls] for name in (*EVENTS_OF_CALL, *_FLAGS)}
    columns["kind"] = [CODE_OF_KIND[call.kind] for call in calls]
    sources = {}
    for source in ("ends", "peers", "sizes"):
        pairs = [(number, event) for number, call in enumerate(calls) for event in getattr(call, source)]
        of_call, events = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        sources[source] = (of_call, events)
    table = Slice({name: np.array(values, dtype=np.int64) for name, values in columns.items()})
    return table, sources, np.array(gatherer.operators, dtype=np.int64)


class _Gatherer:
    """Joins nested events, by what their names tell and which of them begin while others last."""

    def __init__(self, names: Sequence[RangeName], starts_ns: Sequence[int], ends_ns: Sequence[int]) -> None:
        self._names, self._starts_ns, self._ends_ns = names, starts_ns, ends_ns
        self._calls: list[_Call] = []
        self._operator: _Call | None = None  # the outermost operator, which holds the calls since it began
        self._used = False  # whether one of them was found
        self._record: _Call | None = None
        self.operators: list[int] = []

    def add(self, event: int) -> None:
        role = self._names[event].role
        if role is Role.OPERATOR:
            self._add_operator(event)
        elif role is Role.RECORD:
            self._add_record(event)
        else:
            self._add_range(event)

    def done(self) -> list[_Call]:
        self._close_operator()
        return [call for call in self._calls if call.kind]

    def _inside(self, call: _Call | None, event: int) -> bool:
        if call is None:
            return False
        return self._starts_ns[event] < max(self._ends_ns[call.until], self._starts_ns[call.start] + 1)

    def _add_operator(self, event: int) -> None:
        name = self._names[event]
        if self._inside(self._operator, event) or self._inside(self._record, event):
            if self._operator is not None and self._inside(self._operator, event) and self._operator.kind == name.kind:
                self._operator.sizes.append(event)  # a functional one's, whose own may be less
            return  # a barrier's all-reduce is the barrier
        self._close_operator()
        self.operators.append(event)
        self._operator = _Call(name.kind, event, event, event, peers=[event], sizes=[event], is_operator=True)
        self._operator.ends += [event] * name.ends_with_work
        self._operator.in_parts, self._operator.is_functional = name.in_parts, name.is_functional
        self._used = False

    def _close_operator(self) -> None:
        if self._operator is not None and not self._used:
            self._calls.append(self._operator)
        self._operator = None

    def _add_record(self, event: int) -> None:
        name = self._names[event]
        if name.is_other_call or self._inside(self._record, event):
            return  # a wait, or part of another
        call = _Call(name.kind, event, event, event, record=event)
        if self._inside(self._operator, event):
            assert self._operator is not None
            call.kind = name.kind or self._operator.kind
            call.peers = list(self._operator.peers)
            if not self._used:
                call.start, call.sizes = self._operator.start, list(self._operator.sizes)
            self._used = True
        self._calls.append(call)
        self._record = call

    def _add_range(self, event: int) -> None:
        name = self._names[event]
        call = self._record if self._inside(self._record, event) else None
        if call is not None and {call.kind, name.kind} == set(P2P):
            call = None  # posted in the same instant
        if call is None and self._inside(self._operator, event):
            call = self._operator
        if call is None:
            call = _Call(name.kind, event, event, event)
            call.on_worker = name.ends_with_work
            call.of_library = name.role is Role.LIBRARY
            self._calls.append(call)
            if call.of_library:
                self._record = call
        call.kind = call.kind or name.kind
        if name.role is Role.LIBRARY:
            call.record = event  # where the profiler of its caller records no arguments, it alone has them
        if call.kind == name.kind:
            call.sizes.append(event)
        call.peers.append(event)
        if name.ends_with_work:
            call.ends.append(event)
        else:
            call.is_enqueued = True
