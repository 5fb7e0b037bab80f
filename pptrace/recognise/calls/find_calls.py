"""Communication calls without pptrace's marks: host calls, and the device work that each launched.

One communication shows in up to five events, which count once:

    host      c10d::allreduce_ ⊃ record_param_comms ⊃ nccl:all_reduce, or NVTX ncclAllReduce
    worker    gloo:all_reduce, on another thread, until it is done: see :mod:`pptrace.recognise.calls.host_calls`
    device    ncclDevKernel_AllReduce…, launched inside any of them

Calls of a batch (``batch_isend_irecv``, coalescing managers) launch nothing themselves: the kernel that the thread launches
next carries them all. The range ``nccl:coalesced`` names no peer and may never end: it is not read, its kernel is. What a kernel
does whose call was not recorded, its own arguments or its name say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pptrace.marks import P2P
from pptrace.model.tables import CALLS, Category, Events, make_table
from pptrace.recognise.calls.host_calls import HostCall, host_calls, message_bytes, with_works
from pptrace.recognise.calls.thread_activity import Backward, BusyThreads
from pptrace.recognise.device.communication_names import hint_of_kernel, kind_of, kind_of_kernel
from pptrace.recognise.device.work import communication_rows, launch_calls


def find_calls(events: Events) -> pd.DataFrame:
    """The communication of a rank (schema :data:`CALLS`), in order of the host's calls."""
    args = _arguments(events)
    calls = host_calls(events, args)
    _give_kernels(events, calls, args)
    calls = with_works([call for call in calls if call.kind])
    backward = Backward(events)
    if (events.category == Category.KERNEL).any():
        for call in calls:
            if not call.kernels and call.args.get("group_size") == 1:
                call.until_ns = call.end_ns = call.start_ns  # alone: nothing had to move
    busy = BusyThreads(events, {call.thread for call in calls if call.end_ns > call.until_ns and not call.kernels})
    rows = [_row(call, events, backward, busy) for call in sorted(calls, key=lambda call: call.start_ns)]
    return make_table(CALLS, {name: [row[name] for row in rows] for name in CALLS})


def _arguments(events: Events) -> dict[int, dict[str, Any]]:
    """Communication arguments by event."""
    names = [str(name) for name in events.comm_args]
    columns = [events.comm_args[name].tolist() for name in names]
    at = names.index("event")
    return {row[at]: dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)}


def _give_kernels(events: Events, calls: list[HostCall], args: Mapping[int, Mapping[str, Any]]) -> None:
    """Assign each kernel and copy to its calls; a kernel without a recorded call becomes a call of its own."""
    rows = communication_rows(events)
    if not len(rows):
        return
    launchers = launch_calls(events, rows)
    launch_times = np.where(launchers >= 0, events.start_ns[launchers], -1)
    order = np.lexsort((launchers, rows, launch_times))
    rows, launchers, launch_times = rows[order], launchers[order], launch_times[order]
    name_ids, streams = events.name_id[rows].tolist(), events.stream[rows].tolist()
    is_kernel = (events.category[rows] == Category.KERNEL).tolist()
    threads, starts = events.thread[launchers].tolist(), events.start_ns[rows].tolist()
    columns = (rows, launchers, launch_times)
    calls_of_kernels = _CallsOfKernels(calls)
    batches: dict[int, list[list[HostCall]]] = {}
    for index, (row, launcher, launch_ns) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        kernel = events.names[name_ids[index]]
        kernel_kind = kind_of_kernel(kernel) if is_kernel[index] else ""
        carried = calls_of_kernels.of(threads[index], launch_ns, kernel_kind) if launcher >= 0 else []
        if not carried and not kernel_kind:
            continue  # a copy beside what a call asks for, such as one of a wait
        if not carried:
            kernel_args = args.get(row, {})
            start = launch_ns if launcher >= 0 else starts[index]
            kind = kind_of(kernel_args.get("collective", "")) or kernel_kind
            carried = [HostCall(kind, -1, start, start, args=kernel_args, hint=hint_of_kernel(kernel))]
            calls += carried
        batches.setdefault(streams[index], []).append(carried)
        for call in carried:
            call.kernels.append(row)
            call.hint = call.hint or hint_of_kernel(kernel)
            call.args = call.args or args.get(row, {})
    calls += [
        _merged(batch)
        for kernel_args in batches.values()
        if all(map(_may_be_all_to_all, kernel_args))
        for batch in kernel_args
    ]


