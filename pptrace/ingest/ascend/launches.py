"""Join device work to the calls of the host that launched it.

    Enqueue (thread of the operator) ─ correlation_id ─ Dequeue (thread of the queue) ⊃ call ─ HostToDevice ─ task

Without a task queue the call is on the operator's thread. At profiler level 0 calls are not recorded: the beginning of the
arrow says where and when each was.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.ingest.ascend.lanes import Lanes
from pptrace.ingest.ascend.trace_rows import Flows, Rows
from pptrace.model.tables import Int64


def launches_of(
    rows: Rows, lanes: Lanes, is_device: np.ndarray[tuple[int], np.dtype[np.bool_]], starts: Flows, ends: Flows
) -> tuple[Int64, tuple[Int64, Int64, Int64]]:
    """Join device work to its launches along the arrows that end where it begins.

    Returns:
        A number of each row that joins device work to the row that launched it, -1 for other rows; and (thread, start in ns,
        number) of launches that are no row.
    """
    number = np.full(len(rows), -1, dtype=np.int64)
    work = np.flatnonzero(is_device)
    places = np.stack((rows.process[work], rows.thread[work], rows.start_ns[work]))
    flow = _index_in(*_codes(np.stack((ends.process, ends.thread, ends.t_ns)), places))
    work, flow = work[flow >= 0], flow[flow >= 0]
    begin = _index_in(starts.id, ends.id[flow])
    work, begin = work[begin >= 0], begin[begin >= 0]
    thread, t_ns = starts.thread[begin], starts.t_ns[begin]
    launcher = _enqueued(rows, lanes, thread, t_ns)
    direct = np.flatnonzero(launcher < 0)
    calls = np.flatnonzero(lanes.is_call)
    begins = np.stack((rows.thread[calls], rows.start_ns[calls]))
    index = _index_in(*_codes(begins, np.stack((thread[direct], t_ns[direct]))))
    launcher[direct[index >= 0]] = calls[index[index >= 0]]
    is_row = launcher >= 0
    _, group = np.unique(launcher[is_row], return_inverse=True)
    number[work[is_row]] = group + 1
    number[launcher[is_row]] = group + 1
    alone = np.flatnonzero(~is_row)
    first_free = int(number.max(initial=0)) + 1
    own = first_free + np.arange(len(alone))
    number[work[alone]] = own
    return number, (thread[alone], t_ns[alone], own)


def _index_in(values: Int64, others: Int64) -> Int64:
    """The index in ``values`` of each of the others, -1 where it is not there."""
    if not len(values):
        return np.full(len(others), -1, dtype=np.int64)
    order = np.argsort(values, kind="stable")
    at = np.minimum(np.searchsorted(values[order], others), len(values) - 1)
    found: Int64 = np.where(values[order][at] == others, order[at], -1)
    return found


def _codes(values: npt.NDArray[Any], others: npt.NDArray[Any]) -> tuple[Int64, Int64]:
    """Codes of the columns of two tables, shape (n,) and (m,): equal where the columns are."""
    _, code = np.unique(np.concatenate((values, others), axis=1), axis=1, return_inverse=True)
    code = code.reshape(-1)
    return code[: values.shape[1]], code[values.shape[1] :]


def _enqueued(rows: Rows, lanes: Lanes, thread: Int64, t_ns: Int64) -> Int64:
    """The Enqueue of the Dequeue around each time on its thread, -1 where there is none."""
    dequeued = np.flatnonzero(lanes.is_dequeue)
    enqueued = np.flatnonzero(lanes.is_enqueue)
    found = np.full(len(thread), -1, dtype=np.int64)
    for queue in np.unique(rows.thread[dequeued]).tolist():
        of_queue = dequeued[rows.thread[dequeued] == queue]
        of_queue = of_queue[np.argsort(rows.start_ns[of_queue], kind="stable")]
        at = np.flatnonzero(thread == queue)
        before = np.searchsorted(rows.start_ns[of_queue], t_ns[at], side="right") - 1
        around = of_queue[np.maximum(before, 0)]
        is_inside = (before >= 0) & (t_ns[at] <= rows.start_ns[around] + rows.dur_ns[around])
        index = _index_in(rows.number[enqueued], rows.number[around[is_inside]])
        found[at[is_inside]] = np.where(index >= 0, enqueued[np.maximum(index, 0)], -1) if len(enqueued) else -1
    return found
