"""Host calls of communication: nested events of one thread joined to calls, and each call to the work that it posted.

    calling thread   c10d::allreduce_ ⊃ record_param_comms ⊃ nccl:all_reduce        posting: returns at once
    worker thread    gloo:all_reduce                                                the work: ends when it is done

gloo and MPI run a collective on threads of the process group's own, which take what was posted in its order. A message of gloo's
has its range on the calling thread, until somebody waits for it. No operator lasts until what it posts is done but a monitored
barrier, which waits inside.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from pptrace.marks import P2P
from pptrace.model.tables import Category, Events
from pptrace.recognise.device.communication_names import kind_of

_WORK = re.compile(
    r"(?P<backend>nccl|gloo|hccl|ucc|xccl|mpi|rccl):(?P<what>\S+)(?: (?P<own>\d+)(?:->|<-)(?P<peer>\d+))?", re.ASCII
)
_OPERATOR = re.compile(r"_?c10d(?P<functional>_functional)?::(?P<what>\w+)", re.ASCII)
_LIBRARY = re.compile(r"p?nccl(?P<what>[A-Z]\w+)", re.ASCII)
_LASTING = frozenset({"gloo", "mpi"})
"""Backends whose ranges end with the work; those of the others when it is enqueued."""
_BLOCKING = "monitoredbarrier"
_ONE_TENSOR = re.compile("_base_?$|_tensor$")
"""Operators of one tensor, which one work does."""


class _Role(IntEnum):
    """Role of a host event in a communication, by how much it records."""

    NONE = 0
    WORK = 1  # the range of a process group's Work object
    LIBRARY = 2  # NCCL's own NVTX range
    OPERATOR = 3  # the dispatcher's operator
    RECORD = 4  # record_param_comms, with arguments


@dataclass(frozen=True, slots=True)
class _Name:
    role: _Role
    kind: str = ""
    local_peer: int = -1
    ends_with_work: bool = False  # the range ends when the communication is done, not when the call returns
    in_parts: bool = False
    is_functional: bool = False


_NOT_COMMUNICATION = _Name(_Role.NONE)


@dataclass(slots=True)
class HostCall:
    """A communication while its events are being gathered.

    ``until_ns`` is where its host call returned, ``end_ns`` where it was done, -1 where no event of the host's shows that.
    ``elements`` are those of its input and ``num_bytes`` its message, as recorded shapes tell them, else -1.
    ``on_worker`` is the range of a work without the call that posted it; ``worker`` the thread that ran a call's work, -1 where
    none is known for sure. What ``is_enqueued`` a device does later: no worker thread runs it.
    """

    kind: str
    thread: int
    start_ns: int
    until_ns: int
    end_ns: int = -1
    local_peer: int = -1
    args: Mapping[str, Any] = field(default_factory=dict)
    kernels: list[int] = field(default_factory=list)
    hint: str = ""
    of_library: bool = False  # known by NCCL's own range alone, which does not say what it is part of
    on_worker: bool = False
    worker: int = -1
    is_enqueued: bool = False
    in_parts: bool = False  # several works may do it
    is_functional: bool = False
    is_unsure: bool = False  # another's work may be taken for this call's: groups begin theirs in any order
    elements: int = -1
    num_bytes: int = -1


def host_calls(events: Events, args: Mapping[int, Mapping[str, Any]]) -> list[HostCall]:
    """The calls of all threads; ``args`` are the communication arguments by event. Works are not joined yet."""
    names = [_read_name(name) for name in events.names]
    roles = np.array([name.role for name in names], dtype=np.int8)
    if not roles.any():
        return []
    on_host = (events.category == Category.CPU_OP) | (events.category == Category.ANNOTATION)
    rows = np.flatnonzero(on_host & (roles[events.name_id] > 0))
    gatherers: dict[int, _Gatherer] = {}
    columns = (rows, events.thread[rows], events.name_id[rows], events.start_ns[rows], events.ends_of(rows))
    for row, thread, name_id, start_ns, end_ns in zip(*(column.tolist() for column in columns), strict=True):
        gatherer = gatherers.get(thread)
        if gatherer is None:
            gatherer = gatherers[thread] = _Gatherer(thread)
        gatherer.add(names[name_id], start_ns, end_ns, args.get(row, {}))
    return [call for gatherer in gatherers.values() for call in gatherer.done()]


def _read_name(name: str) -> _Name:
    if name == "record_param_comms":
        return _Name(_Role.RECORD)
    if match := _OPERATOR.fullmatch(name):
        kind = kind_of(match["what"])
        blocks = match["what"].replace("_", "") == _BLOCKING
        in_parts = kind == "reduce_scatter" and not _ONE_TENSOR.search(match["what"])
        functional = match["functional"] is not None
        return _Name(_Role.OPERATOR, kind, -1, blocks, in_parts, functional) if kind else _NOT_COMMUNICATION
    if match := _WORK.fullmatch(name):
        kind = kind_of(match["what"])
        peer = int(match["peer"] or -1)
        return _Name(_Role.WORK, kind, peer, match["backend"] in _LASTING) if kind else _NOT_COMMUNICATION
    if match := _LIBRARY.fullmatch(name):
        kind = kind_of(match["what"])
        return _Name(_Role.LIBRARY, kind) if kind else _NOT_COMMUNICATION
    return _NOT_COMMUNICATION


class _Gatherer:
    """Joins the nested host events of one thread, given in order of their starts, to calls."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._calls: list[HostCall] = []
        self._operator: HostCall | None = None  # the outermost operator, which holds the calls since it began
        self._used = False  # whether one of them was found
        self._record: HostCall | None = None

    def add(self, name: _Name, start_ns: int, end_ns: int, args: Mapping[str, Any]) -> None:
        if name.role is _Role.OPERATOR:
            self._add_operator(name, start_ns, end_ns, args)
        elif name.role is _Role.RECORD:
            self._add_record(start_ns, end_ns, args)
        else:
            self._add_range(name, start_ns, end_ns, args)

    def done(self) -> list[HostCall]:
        self._close_operator()
        return [call for call in self._calls if call.kind]

    def _inside(self, call: HostCall | None, start_ns: int) -> bool:
        return call is not None and start_ns < max(call.until_ns, call.start_ns + 1)

    def _add_operator(self, name: _Name, start_ns: int, end_ns: int, args: Mapping[str, Any]) -> None:
        if self._inside(self._operator, start_ns) or self._inside(self._record, start_ns):
            if self._operator is not None and self._operator.kind == name.kind:
                _give_sizes(self._operator, args)  # a functional one's, whose own may be less
            return  # a barrier's all-reduce is the barrier
        self._close_operator()
        peer = max(args.get("src", -1), args.get("dst", -1))
        done_ns = end_ns if name.ends_with_work else -1
        self._operator = HostCall(name.kind, self._thread, start_ns, end_ns, done_ns, peer, in_parts=name.in_parts)
        self._operator.is_functional = name.is_functional
        _give_sizes(self._operator, args)
        self._used = False

    def _close_operator(self) -> None:
        if self._operator is not None and not self._used:
            self._calls.append(self._operator)
        self._operator = None

    def _add_record(self, start_ns: int, end_ns: int, args: Mapping[str, Any]) -> None:
        kind = kind_of(args.get("collective", ""))
        if (args and not kind) or self._inside(self._record, start_ns):
            return  # a wait, or part of another
        call = HostCall(kind, self._thread, start_ns, end_ns, args=args)
        if self._inside(self._operator, start_ns):
            assert self._operator is not None
            call.kind = kind or self._operator.kind
            call.local_peer = self._operator.local_peer
            if not self._used:
                call.start_ns = self._operator.start_ns
            self._used = True
        self._calls.append(call)
        self._record = call

    def _add_range(self, name: _Name, start_ns: int, end_ns: int, args: Mapping[str, Any]) -> None:
        call = self._record if self._inside(self._record, start_ns) else None
        if call is not None and {call.kind, name.kind} == {*P2P}:
            call = None  # posted in the same instant
        if call is None and self._inside(self._operator, start_ns):
            call = self._operator
        if call is None:
            call = HostCall(name.kind, self._thread, start_ns, end_ns, local_peer=name.local_peer)
            if name.ends_with_work:
                call.until_ns, call.on_worker = start_ns, True
            call.of_library = name.role is _Role.LIBRARY
            self._calls.append(call)
            if call.of_library:
                self._record = call
        call.kind = call.kind or name.kind
        if call.kind == name.kind:
            _give_sizes(call, args)
        if call.local_peer < 0:
            call.local_peer = name.local_peer
        if name.ends_with_work:
            call.end_ns = max(call.end_ns, end_ns)
        else:
            call.is_enqueued = True


