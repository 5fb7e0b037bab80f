"""Communication of traces without pptrace's marks: what the host called, and the device work that each call launched.

One communication shows in up to five events, which count once:

    host      c10d::allreduce_ ⊃ record_param_comms ⊃ nccl:all_reduce (gloo: until the message is there), or NVTX ncclAllReduce
    device    ncclDevKernel_AllReduce…, launched inside any of them

Calls of a batch (``batch_isend_irecv``, coalescing managers) launch nothing themselves: the kernel that the thread launches
next carries them all. The range ``nccl:coalesced`` names no peer and may never end: it is not read, its kernel is. What a kernel
does whose call was not recorded, its own arguments or its name say.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import pandas as pd

from pptrace.recognise.call_threads import Backward, Busy
from pptrace.recognise.comm_names import hint_of_kernel, kind_of, kind_of_kernel
from pptrace.recognise.devices import communication_rows, launch_calls
from pptrace.tables import CALLS, Category, Events, make_table

_WORK = re.compile(
    r"(?:nccl|gloo|hccl|ucc|xccl|mpi|rccl):(?P<what>\S+)(?: (?P<own>\d+)(?:->|<-)(?P<peer>\d+))?", re.ASCII
)
_OPERATOR = re.compile(r"_?c10d(?:_functional)?::(?P<what>\w+)", re.ASCII)
_LIBRARY = re.compile(r"p?nccl(?P<what>[A-Z]\w+)", re.ASCII)
_P2P = frozenset({"send", "recv"})


class _Role(IntEnum):
    """What a host event's name is to a communication; in order of how much it knows."""

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
    lasts: bool = False  # the range ends when the message is there, not when the call returns


_OTHER_NAME = _Name(_Role.NONE)


@dataclass(slots=True)
class _Call:
    """A communication while its events are being gathered; ``until`` is where its host call returned."""

    kind: str
    thread: int
    start_ns: int
    until_ns: int
    work_end_ns: int = -1
    local_peer: int = -1
    args: Mapping[str, Any] = field(default_factory=dict)
    kernels: list[int] = field(default_factory=list)
    hint: str = ""
    of_library: bool = False  # told by NCCL's own range alone, which does not say what it is part of


def find_calls(events: Events) -> pd.DataFrame:
    """The communication of a rank (schema :data:`CALLS`), in order of the host's calls."""
    args = _arguments(events)
    calls = _host_calls(events, args)
    _give_kernels(events, calls, args)
    calls = [call for call in calls if call.kind]
    backward = Backward(events)
    if (events.category == Category.KERNEL).any():
        for call in calls:
            if not call.kernels and call.args.get("group_size") == 1:
                call.until_ns = call.work_end_ns = call.start_ns  # alone: nothing had to move
    busy = Busy(events, {call.thread for call in calls if call.work_end_ns > call.until_ns and not call.kernels})
    rows = [_row(call, events, backward, busy) for call in sorted(calls, key=lambda call: call.start_ns)]
    return make_table(CALLS, {name: [row[name] for row in rows] for name in CALLS})


def _arguments(events: Events) -> dict[int, dict[str, Any]]:
    """Communication arguments by event."""
    return {int(row["event"]): row for row in map(_texts_as_keys, events.comm_args.to_dict("records"))}


