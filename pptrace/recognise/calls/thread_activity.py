"""Activity of the threads that called a communication."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from pptrace.intervals import NestedIntervals
from pptrace.model.tables import Category, Events

_ENGINE = "autograd::engine::evaluate_function"


class Backward:
    """Test of whether a call was made by autograd's engine."""

    def __init__(self, events: Events) -> None:
        engine = np.array([name.startswith(_ENGINE) for name in events.names], dtype=bool)
        rows = np.flatnonzero(engine[events.name_id]) if engine.any() else np.empty(0, dtype=np.intp)
        self._threads = {
            thread: events.intervals_of(thread_rows) for thread, thread_rows in events.rows_by_thread(rows).items()
        }

    def is_inside(self, thread: int, time_ns: int) -> int:
        if not self._threads or thread < 0:
            return -1
        return int(thread in self._threads and bool(self._threads[thread].hold(time_ns)))


class BusyThreads:
    """Times until which a thread ran operators while one of its messages was in transit."""

    def __init__(self, events: Events, threads: Collection[int]) -> None:
        self._threads: dict[int, NestedIntervals] = {}
        if not threads:
            return
        waits = np.array([name.endswith("::wait_tensor") for name in events.names], dtype=bool)
        works = (events.category == Category.CPU_OP) & ~waits[events.name_id]
        rows = np.flatnonzero(works & np.isin(events.thread, list(threads)))
        self._threads = {
            thread: events.intervals_of(thread_rows) for thread, thread_rows in events.rows_by_thread(rows).items()
        }

    def until(self, thread: int, start_ns: int, end_ns: int) -> int:
        """The end of the last operator that the thread began in [start_ns, end_ns), at most end_ns; start_ns without any."""
        if (ran := self._threads.get(thread)) is None:
            return start_ns
        low, high = np.searchsorted(ran.starts, (start_ns, end_ns))
        return min(max(int(ran.latest_ends[high - 1]), start_ns), end_ns) if low < high else start_ns