def _give_sizes(call: HostCall, args: Mapping[str, Any]) -> None:
    """Fill in sizes from an event's recorded shapes."""
    if call.elements < 0:
        call.elements = int(args.get("in_elements", -1))
    if call.num_bytes < 0:
        call.num_bytes = message_bytes(args)


def message_bytes(args: Mapping[str, Any]) -> int:
    """Bytes of the larger of input and output; -1 if not recorded."""
    return max(int(args.get("in_bytes", -1)), int(args.get("out_bytes", -1)))


def with_works(calls: Sequence[HostCall]) -> list[HostCall]:
    """The calls, each once: one that posts a work has the work's end, and the range of the work is no call of its own.

    Works begin in the order in which they were posted. A list's reduce-scatter may be done by several all-reduces: what may be a
    further one of them as well as the next call's lengthens both, so that neither seems to end before it is done.
    """
    works = sorted((call for call in calls if call.on_worker), key=lambda call: call.start_ns)
    later = sorted((call for call in calls if _may_post(call)), key=lambda call: -call.start_ns) if works else []
    queue = _Queue(_sizes_by_elements(works))
    joined: set[int] = set()
    for work in works:
        while later and later[-1].start_ns <= work.start_ns:
            queue.posted.append(later.pop())
        owners = queue.owners_of(work)
        for call in owners:
            call.end_ns = max(call.end_ns, work.end_ns)
        if owners:
            joined.add(id(work))
    return [call for call in calls if id(call) not in joined]