def _texts_as_keys(row: Mapping[Hashable, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in row.items()}


def _read_name(name: str) -> _Name:
    if name == "record_param_comms":
        return _Name(_Role.RECORD)
    if match := _OPERATOR.fullmatch(name):
        kind = kind_of(match["what"])
        return _Name(_Role.OPERATOR, kind) if kind else _OTHER_NAME
    if match := _WORK.fullmatch(name):
        kind = kind_of(match["what"])
        peer, lasts = int(match["peer"] or -1), name.startswith(("gloo:", "mpi:"))
        return _Name(_Role.WORK, kind, peer, lasts) if kind else _OTHER_NAME
    if match := _LIBRARY.fullmatch(name):
        kind = kind_of(match["what"])
        return _Name(_Role.LIBRARY, kind) if kind else _OTHER_NAME
    return _OTHER_NAME


def _host_calls(events: Events, args: Mapping[int, Mapping[str, Any]]) -> list[_Call]:
    names = [_read_name(name) for name in events.names]
    roles = np.array([name.role for name in names], dtype=np.int8)
    if not roles.any():
        return []
    on_host = (events.category == Category.CPU_OP) | (events.category == Category.ANNOTATION)
    rows = np.flatnonzero(on_host & (roles[events.name_id] > 0))
    gatherers: dict[int, _Gatherer] = {}
    for row, end_ns in zip(rows.tolist(), events.ends_of(rows).tolist(), strict=True):
        thread = int(events.thread[row])
        gatherer = gatherers.setdefault(thread, _Gatherer(thread))
        gatherer.add(names[events.name_id[row]], int(events.start_ns[row]), end_ns, args.get(row, {}))
    return [call for gatherer in gatherers.values() for call in gatherer.done()]


class _Gatherer:
    """Joins the nested host events of one thread, given in order of their starts, to calls."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._calls: list[_Call] = []
        self._operator: _Call | None = None  # the outermost operator, which holds the calls since it began
        self._used = False  # whether one of them was found
        self._record: _Call | None = None

    def add(self, name: _Name, start_ns: int, end_ns: int, args: Mapping[str, Any]) -> None:
        if name.role is _Role.OPERATOR:
            self._add_operator(name, start_ns, end_ns, args)
        elif name.role is _Role.RECORD:
            self._add_record(start_ns, end_ns, args)
        else:
            self._add_range(name, start_ns, end_ns)

    def done(self) -> list[_Call]:
        self._close_operator()
        return [call for call in self._calls if call.kind]

    def _inside(self, call: _Call | None, start_ns: int) -> bool:
        return call is not None and start_ns < max(call.until_ns, call.start_ns + 1)

    def _add_operator(self, name: _Name, start_ns: int, end_ns: int, args: Mapping[str, Any]) -> None:
        if self._inside(self._operator, start_ns) or self._inside(self._record, start_ns):
            return  # a barrier's all-reduce is the barrier
        self._close_operator()
        peer = max(args.get("src", -1), args.get("dst", -1))
        self._operator = _Call(name.kind, self._thread, start_ns, end_ns, local_peer=peer)
        self._used = False

    def _close_operator(self) -> None:
        if self._operator is not None and not self._used:
            self._calls.append(self._operator)
        self._operator = None

    def _add_record(self, start_ns: int, end_ns: int, args: Mapping[str, Any]) -> None:
        kind = kind_of(args.get("collective", ""))
        if (args and not kind) or self._inside(self._record, start_ns):
            return  # a wait, or part of another
        call = _Call(kind, self._thread, start_ns, end_ns, args=args)
        if self._inside(self._operator, start_ns):
            assert self._operator is not None
            call.kind = kind or self._operator.kind
            call.local_peer = self._operator.local_peer
            if not self._used:
                call.start_ns = self._operator.start_ns
            self._used = True
        self._calls.append(call)
        self._record = call

    def _add_range(self, name: _Name, start_ns: int, end_ns: int) -> None:
        call = self._record if self._inside(self._record, start_ns) else None
        if call is not None and {call.kind, name.kind} == _P2P:
            call = None  # posted in the same instant
        if call is None and self._inside(self._operator, start_ns):
            call = self._operator
        if call is None:
            work_end = end_ns if name.role is _Role.WORK else -1
            until = start_ns if name.lasts else end_ns
            call = _Call(name.kind, self._thread, start_ns, until, work_end, name.local_peer)
            self._calls.append(call)
            if name.role is _Role.LIBRARY:
                call.of_library = True
                self._record = call
            return
        call.kind = call.kind or name.kind
        if call.local_peer < 0:
            call.local_peer = name.local_peer
        if name.role is _Role.WORK:
            call.work_end_ns = max(call.work_end_ns, end_ns)


def _give_kernels(events: Events, calls: list[_Call], args: Mapping[int, Mapping[str, Any]]) -> None:
    """Give each kernel and copy its calls; a kernel whose call was not recorded becomes a call of its own."""
    rows = communication_rows(events)
    if not len(rows):
        return
    launchers = launch_calls(events, rows)
    owners = _Owners(calls)
    launched = sorted(
        ((int(events.start_ns[launcher]) if launcher >= 0 else -1), row, launcher)
        for row, launcher in zip(rows.tolist(), launchers.tolist(), strict=True)
    )
    batches: dict[int, list[list[_Call]]] = {}
    for launch_ns, row, launcher in launched:
        kernel = events.names[events.name_id[row]]
        kernel_kind = kind_of_kernel(kernel) if events.category[row] == Category.KERNEL else ""
        found = owners.of(int(events.thread[launcher]), launch_ns, kernel_kind) if launcher >= 0 else []
        if not found and not kernel_kind:
            continue  # a copy beside what a call asks for, such as one of a wait
        if not found:
            own = args.get(row, {})
            start = launch_ns if launcher >= 0 else int(events.start_ns[row])
            kind = kind_of(own.get("collective", "")) or kernel_kind
            found = [_Call(kind, -1, start, start, args=own, hint=hint_of_kernel(kernel))]
            calls += found
        batches.setdefault(int(events.stream[row]), []).append(found)
        for call in found:
            call.kernels.append(row)
            call.hint = call.hint or hint_of_kernel(kernel)
            call.args = call.args or args.get(row, {})
    calls += [_merged(batch) for own in batches.values() if all(map(_may_be_all_to_all, own)) for batch in own]


def _may_be_all_to_all(batch: Sequence[_Call]) -> bool:
    """Whether a kernel carries so many of the library's sends and receives that they may be an exchange between all ranks: those
    of a pipeline begin and end with fewer on the same stream.
    """
    kinds = [call.kind for call in batch if call.of_library]
    return kinds.count("send") > 1 and kinds.count("recv") > 1


def _merged(batch: Sequence[_Call]) -> _Call:
    """The calls of a batch as one of unknown kind, as their kernel is where nothing else was recorded."""
    first = batch[0]
    whole = _Call(
        "send_recv", first.thread, first.start_ns, max(call.until_ns for call in batch), kernels=first.kernels
    )
    for call in batch:
        call.kind = ""
    return whole


class _Owners:
    """Which calls a kernel carries, by the thread and the time of its launch; to be asked in order of time.

    A copy (of no kind) is of the call around it alone.
    """

    def __init__(self, calls: Sequence[_Call]) -> None:
        self._of_thread: dict[int, list[_Call]] = {}
        for call in sorted(calls, key=lambda call: call.start_ns):
            self._of_thread.setdefault(call.thread, []).append(call)
        self._starts = {thread: [call.start_ns for call in mine] for thread, mine in self._of_thread.items()}
        self._carried: dict[int, int] = {}

    def of(self, thread: int, launch_ns: int, kind: str) -> list[_Call]:
        mine = self._of_thread.get(thread, [])
        place = bisect_right(self._starts.get(thread, []), launch_ns)
        if place and launch_ns <= mine[place - 1].until_ns:
            self._carried[thread] = max(self._carried.get(thread, 0), place)
            return [mine[place - 1]]
        first = self._carried.get(thread, 0)
        batch = [call for call in mine[first:place] if not call.kernels and _carries(kind, call.kind)]
        if batch:
            self._carried[thread] = place
        return batch


def _carries(kernel_kind: str, call_kind: str) -> bool:
    """Whether a kernel of that kind can do what a call of this kind asks for."""
    return kernel_kind in (call_kind, "unknown") or (kernel_kind == "send_recv" and call_kind in (*_P2P, "all_to_all"))


def _row(call: _Call, events: Events, backward: Backward, busy: Busy) -> dict[str, Any]:
    args = call.args
    peer = int(args.get("dst", -1)) if call.kind == "send" else int(args.get("src", -1)) if call.kind == "recv" else -1
    size = int(args.get("group_size", -1))
    row: dict[str, Any] = {
        "kind": call.kind,
        "group_id": args.get("group_id", ""),
        "description": args.get("group_description", ""),
        "group_ranks": args.get("group_ranks", ""),
        "group_size": size,
        "peer": peer,
        "local_peer": call.local_peer,
        "bytes": _num_bytes(args),
        "seq": int(args.get("seq", -1)),
        "host_ns": call.start_ns,
        "backward": backward.tells(call.thread, call.start_ns),
        "hint": call.hint,
    }
    if call.kernels:
        start = min(int(events.start_ns[kernel]) for kernel in call.kernels)
        end = max(int(events.start_ns[kernel] + events.dur_ns[kernel]) for kernel in call.kernels)
        times = {"start_ns": start, "posted_ns": start, "asked_ns": start, "end_ns": end}
        return row | times | {"stream": int(events.stream[call.kernels[0]]), "clock": "device"}
    end = max(call.until_ns, call.work_end_ns)
    asked = busy.until(call.thread, call.until_ns, end) if end > call.until_ns else call.until_ns
    times = {"start_ns": call.start_ns, "posted_ns": call.until_ns, "asked_ns": asked, "end_ns": end}
    return row | times | {"stream": -1, "clock": "host"}


def _num_bytes(args: Mapping[str, Any]) -> int:
    return max(int(args.get("in_bytes", -1)), int(args.get("out_bytes", -1)))