def _may_be_all_to_all(batch: Sequence[HostCall]) -> bool:
    """Return whether a kernel carries so many sends and receives of the library that they may be an all-to-all: a pipeline's
    batches begin and end with fewer on the same stream.
    """
    kinds = [call.kind for call in batch if call.of_library]
    return kinds.count("send") > 1 and kinds.count("recv") > 1


def _merged(batch: Sequence[HostCall]) -> HostCall:
    """The calls of a batch as one of unknown kind, as their kernel is where nothing else was recorded."""
    first = batch[0]
    merged = HostCall(
        "send_recv", first.thread, first.start_ns, max(call.until_ns for call in batch), kernels=first.kernels
    )
    for call in batch:
        call.kind = ""
    return merged


class _CallsOfKernels:
    """Finds the calls that a kernel carries, by thread and time of its launch; queried in order of time.

    A copy (of no kind) is of the call around it alone.
    """

    def __init__(self, calls: Sequence[HostCall]) -> None:
        self._of_thread: dict[int, list[HostCall]] = {}
        for call in sorted(calls, key=lambda call: call.start_ns):
            self._of_thread.setdefault(call.thread, []).append(call)
        self._starts = {
            thread: [call.start_ns for call in thread_calls] for thread, thread_calls in self._of_thread.items()
        }
        self._carried: dict[int, int] = {}

    def of(self, thread: int, launch_ns: int, kind: str) -> list[HostCall]:
        thread_calls = self._of_thread.get(thread, [])
        index = bisect_right(self._starts.get(thread, []), launch_ns)
        if index and launch_ns <= thread_calls[index - 1].until_ns:
            self._carried[thread] = max(self._carried.get(thread, 0), index)
            return [thread_calls[index - 1]]
        first = self._carried.get(thread, 0)
        batch = [call for call in thread_calls[first:index] if not call.kernels and _carries(kind, call.kind)]
        if batch:
            self._carried[thread] = index
        return batch


def _carries(kernel_kind: str, call_kind: str) -> bool:
    """Return whether a kernel of that kind can do what a call of this kind asks for."""
    return kernel_kind in (call_kind, "unknown") or (kernel_kind == "send_recv" and call_kind in (*P2P, "all_to_all"))


def _row(call: HostCall, events: Events, backward: Backward, busy: BusyThreads) -> dict[str, Any]:
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
        "bytes": size if (size := message_bytes(args)) >= 0 else call.num_bytes,
        "seq": int(args.get("seq", -1)),
        "host_ns": call.start_ns,
        "backward": backward.is_inside(call.thread, call.start_ns),
        "hint": call.hint,
        "functional": int(call.is_functional),
        "worker": call.worker,
    }
    if call.kernels:
        start = min(int(events.start_ns[kernel]) for kernel in call.kernels)
        end = max(int(events.start_ns[kernel] + events.dur_ns[kernel]) for kernel in call.kernels)
        times = {"start_ns": start, "posted_ns": start, "asked_ns": start, "end_ns": end}
        return row | times | {"stream": int(events.stream[call.kernels[0]]), "clock": "device"}
    return row | _host_times(call, busy) | {"stream": -1, "clock": "host"}


def _host_times(call: HostCall, busy: BusyThreads) -> dict[str, int]:
    """The times of a call that no kernel shows; one whose end nothing shows ends where it was posted."""
    start, until, end = call.start_ns, call.until_ns, call.end_ns
    if end < 0:
        return {"start_ns": start, "posted_ns": until, "asked_ns": until, "end_ns": until}
    if end <= until:  # it was not posted ahead
        return {"start_ns": start, "posted_ns": start, "asked_ns": start, "end_ns": max(start, end)}
    return {"start_ns": start, "posted_ns": until, "asked_ns": busy.until(call.thread, until, end), "end_ns": end}
