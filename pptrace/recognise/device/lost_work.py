"""Device work that was launched and is not in the trace: CUPTI drops what its buffers cannot hold, Kineto the first of a session.

Every launch of a kernel has a correlation, which its kernel has too. A launch without is of a kernel that was lost, if not of one
that was captured into a graph. What lost kernels did is not known: nor is when their rank computed, in the steps they were in.
"""

from __future__ import annotations

import re

import numpy as np

from pptrace.intervals import Int64
from pptrace.model.device import DeviceWork, LostKernels, Rows
from pptrace.model.traces import Category, Events

_LAUNCHES_KERNEL = re.compile(r"^(?:cuda|hip|cu)(?!\w*Graph)\w*Launch(?!HostFunc)")
_MUCH, _MANY = 1e-3, 10
"""Part of the kernels, and number of them, from which on what is lost is more than the figures may be off by."""


def kernel_launches(events: Events, rows: Rows) -> tuple[Rows, Rows]:
    """(calls that launched a kernel, those of them whose kernel is not among the device work ``rows``), by start."""
    launches = np.array([bool(_LAUNCHES_KERNEL.match(name)) for name in events.names], dtype=np.bool_)
    if not launches.any():
        return np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp)
    calls = np.flatnonzero((events.category == Category.RUNTIME) & launches[events.name_id] & (events.correlation >= 0))
    return calls, calls[~np.isin(events.correlation[calls], events.correlation[rows])]


def earliest_starts(launch_ns: Int64, work: DeviceWork) -> Int64:
    """The earliest moments, ns, at which lost work launched at ``launch_ns`` can have begun.

    That is after its launch, and after the end of what was launched before it and is known.
    """
    known = np.flatnonzero(work.launch_ns >= 0)
    order = known[np.argsort(work.launch_ns[known], kind="stable")]
    ended = np.maximum.accumulate(work.end_ns[order]) if len(order) else work.end_ns[:0]
    before = np.searchsorted(work.launch_ns[order], launch_ns)
    earliest: Int64 = launch_ns.copy()
    has = before > 0
    earliest[has] = np.maximum(launch_ns[has], ended[before[has] - 1])
    return np.sort(earliest)


def is_much(lost: LostKernels) -> bool:
    """Return whether so much is lost that figures would be wrong by it."""
    return len(lost) >= _MANY or len(lost) > _MUCH * lost.num_launches
