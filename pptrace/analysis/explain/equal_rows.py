"""Times of ops without what unequal rows of experts add to them: as if each rank's experts had as many rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pptrace.analysis.explain.inner_waits import InnerWaits
from pptrace.analysis.explain.step_times import StepTimes
from pptrace.model.tables import Int64

if TYPE_CHECKING:
    from pptrace.analysis.experts.routing import Routing


@dataclass(frozen=True, slots=True, eq=False)
class EqualRows:
    """Computing and communication of ops with equal rows, and what unequal ones add to both together (``routing``), ns.

    All have the shape (windows, rows) of ``times``, whose sum of both is that of these three.
    """

    times: StepTimes
    computing: Int64
    communication: Int64
    routing: Int64

    def left_of(self, waits: InnerWaits) -> InnerWaits:
        """The waits inside ops, of which those for ranks with more rows are taken off."""
        if not self.routing.any() or not len(waits.ns):
            return waits
        held = waits.sums(self.routing.shape)
        left = np.clip(held - (self.times.communication - self.communication), 0, None)
        share = np.minimum(left / np.maximum(held, 1), 1.0)
        return replace(waits, ns=np.rint(waits.ns * share[waits.step, waits.row]).astype(np.int64))


def equal_rows(times: StepTimes, routing: Routing | None) -> EqualRows:
    """The times with equal rows; as they are where nothing is known of rows."""
    if routing is None or not len(times.windows):
        return EqualRows(times, times.computing, times.communication, np.zeros_like(times.computing))
    ranks = np.array([window.ranks for window in times.windows], dtype=np.int64)
    steps = np.array([window.step for window in times.windows], dtype=np.int64)
    change = routing.of_windows(times.table, ranks, steps)
    whole = times.computing + times.communication
    shorter, compute = np.zeros_like(whole), np.zeros_like(whole)
    shorter[change["window"], change["row"]] = change["ns"]
    compute[change["window"], change["row"]] = change["compute"]
    shorter = np.minimum(shorter, whole)
    communication = np.clip(times.communication - (shorter - compute), 0, whole - shorter)
    return EqualRows(times, whole - shorter - communication, communication, shorter)
