"""Compute time of host threads inside ranges that include waiting.

Ranges of other frameworks hold the wait for an op's input, and the posting of its output, besides the op itself: label times
were up to 1.8 times the compute. Without device events the operators that ran say when that was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from pptrace.intervals import Int64, union
from pptrace.model.tables import Category, Events

_NOT_COMPUTE = re.compile(r"c10d::|record_param_comms|c10d_functional|_c10d|gloo:|nccl:")


class HostCompute:
    """The operators of every host thread of a rank, communication apart."""

    def __init__(self, events: Events) -> None:
        computes = np.array([not _NOT_COMPUTE.match(name) for name in events.names], dtype=bool)
        rows = np.flatnonzero(events.category == Category.CPU_OP)
        rows = rows[computes[events.name_id[rows]]] if len(rows) else rows
        self._threads: dict[int, tuple[Int64, Int64]] = {}
        for thread, thread_rows in events.rows_by_thread(rows).items():
            self._threads[thread] = (events.start_ns[thread_rows], events.ends_of(thread_rows))

    def span(self, thread: int, start_ns: int, end_ns: int) -> tuple[int, int] | None:
        """From the start of the first operator in [start_ns, end_ns) to the end of the last; None without any."""
        if thread not in self._threads:
            return None
        starts, ends = self._threads[thread]
        low, high = np.searchsorted(starts, (start_ns, end_ns))
        return (int(starts[low]), min(int(ends[low:high].max()), end_ns)) if low < high else None


@dataclass(frozen=True, slots=True)
class HostWork:
    """Time in which any thread of a rank ran compute operators: sorted disjoint intervals, ns, on the rank's own clock."""

    start_ns: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    end_ns: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.start_ns)


def host_work(events: Events) -> HostWork:
    """The computing operators of all threads of a rank; what they call of communication is still in them."""
    computes = np.array([not _NOT_COMPUTE.match(name) for name in events.names], dtype=bool)
    rows = np.flatnonzero(events.category == Category.CPU_OP)
    rows = rows[computes[events.name_id[rows]]] if len(rows) else rows
    spans = union(events.start_ns[rows], events.ends_of(rows))
    return HostWork(np.ascontiguousarray(spans[:, 0]), np.ascontiguousarray(spans[:, 1]))
