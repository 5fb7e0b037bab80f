"""Compute time of host threads inside ranges that include waiting.

Ranges of other frameworks hold the wait for an op's input, and the posting of its output, besides the op itself: label times
were up to 1.8 times the compute. Without device events the operators that ran say when that was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pptrace.intervals import Int64, reduce_ranges, union
from pptrace.model.traces import Category, Events

_NOT_COMPUTE = re.compile(r"c10d::|record_param_comms|c10d_functional|_c10d|gloo:|nccl:")


def _computing(events: Events) -> npt.NDArray[np.intp]:
    """The operators that compute; what they call of communication is still in them."""
    computes = np.array([not _NOT_COMPUTE.match(name) for name in events.names], dtype=bool)
    rows = np.flatnonzero(events.category == Category.CPU_OP)
    return rows[computes[events.name_id[rows]]] if len(rows) else rows


class HostCompute:
    """The operators of every host thread of a rank, communication apart."""

    def __init__(self, events: Events) -> None:
        rows_by_thread = events.rows_by_thread(_computing(events))
        self._threads = {
            thread: (events.start_ns[rows], events.ends_of(rows)) for thread, rows in rows_by_thread.items()
        }

    def spans(self, threads: Int64, starts_ns: Int64, ends_ns: Int64) -> tuple[npt.NDArray[np.bool_], Int64, Int64]:
        """Operators of each stretch [start_ns, end_ns) of a thread: whether one began in it, the start of the first and the
        end of the last.
        """
        ran, first, last = np.zeros(len(threads), dtype=np.bool_), starts_ns.copy(), ends_ns.copy()
        for thread, (starts, ends) in self._threads.items():
            rows = np.flatnonzero(threads == thread)
            low, high = np.searchsorted(starts, starts_ns[rows]), np.searchsorted(starts, ends_ns[rows])
            rows, low, high = rows[low < high], low[low < high], high[low < high]
            if len(rows):
                ran[rows], first[rows] = True, starts[low]
                last[rows] = np.minimum(reduce_ranges(np.maximum, ends, low, high), ends_ns[rows])
        return ran, first, last


@dataclass(frozen=True, slots=True)
class HostWork:
    """Time in which any thread of a rank ran compute operators: sorted disjoint intervals, ns, on the rank's own clock."""

    start_ns: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    end_ns: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.start_ns)


def host_work(events: Events) -> HostWork:
    """The time of the computing operators of all threads of a rank."""
    rows = _computing(events)
    spans = union(events.start_ns[rows], events.ends_of(rows))
    return HostWork(np.ascontiguousarray(spans[:, 0]), np.ascontiguousarray(spans[:, 1]))
