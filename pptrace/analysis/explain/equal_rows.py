"""Times of ops without what unequal rows of experts add to them: as if each rank's experts had as many rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pptrace.analysis.explain.inner_waits import InnerWaits
from pptrace.analysis.explain.step_times import StepTimes
from pptrace.model.tables import Int64

if TYPE_CHECKING:
    from pptrace.analysis.experts.routing import Routing


def equal_rows(times: StepTimes, routing: Routing | None) -> tuple[Int64, Int64, Int64]:
    """(computing and communication of ops with equal rows, what unequal ones add to both together), shape (windows, rows), ns.

    All three sum to what ops compute and communicate; where nothing is known of rows the third is 0.
    """
    if routing is None or not len(times.windows):
        return times.computing, times.communication, np.zeros_like(times.computing)
    ranks = np.array([window.ranks for window in times.windows], dtype=np.int64)
    steps = np.array([window.step for window in times.windows], dtype=np.int64)
    change = routing.of_windows(times.table, ranks, steps)
    both = times.computing + times.communication
    shorter, compute = np.zeros_like(both), np.zeros_like(both)
    shorter[change["window"], change["row"]] = change["ns"]
    compute[change["window"], change["row"]] = change["compute"]
    shorter = np.minimum(shorter, both)
    communication = np.clip(times.communication - (shorter - compute), 0, both - shorter)
    return both - shorter - communication, communication, shorter


def waits_with_equal_rows(waits: InnerWaits, saved: Int64) -> InnerWaits:
    """The waits inside ops without those for ranks with more rows: equal ones save so much communication of each op, ns."""
    if not saved.any() or not len(waits.ns):
        return waits
    waited = waits.sums(saved.shape)
    share = np.minimum(np.clip(waited - saved, 0, None) / np.maximum(waited, 1), 1.0)
    return replace(waits, ns=np.rint(waits.ns * share[waits.step, waits.row]).astype(np.int64))
