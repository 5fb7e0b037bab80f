"""Costs of ops and messages of whole steps, from when they began and ended: the matrix by which steps are replayed.

Times of ops without what unequal rows of experts add to them: as if each rank's experts had as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.explain.critical_path import Bindings
from pptrace.analysis.explain.inner_waits import InnerWaits, holds_of
from pptrace.analysis.explain.rank_messages import CALLS
from pptrace.analysis.explain.step_times import UNKNOWN, StepTimes, numbers_of_whole
from pptrace.analysis.matrix.step_matrix import StepMatrix, sums_by_row
from pptrace.model.tables import Bool, Int64
from pptrace.schedule.message_graph import Graph
from pptrace.slices import Slice

if TYPE_CHECKING:
    from pptrace.analysis.experts.routing import Routing


def costs_of_windows(
    times: StepTimes, bindings: Bindings, waits: InnerWaits, outside: Slice, collected_before: Int64
) -> StepMatrix:
    """The costs of windows that have every op of the plan, with the waits that were measured.

    ``bindings`` tell from when each op had what it needs, ``waits`` are those inside ops, ``outside`` is what else the ranks
    did, ``collected_before`` how long garbage collections kept each op.
    """
    ranks = np.array([window.ranks for window in times.windows], dtype=np.int64)
    delays = times.start - bindings.ready - bindings.moving
    together = (times.recorded != times.transfer) & (times.arrival != UNKNOWN)  # taken to cost other than was recorded
    ranks_of_ops, by_step = ranks[:, times.table.rank], np.argsort(waits.step, kind="stable")
    inside = {"window": waits.step, "row": waits.row, "ns": waits.ns, "longer": waits.longer}
    inside |= {"rank": ranks_of_ops[waits.late_step, waits.late_row], "late_row": waits.late_row}
    return StepMatrix(
        table=times.table,
        step=np.array([window.step for window in times.windows], dtype=np.int64),
        ranks=ranks,
        spans=times.finish - times.begin,
        durations=times.durations,
        inner=times.communication,
        delays=delays,
        moving=bindings.moving,
        moved_with=times.moved_with,
        collected_before=np.minimum(collected_before, delays),
        collected_inside=np.minimum(times.collected, times.durations),
        transfers=np.where(times.arrival == UNKNOWN, -1, times.transfer),
        sender_is_last=times.sender_is_last,
        outside=outside,
        holds=holds_of(waits, ranks_of_ops),
        waits=Slice({name: column[by_step] for name, column in inside.items()}),
        moved_together=_cells(together, "message", ns=times.recorded),
        held_by_starts=_cells(bindings.held != 0, "row", ns=bindings.held, by=bindings.held_by),
        receiving=receiving_of(times, bindings),
        exposed=times.exposed,
    )


def along_graph(
    matrix: StepMatrix,
    graph: Graph,
    times: StepTimes,
    bindings: Bindings,
    ranks: Sequence[Slice],
    is_whole: Bool,
    collected: Int64,
) -> StepMatrix:
    """The costs where messages hold up ranks along a graph of the plan, with how late calls are posted.

    Args:
        matrix, times, bindings: of the whole windows.
        ranks: the calls of each rank in all windows (:func:`pptrace.analysis.explain.rank_messages.calls_of`).
        is_whole: which of all windows are.
        collected: how long garbage collections kept each op, shape (whole windows, rows), ns.
    """
    calls = Slice.joined(ranks)
    window, end, free, called, of_collections = (calls[name] for name in CALLS)
    call = graph.call_of_end[end]
    known = np.flatnonzero(is_whole[window] & (call >= 0))
    window, call, free, called = numbers_of_whole(is_whole)[window[known]], call[known], free[known], called[known]
    row = graph.call_row[call]
    waited = np.minimum(called, times.start[window, row]) - np.maximum(free, bindings.ready[window, row])

    def longest(ns: Int64) -> Int64:
        """The longest of the messages that are posted together."""
        of_calls = np.zeros((len(times.start), len(graph.call_row)), dtype=np.int64)
        np.maximum.at(of_calls, (window, call), ns)
        return of_calls

    def by_row(of_calls: Int64) -> Int64:
        return sums_by_row(of_calls, graph.call_row, len(times.table))

    posted = longest(called - free)
    before = np.minimum(by_row(longest(waited)), matrix.delays)
    posting = replace(matrix, graph=graph, posted=posted, before_posting=before)
    collected = np.maximum(collected, by_row(longest(of_collections[known])))
    return replace(posting, collected_before=np.minimum(collected, posting.lateness))


def receiving_of(times: StepTimes, bindings: Bindings) -> Slice:
    """Parts of delays in which kernels still received what ops read although all that they carry had been sent, ns."""
    table = times.table
    ns = np.zeros(times.start.shape, dtype=np.int64)
    entries = np.flatnonzero(table.dep_is_message & (table.dep >= 0))
    reader, message = table.dep_reader[entries], table.dep_message[entries]
    could_run = (bindings.ready + bindings.moving)[:, reader]
    until = np.minimum(times.received[:, message], times.start[:, reader])
    still = np.where(until > times.sent[:, message], until - np.maximum(times.sent[:, message], could_run), 0)
    np.maximum.at(ns.T, reader, still.T)
    return _cells(ns != 0, "row", ns=ns)


def _cells(where: Bool, name: str, **matrices: Int64) -> Slice:
    """The cells of matrices that a mask of their shape (windows, …) marks, as rows of a table; ``name`` is their second index."""
    window, index = np.nonzero(where)
    return Slice({"window": window, name: index, **{key: matrix[window, index] for key, matrix in matrices.items()}})


def equal_rows(times: StepTimes, matrix: StepMatrix, routing: Routing | None) -> tuple[Int64, Int64, Int64]:
    """(computing and communication of ops with equal rows, what unequal ones add to both together), shape (windows, rows), ns.

    All three sum to what ops compute and communicate; where nothing is known of rows the third is 0. ``times`` and ``matrix``
    are of the same windows.
    """
    if routing is None:
        return times.computing, times.communication, np.zeros_like(times.computing)
    change = routing.of_windows(matrix.table, matrix.ranks, matrix.step)
    both = times.computing + times.communication
    shorter = np.minimum(matrix.spread(change), both)
    waits = shorter - matrix.spread(change, "compute")
    communication = np.clip(times.communication - waits, 0, both - shorter)
    return both - shorter - communication, communication, shorter


def waits_with_equal_rows(waits: InnerWaits, saved: Int64) -> InnerWaits:
    """The waits inside ops without those for ranks with more rows: equal ones save so much communication of each op, ns."""
    if not saved.any() or not len(waits.ns):
        return waits
    waited = waits.sums(saved.shape)
    share = np.minimum(np.clip(waited - saved, 0, None) / np.maximum(waited, 1), 1.0)
    return replace(waits, ns=np.rint(waits.ns * share[waits.step, waits.row]).astype(np.int64))
