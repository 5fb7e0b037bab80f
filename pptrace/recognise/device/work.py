"""Device work by category (compute, communication, memory), each with the host call that launched it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from pptrace.intervals import intersect, lengths_within, merge, subtract
from pptrace.model.device import DeviceBreakdown, DeviceWork, Rows
from pptrace.model.traces import Bool, Category, Events
from pptrace.recognise.device.communication_names import COMMUNICATION_KERNEL
from pptrace.recognise.device.idle import idle_time

_NCCL_CALL = re.compile(r"^(?:(?:nccl|rccl):(?!coalesced)|record_param_comms|c10d::|p?nccl[A-Z])")
"""Names of NCCL's host calls, without the range of a batch, which may never end."""
_DEVICE_RANGE = re.compile(r"^(?:(?:nccl|rccl|hccl|xccl):|p?nccl[A-Z])")
_LAUNCH = re.compile(r"^(?:cuda|hip|cu)\w*Launch")
_OPERATOR = re.compile(r"^(?:c10d::|record_param_comms)")
_DEVICE_BACKEND = re.compile(r"(?:cuda:)?nccl")


NO_DEVICE = DeviceBreakdown(None, None, None, None, None, None, None, None)


def device_work(events: Events, backend: str = "") -> DeviceWork:
    """The kernels, copies and fills of a rank, each with its launch; ``backend`` is the process groups' where it is known."""
    rows = device_rows(events)
    calls = launch_calls(events, rows)
    is_kernel = events.category[rows] == Category.KERNEL
    communicates = _communicates(events, rows, calls)
    return DeviceWork(
        start_ns=events.start_ns[rows],
        end_ns=events.ends_of(rows),
        stream=events.stream[rows],
        launch_ns=np.where(calls >= 0, events.start_ns[calls], -1) if len(calls) else np.empty(0, dtype=np.int64),
        is_compute=is_kernel & ~communicates,
        is_communication=communicates,
        missing_device_events="" if len(rows) else _name_of_missing_device(events, backend),
        idle=idle_time(events, rows, calls, communicates),
    )


def _name_of_missing_device(events: Events, backend: str) -> str:
    """The name in the trace that proves the use of a device, for ranks without device events; "" without one.

    That there is a device (Kineto's ``deviceProperties``) shows nothing: ranks of one host compute on CPUs next to it as well.
    """
    on_host = (Category.CPU_OP, Category.ANNOTATION)
    proofs = [events.rows_named(_DEVICE_RANGE, *on_host), events.rows_named(_LAUNCH, Category.RUNTIME)]
    if _DEVICE_BACKEND.fullmatch(backend):
        proofs.append(events.rows_named(_OPERATOR, *on_host))
    return next((events.names[events.name_id[rows[0]]] for rows in proofs if len(rows)), "")


def communication_rows(events: Events) -> Rows:
    """The events that carry data between devices: kernels by name, and copies that a collective launched."""
    if not len(events):
        return np.empty(0, dtype=np.intp)
    rows = device_rows(events)
    named = events.named(COMMUNICATION_KERNEL, rows)[events.name_id[rows]]
    rows = rows[named | (events.category[rows] == Category.MEMCPY)]
    carrying: Rows = rows[_communicates(events, rows, launch_calls(events, rows))]
    return carrying


def device_rows(events: Events) -> Rows:
    """The kernels, copies and fills, by start."""
    return np.flatnonzero(events.is_of(Category.KERNEL, Category.MEMCPY, Category.MEMSET))


def _communicates(events: Events, rows: Rows, calls: Rows) -> Bool:
    """Mark the device rows that communicate; ``calls`` are the host calls that launched them."""
    if not len(rows):
        return np.zeros(0, dtype=np.bool_)
    category = events.category[rows]
    communicates: Bool = (category == Category.KERNEL) & events.named(COMMUNICATION_KERNEL, rows)[events.name_id[rows]]
    copies = (category == Category.MEMCPY) & (calls >= 0)
    if copies.any():  # those launched inside the host range of a collective
        ranges = events.rows_named(_NCCL_CALL, Category.CPU_OP, Category.ANNOTATION)
        launches = calls[copies]
        communicates[copies] = events.are_within(ranges, events.thread[launches], events.start_ns[launches])
    return communicates


def launch_calls(events: Events, rows: Rows) -> Rows:
    """The runtime call that launched each of these device events, by correlation id; -1 where it was not recorded."""
    is_call = (events.category == Category.RUNTIME) & (events.correlation >= 0)
    calls = np.flatnonzero(is_call).astype(np.int32 if len(events) <= np.iinfo(np.int32).max else np.int64)
    if not len(calls) or not len(rows):
        return np.full(len(rows), -1, dtype=np.intp)
    calls = calls[np.argsort(events.correlation[calls], kind="stable")]
    known = events.correlation[calls]
    number = events.correlation[rows]
    index = np.searchsorted(known, number)
    np.minimum(index, len(known) - 1, out=index)
    return np.where((known[index] == number) & (number >= 0), calls[index], np.intp(-1))


def breakdown(work: DeviceWork, start_ns: int | None = None, end_ns: int | None = None) -> DeviceBreakdown:
    """Split device time by category, over [start_ns, end_ns) or, by default, from the first work to the last."""
    if not len(work):
        return NO_DEVICE
    first = int(work.start_ns.min()) if start_ns is None else start_ns
    last = int(work.end_ns.max()) if end_ns is None else end_ns
    return breakdowns(work, [first], [last])[0]


def breakdowns(work: DeviceWork, starts_ns: Sequence[int], ends_ns: Sequence[int]) -> list[DeviceBreakdown]:
    """Split device time by category in each of several windows [start, end)."""
    if not len(work):
        return [NO_DEVICE] * len(starts_ns)
    compute, communication, memory = work.compute, work.communication, work.memory
    device = merge(compute, communication)
    sets = (
        merge(device, memory),
        compute,
        communication,
        subtract(communication, compute),
        subtract(memory, device),
        intersect(communication, compute),
    )
    lengths = [lengths_within(part, starts_ns, ends_ns).tolist() for part in sets]
    return [
        DeviceBreakdown(
            first_ns=first,
            last_ns=last,
            busy_ns=busy,
            compute_ns=compute_ns,
            communication_ns=only_communication,
            memory_ns=only_memory,
            idle_ns=last - first - busy,
            overlap_ratio=hidden / all_communication if all_communication else None,
        )
        for first, last, busy, compute_ns, all_communication, only_communication, only_memory, hidden in zip(
            starts_ns, ends_ns, *lengths, strict=True
        )
    ]
