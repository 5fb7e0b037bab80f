"""The costs of whole steps, which are looked at together when every step of the run is explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pptrace.analysis.explain.binding import Bindings
from pptrace.analysis.explain.inner_waits import InnerWaits, holds_of
from pptrace.analysis.explain.rank_messages import CALLS
from pptrace.analysis.explain.step_times import UNKNOWN, Bool, StepTimes
from pptrace.analysis.message_graph import Graph
from pptrace.analysis.stragglers.costs import MeasuredCosts, sums_by_row
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
    posted: tuple[Int64, Int64] | None = None,
) -> list[MeasuredCosts | None]:
    """The costs of each step; None where it has fewer windows than ``sizes`` says, as the others lack an op.

    ``bindings`` tell from when each op had what it needs, ``waits`` are those inside ops, ``outside`` is what else the ranks
    did, ``step`` the index of each window's step, ``collected_before`` how long garbage collections kept each op; all windows are
    whole. ``posted`` is what :func:`posted_calls` finds.
    """
    durations = _compact(times.durations)
    transfers = _compact(np.where(times.arrival == UNKNOWN, -1, times.transfer))
    delays = _compact(times.start - bindings.ready - bindings.moving)
    moving, moved_with = _compact(bindings.moving), _compact(times.moved_with)
    number = np.array([window.step for window in times.windows], dtype=np.int64)
    ranks = np.array([window.ranks for window in times.windows], dtype=np.int64)
    holds = holds_of(waits, ranks[:, times.table.rank])
    before, inside = _compact(np.minimum(collected_before, delays)), _compact(np.minimum(times.collected, durations))
    costs = (durations, transfers, delays, times.sender_is_last, moving, moved_with, _compact(times.communication))
    every = MeasuredCosts(
        times.table,
        number,
        ranks,
        *costs,
        before,
        inside,
        times.finish - times.begin,
        outside,
        holds,
        _moved_together(times),
        _held_by_starts(bindings),
    )
    if posted is not None:
        every = replace(every, posted=_compact(posted[0]), before_posting=_compact(posted[1]))
    of_steps = [np.flatnonzero(step == index) for index in range(len(sizes))]
    return [
        every.of_windows(windows) if len(windows) == size else None
        for windows, size in zip(of_steps, sizes, strict=True)
    ]


def posted_calls(
    graph: Graph, times: StepTimes, bindings: Bindings, ranks: Sequence[Slice], is_whole: Bool
) -> tuple[Int64, Int64]:
    """Lateness of each call of a graph, and the part of each op's delay that its calls take, ns: ``posted`` and
    ``before_posting`` of :class:`MeasuredCosts`.

    Args:
        graph: of the plan.
        times, bindings: of the whole windows.
        ranks: the calls of each rank in all windows (:func:`pptrace.analysis.explain.rank_messages.calls_of`).
        is_whole: which of all windows are.
    """
    window, end, free, called = (np.concatenate([rank[name] for rank in ranks]) for name in CALLS)
    call = graph.call_of_end[end]
    known = is_whole[window] & (call >= 0)
    window, call, free, called = (np.cumsum(is_whole) - 1)[window[known]], call[known], free[known], called[known]
    row = graph.call_row[call]
    posted = np.zeros((len(times.start), len(graph.call_row)), dtype=np.int64)
    before = np.zeros_like(posted)
    np.maximum.at(posted, (window, call), called - free)
    begun = np.maximum(free, bindings.ready[window, row])
    np.maximum.at(before, (window, call), np.minimum(called, times.start[window, row]) - begun)
    delays = times.start - bindings.ready - bindings.moving
    return posted, np.minimum(sums_by_row(before, graph.call_row, len(times.table)), delays)


def _moved_together(times: StepTimes) -> Slice:
    """Cost of each message for its reader as recorded, where that is not what it is taken to cost, ns."""
    window, message = np.nonzero((times.recorded != times.transfer) & (times.arrival != UNKNOWN))
    return Slice({"window": window, "message": message, "ns": times.recorded[window, message]})


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
