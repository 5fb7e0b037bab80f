"""Join device work to the calls of the host that launched it.

    Enqueue (thread of the operator) ─ correlation_id ─ Dequeue (thread of the queue) ⊃ call ─ HostToDevice ─ task

Without a task queue the call is on the operator's thread. At profiler level 0 calls are not recorded: the beginning of the
arrow says where and when each was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pptrace.ingest.ascend.lanes import Lanes
from pptrace.ingest.ascend.trace_rows import Flows, Rows
from pptrace.model.tables import Int64


@dataclass(frozen=True, slots=True)
class Launches:
    """``number`` joins rows of device work to the row that launched it, -1 for other rows. ``thread`` and ``start_ns`` are of
    launches that are no row, with their ``own_number``.
    """

    number: Int64
    thread: Int64
    start_ns: Int64
    own_number: Int64


def launches_of(
    rows: Rows, lanes: Lanes, is_device: np.ndarray[tuple[int], np.dtype[np.bool_]], starts: Flows, ends: Flows
) -> Launches:
    """Join device work to its launches along the arrows that end where it begins."""
    number = np.full(len(rows), -1, dtype=np.int64)
    work = np.flatnonzero(is_device)
    flow = _flow_of(rows, work, ends)
    work, flow = work[flow >= 0], flow[flow >= 0]
    begin = _index_in(starts.id, ends.id[flow])
    work, begin = work[begin >= 0], begin[begin >= 0]
    thread, t_ns = starts.thread[begin], starts.t_ns[begin]
    launcher = _enqueued(rows, lanes, thread, t_ns)
    direct = np.flatnonzero(launcher < 0)
    launcher[direct] = _calls_at(rows, lanes, thread[direct], t_ns[direct])
    is_row = launcher >= 0
    _, group = np.unique(launcher[is_row], return_inverse=True)
    number[work[is_row]] = group + 1
    number[launcher[is_row]] = group + 1
    alone = np.flatnonzero(~is_row)
    first_free = int(number.max(initial=0)) + 1
    own = first_free + np.arange(len(alone))
    number[work[alone]] = own
    return Launches(number, thread[alone], t_ns[alone], own)


def _index_in(values: Int64, wanted_values: Int64) -> Int64:
    """The index in ``values`` of each wanted value, -1 where it is not there."""
    if not len(values):
        return np.full(len(wanted_values), -1, dtype=np.int64)
    order = np.argsort(values, kind="stable")
    at = np.minimum(np.searchsorted(values[order], wanted_values), len(values) - 1)
    found: Int64 = np.where(values[order][at] == wanted_values, order[at], -1)
    return found


def _flow_of(rows: Rows, work: Int64, ends: Flows) -> Int64:
    """The arrow that ends at each row's start on its lane."""
    places = np.concatenate(
        (
            np.stack((rows.process[work], rows.thread[work], rows.start_ns[work])),
            np.stack((ends.process, ends.thread, ends.t_ns)),
        ),
        axis=1,
    )
    _, code = np.unique(places, axis=1, return_inverse=True)
    code = code.reshape(-1)
    return _index_in(code[len(work) :], code[: len(work)])


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


def _calls_at(rows: Rows, lanes: Lanes, thread: Int64, t_ns: Int64) -> Int64:
    """The recorded call that begins at each time on its thread, -1 where there is none."""
    calls = np.flatnonzero(lanes.is_call)
    places = np.concatenate((np.stack((rows.thread[calls], rows.start_ns[calls])), np.stack((thread, t_ns))), axis=1)
    _, code = np.unique(places, axis=1, return_inverse=True)
    code = code.reshape(-1)
    index = _index_in(code[: len(calls)], code[len(calls) :])
    return np.where(index >= 0, calls[np.maximum(index, 0)], -1) if len(calls) else index
