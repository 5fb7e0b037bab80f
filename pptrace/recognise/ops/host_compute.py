"""Compute time of host threads inside ranges that include waiting; places of ops that launch nothing; and evaluation passes.

Ranges of other frameworks hold the wait for an op's input, and the posting of its output, besides the op itself: label times
were up to 1.8 times the compute. Without device events the operators that ran say when that was.

Of ops that launch nothing: the input gradient of a first stage needs none: torch's runtime runs the op, and nothing of it on the
device. The host runs ahead, so that the times of its range lie before the device work of ops that the rank ran first.

``schedule.eval()`` of torch.distributed.pipelining opens the ranges of backwards and of their messages as training does, and
runs nothing inside them.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.intervals import reduce_ranges, union
from pptrace.model.device import DeviceWork
from pptrace.model.tables import COMPUTE_KINDS, UNKNOWN, Bool, Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.ops.infer_from_operators import engine_nodes
from pptrace.recognise.ops.label_columns import Ranges
from pptrace.recognise.ops.label_steps import LaunchIndex, counted_steps
from pptrace.recognise.ops.named_ranges import CHECKPOINT, DATA, LOGGING, found_ranges
from pptrace.schedule.actions import Kind
from pptrace.slices import last_like, reduce_groups, rows_among

_NOT_COMPUTE = re.compile(r"^(?:c10d::|record_param_comms|c10d_functional|_c10d|gloo:|nccl:)")


def _computing(events: Events) -> npt.NDArray[np.intp]:
    """The operators that compute; what they call of communication is still in them."""
    rows = np.flatnonzero(events.category == Category.CPU_OP)
    return rows[~events.named(_NOT_COMPUTE, rows)[events.name_id[rows]]]


def computing_spans(events: Events, threads: Int64, starts_ns: Int64, ends_ns: Int64) -> tuple[Bool, Int64, Int64]:
    """The operators, communication apart, of each stretch [start_ns, end_ns) of a thread: whether one began in it, the start of
    the first and the end of the last.
    """
    ran, first, last = np.zeros(len(threads), dtype=np.bool_), starts_ns.copy(), ends_ns.copy()
    for thread, operators in events.rows_by_thread(_computing(events)).items():
        starts, rows = events.start_ns[operators], np.flatnonzero(threads == thread)
        low, high = np.searchsorted(starts, starts_ns[rows]), np.searchsorted(starts, ends_ns[rows])
        rows, low, high = rows[low < high], low[low < high], high[low < high]
        if len(rows):
            ran[rows], first[rows] = True, starts[low]
            last[rows] = np.minimum(reduce_ranges(np.maximum, events.ends_of(operators), low, high), ends_ns[rows])
    return ran, first, last


def host_work(events: Events) -> Int64:
    """The time of the computing operators of all threads of a rank, but for those that load data, save or log: what ranges of
    that name call on their thread. It is a set of intervals on the rank's own clock (:mod:`pptrace.intervals`).
    """
    rows = _computing(events)
    for kind in (DATA, CHECKPOINT, LOGGING):
        others = found_ranges(events, kind)
        rows = rows[~events.are_within(others, events.thread[rows], events.start_ns[rows])] if len(others) else rows
    return union(events.start_ns[rows], events.ends_of(rows))


def with_places_on_device(ops: pd.DataFrame, comms: pd.DataFrame, work: DeviceWork) -> pd.DataFrame:
    """The ops of one rank, of which those that launch nothing take no time, where the device came to them: when the host
    had begun them, the compute launched before them was over, and their message was there.

    Only ops of a kind and stage that never launches are moved, and only up to later compute: where other ops of the
    kind have kernels, or none follows, device events may be lost, and the host's times stay. Their ``clock`` stays "host",
    since no device event shows them.
    """
    rows = _launching_nothing(ops) if len(work) else np.empty(0, dtype=np.int64)
    if not len(rows):
        return ops
    start, end = ops["start_ns"].to_numpy(copy=True), ops["end_ns"].to_numpy(copy=True)
    before, after, is_followed = LaunchIndex(work).compute_around(start[rows], end[rows])
    rows, before, after = rows[is_followed], before[is_followed], after[is_followed]
    # Ends of the kernels that received what each op reads; 0 where it reads no message or none is known.
    received = comms[rows_among(comms["kind"], ("recv",)) & rows_among(comms["clock"], ("device",))]
    moving = ops.iloc[rows]
    read = _reading(moving, rows_among(moving["kind"], (Kind.F,)))
    moved = _reading(received, rows_among(received["direction"], ("F",)))
    arrivals = np.append(received["end_ns"].to_numpy(), 0)[last_like(read, moved)]
    start[rows] = end[rows] = np.minimum(np.maximum(np.maximum(start[rows], before), arrivals), after)
    return ops.assign(start_ns=start, end_ns=end)


def _launching_nothing(ops: pd.DataFrame) -> Int64:
    """Rows of ops of which none of the same kind and stage launched anything."""
    is_compute, on_device = rows_among(ops["kind"], COMPUTE_KINDS), rows_among(ops["clock"], ("device",))
    if not (is_compute & ~on_device).any():
        return np.empty(0, dtype=np.int64)
    number = ops.groupby(["kind", "stage", "chunk"], observed=True, sort=False).ngroup().to_numpy()
    launches = np.bincount(number, weights=on_device) > 0
    return np.flatnonzero(is_compute & ~launches[number])


def _reading(table: pd.DataFrame, is_forward: Bool) -> list[npt.NDArray[Any]]:
    """Columns that an op and its message share. Messages have a chunk only where no label names the stage."""
    step, stage, chunk, microbatch = (table[name].to_numpy() for name in ("step", "stage", "chunk", "microbatch"))
    return [step, stage, np.where(stage < 0, chunk, UNKNOWN), microbatch, is_forward]


_BACKWARD = [kind.code for kind in (Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B)]


def without_evaluations(
    events: Events, ranges: Ranges, launches: LaunchIndex
) -> tuple[Ranges, tuple[Int64, Int64], tuple[str, ...]]:
    """Drop passes whose backwards ran nothing, with the begin and the end of each, and a warning. If none trained, drop only the
    backwards.

    A stage whose backwards compute nothing (it is frozen, say) receives gradients in them nevertheless.
    """
    is_backward, none = np.isin(ranges.kind, _BACKWARD), (ranges.start_ns[:0], ranges.end_ns[:0])
    if not is_backward.any():
        return ranges, none, ()
    is_forward = ranges.kind == Kind.F.code
    ran = _ran(events, ranges, launches, np.flatnonzero(is_backward | is_forward))
    if ran[is_backward].all() or not ran[is_forward].any():
        return ranges, none, ()
    order = np.argsort(ranges.start_ns, kind="stable")
    number = np.empty(len(ranges), dtype=np.int64)
    number[order] = counted_steps(ranges.where(order))
    passes, pass_of = np.unique(number[ranges.has_actions], return_inverse=True)
    of_pass = np.full(len(ranges), -1)
    of_pass[ranges.has_actions] = pass_of

    def has(chosen: Bool) -> Bool:
        return np.bincount(of_pass[chosen], minlength=len(passes)) > 0

    is_evaluation = has(is_backward) & has(is_forward & ran) & ~has(is_backward & ran)
    if not is_evaluation.any():
        return ranges, none, ()
    left_out = np.append(is_evaluation, False)[of_pass]
    if is_evaluation.all():
        line = "the ranges of backwards hold nothing: forwards alone ran (evaluation or inference)"
        return ranges.where(~(left_out & is_backward)), none, (line,)
    begin, end = (
        reduce_groups(first, times[left_out], of_pass[left_out], len(passes))[is_evaluation]
        for first, times in ((np.minimum, ranges.start_ns), (np.maximum, ranges.end_ns))
    )
    line = f"left out {is_evaluation.sum()} of {len(passes)} passes as evaluation: their backwards run nothing"
    return ranges.where(~left_out), (begin, end), (line,)


def _ran(events: Events, ranges: Ranges, launches: LaunchIndex, rows: Int64) -> Bool:
    """Return whether anything ran inside each of some ranges: an operator of its thread, autograd's engine on any, or a kernel it
    launched.
    """
    chosen = ranges.where(rows)
    ran = _any_begins(events.start_ns[engine_nodes(events)], chosen.start_ns, chosen.end_ns)
    for thread, operators in events.rows_by_thread(np.flatnonzero(events.category == Category.CPU_OP)).items():
        of_thread = np.flatnonzero(chosen.thread == thread)
        stretch = (chosen.start_ns[of_thread], chosen.end_ns[of_thread])
        ran[of_thread] |= _any_begins(events.start_ns[operators], *stretch)
    for is_communication in (True, False):
        ran |= launches.spans(chosen.start_ns, chosen.end_ns, is_communication).launched
    of_all = np.zeros(len(ranges), dtype=np.bool_)
    of_all[rows] = ran
    return of_all


def _any_begins(times: Int64, starts: Int64, ends: Int64) -> Bool:
    """Return whether any of the times is in each stretch [start, end)."""
    begins: Bool = np.searchsorted(times, starts) != np.searchsorted(times, ends)
    return begins
