"""Which device work is computing, communicating or moving memory, and which host call launched it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pptrace.intervals import Int64, length, merge, subtract, union
from pptrace.intervals import intersect as intersect_sets
from pptrace.tables import Category, Events

_COMMUNICATION = re.compile(
    r"nccl|rccl|userbuffers|nvshmem|cross_device_reduce|internode::|intranode::|hcclAicpu|^Hccl|^Hcom", re.IGNORECASE
)
"""Kernels that carry data between devices: NCCL and RCCL, Transformer Engine's user buffers, NVSHMEM, DeepEP, vLLM, HCCL."""


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """The device events of one rank, sorted by start: kernels, copies and fills, in ns.

    ``launch_ns`` is the start of the host call with the same correlation; -1 where it was not recorded.
    """

    start_ns: Int64
    end_ns: Int64
    stream: Int64
    launch_ns: Int64
    is_compute: npt.NDArray[np.bool_]
    is_communication: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.start_ns)

    def intervals(self, chosen: npt.NDArray[np.bool_]) -> Int64:
        return union(self.start_ns[chosen], self.end_ns[chosen])

    @property
    def compute(self) -> Int64:
        return self.intervals(self.is_compute)

    @property
    def communication(self) -> Int64:
        return self.intervals(self.is_communication)

    @property
    def memory(self) -> Int64:
        return self.intervals(~self.is_compute & ~self.is_communication)


@dataclass(frozen=True, slots=True)
class DeviceBreakdown:
    """How a stretch of device time was spent, ns. The fields are those of the report's ``device`` objects.

    Each nanosecond belongs to one category, in the order compute, communication, memory. ``overlap_ratio`` is
    (communication ∩ compute) / communication, None where there is no communication.
    """

    first_ns: int | None
    last_ns: int | None
    busy_ns: int | None
    compute_ns: int | None
    communication_ns: int | None
    memory_ns: int | None
    idle_ns: int | None
    overlap_ratio: float | None


NO_DEVICE = DeviceBreakdown(None, None, None, None, None, None, None, None)


def device_work(events: Events) -> DeviceWork:
    """The kernels, copies and fills of a rank, each with its launch."""
    working = np.isin(events.category, (Category.KERNEL, Category.MEMCPY, Category.MEMSET))
    rows = np.flatnonzero(working)
    is_kernel = events.category[rows] == Category.KERNEL
    named_communication = np.array([bool(_COMMUNICATION.search(name)) for name in events.names], dtype=bool)
    communicates = is_kernel & named_communication[events.name_id[rows]] if len(rows) else is_kernel
    return DeviceWork(
        start_ns=events.start_ns[rows],
        end_ns=events.end_ns[rows],
        stream=events.stream[rows],
        launch_ns=_launches(events, rows),
        is_compute=is_kernel & ~communicates,
        is_communication=communicates,
    )


def _launches(events: Events, rows: npt.NDArray[np.intp]) -> Int64:
    """Start of the runtime call that launched each device event, by correlation id."""
    calls = np.flatnonzero((events.category == Category.RUNTIME) & (events.correlation >= 0))
    launches = np.full(len(rows), -1, dtype=np.int64)
    if not len(calls) or not len(rows):
        return launches
    calls = calls[np.argsort(events.correlation[calls], kind="stable")]
    known = events.correlation[calls]
    wanted = events.correlation[rows]
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    found = (known[at] == wanted) & (wanted >= 0)
    launches[found] = events.start_ns[calls[at[found]]]
    return launches


def breakdown(work: DeviceWork, start_ns: int | None = None, end_ns: int | None = None) -> DeviceBreakdown:
    """Split device time by category, over [start_ns, end_ns) or, by default, from the first work to the last."""
    if not len(work):
        return NO_DEVICE
    first = int(work.start_ns.min()) if start_ns is None else start_ns
    last = int(work.end_ns.max()) if end_ns is None else end_ns
    window = union([first], [last])
    compute, communication, memory = (
        intersect_sets(part, window) for part in (work.compute, work.communication, work.memory)
    )
    hidden = length(intersect_sets(communication, compute))
    busy = length(merge(compute, communication, memory))
    return DeviceBreakdown(
        first_ns=first,
        last_ns=last,
        busy_ns=busy,
        compute_ns=length(compute),
        communication_ns=length(subtract(communication, compute)),
        memory_ns=length(subtract(memory, merge(compute, communication))),
        idle_ns=last - first - busy,
        overlap_ratio=hidden / length(communication) if len(communication) else None,
    )
