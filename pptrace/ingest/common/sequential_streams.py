"""Work of one stream is sequential: what a recorder lets last beyond the end of what follows it on its stream is cut there.

Recorders of ROCm give single kernels durations of seconds (AMD-AGI/TraceLens issue 669). What such a kernel really took is not
known; it had ended when its successor began. A successor that begins a little before the end is none: programs may launch the
next kernel early, and clocks of devices are read to a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pptrace.model.traces import Category, Events, Trace
from pptrace.model.wording import counted

_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
_TOLERANCE_NS = 2_000
Rows = npt.NDArray[np.intp]


def with_sequential_streams(trace: Trace) -> Trace:
    """The trace with overrunning device work cut at the start of its successor, and a warning that says how much there was."""
    rows, ends = overruns(trace.events)
    if not len(rows):
        return trace
    events = trace.events
    durations = events.dur_ns.copy()
    longest_ns = int(durations[rows].max())
    durations[rows] = ends - events.start_ns[rows]
    last = "lasts longer than what follows on its" if len(rows) == 1 else "last longer than what follows on their"
    line = (
        f"{counted(len(rows), 'piece')} of device work {last} stream, up to "
        f"{longest_ns / 1e6:,.2f} ms, which cannot be: the recorder's mistake; each is cut where its successor begins"
    )
    return replace(trace, events=replace(events, dur_ns=durations), warnings=(*trace.warnings, line))


def overruns(events: Events) -> tuple[Rows, npt.NDArray[np.int64]]:
    """(rows of device work that ends after a later piece of its stream has ended, the starts of their successors, ns).

    Nodes of a graph are left out: branches that run at the same time are written to one stream.
    """
    rows = np.flatnonzero(np.isin(events.category, _WORK))
    rows = rows[~_of_graphs(events.correlation[rows])]
    found = list(_of_streams(events, rows))
    none = np.zeros(0, dtype=np.int64)
    return (
        np.concatenate([of_stream for of_stream, _ in found] or [none]).astype(np.intp),
        np.concatenate([ends for _, ends in found] or [none]),
    )


def _of_graphs(correlation: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Mask of the work that one call launched together with other work."""
    _, number, count = np.unique(correlation, return_inverse=True, return_counts=True)
    together: npt.NDArray[np.bool_] = (count[number] > 1) & (correlation >= 0)
    return together


def _of_streams(events: Events, rows: Rows) -> Iterator[tuple[Rows, npt.NDArray[np.int64]]]:
    """The same for each stream, whose work is in the order of its starts."""
    order = np.lexsort((events.stream[rows], events.device[rows]))  # is stable
    rows = rows[order]
    device, stream = events.device[rows], events.stream[rows]
    for of_stream in np.split(rows, np.flatnonzero((np.diff(device) != 0) | (np.diff(stream) != 0)) + 1):
        starts, ends = events.start_ns[of_stream], events.ends_of(of_stream)
        later = np.minimum.accumulate(ends[::-1])[::-1][1:]  # the first end of all that follow
        over = np.flatnonzero((ends[:-1] > later + _TOLERANCE_NS) & (starts[1:] > starts[:-1]))
        if len(over):
            yield of_stream[over], starts[over + 1]
