"""Activity of the threads that called a communication."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pptrace.intervals import NestedIntervals
from pptrace.model.tables import Int64
from pptrace.model.traces import Category, Events

_ENGINE = "autograd::engine::evaluate_function"
_COPY_BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"


def are_backward(events: Events, threads: Int64, times_ns: Int64) -> Int64:
    """Flags of calls made by autograd's engine: 1 or 0, −1 where the trace has no engine or the thread is not known."""
    engine = np.array([name.startswith(_ENGINE) for name in events.names], dtype=bool)
    rows = np.flatnonzero(engine[events.name_id]) if engine.any() else np.empty(0, dtype=np.intp)
    backward = np.where((threads < 0) | (len(rows) == 0), -1, 0)
    for on_thread, ran in _activity(events, rows, threads):
        backward[on_thread] = np.where(threads[on_thread] < 0, -1, ran.hold(times_ns[on_thread]))
    return backward


def are_within(events: Events, rows: npt.NDArray[np.intp], threads: Int64, times_ns: Int64) -> npt.NDArray[np.bool_]:
    """Return which calls were made inside one of some events of their own thread."""
    within = np.zeros(len(threads), dtype=np.bool_)
    for on_thread, ran in _activity(events, rows, threads):
        within[on_thread] = ran.hold(times_ns[on_thread])
    return within


def busy_until(events: Events, threads: Int64, starts_ns: Int64, ends_ns: Int64) -> Int64:
    """Ends of what threads ran in stretches of time: the end of the last one that each began in [start_ns, end_ns), at
    most end_ns; start_ns without any. Views are no work: DDP makes some between its wait and the copies that follow.
    """
    until = starts_ns.copy()
    if not len(threads):
        return until
    no_work = np.array([name.endswith(("::wait_tensor", "::as_strided")) for name in events.names], dtype=bool)
    works = (events.category == Category.CPU_OP) & ~no_work[events.name_id]
    rows = np.flatnonzero(works & np.isin(events.thread, np.unique(threads)))
    for on_thread, ran in _activity(events, rows, threads):
        start, end = starts_ns[on_thread], ends_ns[on_thread]
        low, high = np.searchsorted(ran.starts, start), np.searchsorted(ran.starts, end)
        latest = np.clip(ran.latest_ends[high - 1], start, end)
        until[on_thread] = np.where(low < high, latest, start)
    return until


def copies_of_buckets(events: Events, threads: Int64, starts_ns: Int64) -> tuple[Int64, Int64]:
    """Starts of the first and of the last copy out of DDP's buckets after each call, before the next call that follows the
    first one; the latest time of all where there is none.

    DDP waits for its buckets one after the other, and copies each one back when it is there.
    """
    first = np.full(len(threads), np.iinfo(np.int64).max)
    last = first.copy()
    rows = np.flatnonzero(np.array([name == _COPY_BACK for name in events.names], dtype=bool)[events.name_id])
    for on_thread, copies in _activity(events, rows, threads):
        starts, calls = np.append(copies.starts, first.max()), np.append(starts_ns[on_thread], first.max())
        calls.sort()
        first[on_thread] = starts[np.searchsorted(copies.starts, starts_ns[on_thread])]
        next_call = calls[np.minimum(np.searchsorted(calls, first[on_thread]), len(calls) - 1)]
        last[on_thread] = starts[np.searchsorted(starts, next_call) - 1]
        last[on_thread] = np.maximum(first[on_thread], last[on_thread])
    return first, last


def _activity(
    events: Events, rows: npt.NDArray[np.intp], threads: Int64
) -> Iterator[tuple[npt.NDArray[np.intp], NestedIntervals]]:
    """(calls of a thread, times at which it ran some of the events) of each thread that has both."""
    order = np.argsort(threads, kind="stable")
    ordered = threads[order]
    for thread, thread_rows in events.rows_by_thread(rows).items():
        first, last = np.searchsorted(ordered, thread), np.searchsorted(ordered, thread, side="right")
        if first < last:
            yield order[first:last], events.intervals_of(thread_rows)