def _may_post(call: HostCall) -> bool:
    """Return whether a worker thread may execute this call."""
    return not (call.on_worker or call.is_enqueued or call.kernels) and call.end_ns < 0


class _Queue:
    """Calls whose works have not begun, and those of which parts may still come; to be asked in order of the works' starts."""

    def __init__(self, sizes: Mapping[tuple[str, int], Collection[int]]) -> None:
        """``sizes`` as :func:`_sizes_by_elements` has them."""
        self._sizes = sizes
        self.posted: list[HostCall] = []
        self._open: list[HostCall] = []

    def owners_of(self, work: HostCall) -> list[HostCall]:
        """The calls that a work may be of: one, unless parts are under way."""
        able = [call for call in self.posted if _does(work, call)]
        new = able[0] if able else None
        if new is not None:
            for call in able:  # those left behind may be the one that this work is of
                call.is_unsure |= len(able) > 1
            if not new.is_unsure:
                new.worker = work.thread
            self._give_bytes(work, new)
            self.posted.remove(new)
            self._open = [call for call in self._open if call.end_ns > new.start_ns]  # the others were done
        owners = [call for call in self._open if _does(work, call)]
        if new is not None:
            if owners or new.in_parts:
                self._open.append(new)
            owners.append(new)
        return owners

    def _give_bytes(self, work: HostCall, call: HostCall) -> None:
        """Fill in the bytes of lists of tensors from their works, which alone have the type; it is uncertain where groups
        have calls at once.
        """
        is_same = work.kind == call.kind and work.elements == call.elements >= 0
        if call.num_bytes < 0 and is_same and (not call.is_unsure or len(self._sizes[work.kind, work.elements]) == 1):
            call.num_bytes = work.num_bytes


def _sizes_by_elements(works: Sequence[HostCall]) -> dict[tuple[str, int], set[int]]:
    """Bytes of works by kind and elements."""
    sizes: dict[tuple[str, int], set[int]] = {}
    for work in works:
        sizes.setdefault((work.kind, work.elements), set()).add(work.num_bytes)
    return sizes


def _does(work: HostCall, call: HostCall) -> bool:
    """Return whether a work may be all or part of a call: gloo all-reduces instead of scattering."""
    if work.kind == call.kind and min(work.elements, call.elements) >= 0:
        return work.elements == call.elements
    return work.kind == call.kind or (work.kind == "all_reduce" and call.kind == "reduce_scatter")
