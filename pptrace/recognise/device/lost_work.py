"""Device work that was launched and is not in the trace: CUPTI drops what its buffers cannot hold, Kineto the first of a session.

Every launch of a kernel has a correlation, which its kernel has too. A launch without is of a kernel that was lost, if not of one
that was captured into a graph. What lost kernels did is not known: nor is when their rank computed, in the steps they were in.
"""

from __future__ import annotations

import re

import numpy as np

from pptrace.intervals import Int64, earliest_from
from pptrace.model.device import DeviceWork, LostKernels, Rows
from pptrace.model.traces import Category, Events

_LAUNCHES_KERNEL = re.compile(r"^(?:cuda|hip|cu)(?!\w*Graph)\w*Launch(?!HostFunc)")
_MUCH, _MANY = 1e-3, 10
"""Part of the kernels, and number of them, from which on what is lost is more than the figures may be off by."""


def kernel_launches(events: Events, rows: Rows) -> tuple[Rows, Rows]:
    """(calls that launched a kernel, those of them whose kernel is not among the device work ``rows``), by start."""
    calls = events.rows_named(_LAUNCHES_KERNEL, Category.RUNTIME)
    calls = calls[events.correlation[calls] >= 0]
    has_kernel = np.isin(events.correlation[calls], events.correlation[rows])
    if not has_kernel.any() and (events.category[rows] == Category.KERNEL).any():
        return calls, calls[:0]  # kernels have no correlation
    return calls, calls[~has_kernel]


def lost_kernels(launch_ns: Int64, num_launches: int, work: DeviceWork) -> LostKernels:
    """The kernels that were launched at ``launch_ns`` and are lost, of so many launches.

    Each began after its launch, and after the end of what was launched before it and is known; it had ended when what was
    launched behind it, and is known, began.
    """
    order = work.launch_order
    launched = work.launch_ns[order]
    ended = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(work.end_ns[order]))
    begun = earliest_from(work.start_ns[order])
    start = np.maximum(launch_ns, ended[np.searchsorted(launched, launch_ns)])
    end = np.maximum(start, begun[np.searchsorted(launched, launch_ns, side="right")])
    return LostKernels(np.sort(start), np.sort(end), num_launches)


def is_much(lost: LostKernels, number: int | None = None) -> bool:
    """Return whether so much is lost, or of that so many kernels, that figures would be wrong by it."""
    number = len(lost) if number is None else number
    return number >= _MANY or number > _MUCH * lost.num_launches
