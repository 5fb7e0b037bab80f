"""The costs of whole steps, which are looked at together when every step of the run is explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pptrace.analysis.explain.binding import Bindings
from pptrace.analysis.explain.inner_waits import InnerWaits, holds_of
from pptrace.analysis.explain.rank_messages import CALLS
from pptrace.analysis.explain.step_times import UNKNOWN, Bool, StepTimes
from pptrace.analysis.matrix.step_matrix import StepMatrix, sums_by_row
from pptrace.analysis.message_graph import Graph
from pptrace.model.tables import Int64
from pptrace.slices import Slice


def costs_of_steps(
    times: StepTimes,
    bindings: Bindings,
    waits: InnerWaits,
    outside: Slice,
    step: Int64,
    sizes: Sequence[int],
    collected_before: Int64,
    posted: PostedCalls | None = None,
) -> list[StepMatrix | None]:
    """The costs of each step; None where it has fewer windows than ``sizes`` says, as the others lack an op.

    ``bindings`` tell from when each op had what it needs, ``waits`` are those inside ops, ``outside`` is what else the ranks
    did, ``step`` the index of each window's step, ``collected_before`` how long garbage collections kept each op; all windows are
    whole. ``posted`` is what :func:`posted_calls` finds.
    """
    durations = _compact(times.durations)
    delays = times.start - bindings.ready - bindings.moving
    ranks = np.array([window.ranks for window in times.windows], dtype=np.int64)
    late = delays if posted is None else delays + posted.late - posted.before_posting
    if posted is not None:
        collected_before = np.maximum(collected_before, posted.collected)
    every = StepMatrix(
        table=times.table,
        step=np.array([window.step for window in times.windows], dtype=np.int64),
        ranks=ranks,
        spans=times.finish - times.begin,
        durations=durations,
        inner=_compact(times.communication),
        delays=_compact(delays),
        moving=_compact(bindings.moving),
        moved_with=_compact(times.moved_with),
        collected_before=_compact(np.minimum(collected_before, late)),
        collected_inside=_compact(np.minimum(times.collected, durations)),
        transfers=_compact(np.where(times.arrival == UNKNOWN, -1, times.transfer)),
        sender_is_last=times.sender_is_last,
        outside=outside,
        holds=holds_of(waits, ranks[:, times.table.rank]),
        moved_together=_moved_together(times),
        held_by_starts=_held_by_starts(bindings),
        receiving=_receiving(times, bindings),
        posted=None if posted is None else _compact(posted.posted),
        before_posting=None if posted is None else _compact(posted.before_posting),
    )
    of_steps = [np.flatnonzero(step == index) for index in range(len(sizes))]
    return [
        every.of_windows(windows) if len(windows) == size else None
        for windows, size in zip(of_steps, sizes, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PostedCalls:
    """Lateness of calls, ns: ``posted`` and ``before_posting`` of :class:`StepMatrix`.

    By the row that each call belongs to, shape (windows, rows), ``late`` is how late calls are together, and ``collected`` the
    part of it that garbage collections took.
    """

    posted: Int64
    before_posting: Int64
    late: Int64
    collected: Int64


def posted_calls(
    graph: Graph, times: StepTimes, bindings: Bindings, ranks: Sequence[Slice], is_whole: Bool
) -> PostedCalls:
    """The calls of a graph in whole windows.

    Args:
        graph: of the plan.
        times, bindings: of the whole windows.
        ranks: the calls of each rank in all windows (:func:`pptrace.analysis.explain.rank_messages.calls_of`).
        is_whole: which of all windows are.
    """
    window, end, free, called, collected = (np.concatenate([rank[name] for rank in ranks]) for name in CALLS)
    call = graph.call_of_end[end]
    known = np.flatnonzero(is_whole[window] & (call >= 0))
    window, call, free, called = (np.cumsum(is_whole) - 1)[window[known]], call[known], free[known], called[known]
    row = graph.call_row[call]
    waited = np.minimum(called, times.start[window, row]) - np.maximum(free, bindings.ready[window, row])

    def longest(ns: Int64) -> Int64:
        """The longest of the messages that are posted together."""
        of_calls = np.zeros((len(times.start), len(graph.call_row)), dtype=np.int64)
        np.maximum.at(of_calls, (window, call), ns)
        return of_calls

    posted = longest(called - free)
    late, before, of_collections = (
        sums_by_row(of_calls, graph.call_row, len(times.table))
        for of_calls in (posted, longest(waited), longest(collected[known]))
    )
    delays = times.start - bindings.ready - bindings.moving
    return PostedCalls(posted, np.minimum(before, delays), late, of_collections)


def _moved_together(times: StepTimes) -> Slice:
    """Cost of each message for its reader as recorded, where that is not what it is taken to cost, ns."""
    window, message = np.nonzero((times.recorded != times.transfer) & (times.arrival != UNKNOWN))
    return Slice({"window": window, "message": message, "ns": times.recorded[window, message]})


def _receiving(times: StepTimes, bindings: Bindings) -> Slice:
    """Parts of delays in which kernels still received what ops read although all that they carry had been sent, ns."""
    table = times.table
    ns = np.zeros(times.start.shape, dtype=np.int64)
    entries = np.flatnonzero(table.dep_is_message & (table.dep >= 0))
    reader, message = table.dep_reader[entries], table.dep_message[entries]
    could_run = (bindings.ready + bindings.moving)[:, reader]
    until = np.minimum(times.received[:, message], times.start[:, reader])
    still = np.where(until > times.sent[:, message], until - np.maximum(times.sent[:, message], could_run), 0)
    np.maximum.at(ns.T, reader, still.T)
    window, row = np.nonzero(ns)
    return Slice({"window": window, "row": row, "ns": ns[window, row]})


def _held_by_starts(bindings: Bindings) -> Slice:
    """Waits for ranks that had run nothing yet, ns."""
    window, row = np.nonzero(bindings.held)
    return Slice({"window": window, "row": row, "ns": bindings.held[window, row]})


def _compact(times: Int64) -> Int64:
    """The same numbers in as few bytes as they need: the costs of all steps are kept."""
    least, most = (int(times.min()), int(times.max())) if times.size else (0, 0)
    for dtype in (np.int8, np.int32):
        if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
            return times.astype(dtype)
    return times
