"""Communication calls from nested host events, by their order alone: times and arguments are filled in where it occurs.

One communication shows on its thread as an operator, the record of it with its arguments, and the range of the process group's
work or of the library, each inside the one before it where all are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from pptrace.marks import P2P
from pptrace.model.tables import Int64
from pptrace.recognise.calls.call_columns import CODE_OF_KIND
from pptrace.slices import Slice


class Role(IntEnum):
    """Role of a host event in a communication, by how much it records."""

    NONE = 0
    WORK = 1  # the range of a process group's Work object
    LIBRARY = 2  # NCCL's own NVTX range
    OPERATOR = 3  # the dispatcher's operator
    RECORD = 4  # record_param_comms, with arguments


LASTING_ROLES = (Role.LIBRARY, Role.OPERATOR, Role.RECORD)
"""Events of which others that begin while one lasts may be a part."""


@dataclass(frozen=True, slots=True)
class RangeName:
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


@dataclass(slots=True)
class _Call:
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
                call.start = self._operator.start
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
        if call.kind == name.kind:
            call.sizes.append(event)
        call.peers.append(event)
        if name.ends_with_work:
            call.ends.append(event)
        else:
            call.is_enqueued = True
