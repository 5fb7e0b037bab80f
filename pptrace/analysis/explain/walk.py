"""Walks back in time along what ops waited for, many at once.

A walk begins at the start of an op and goes back through pieces that follow one another without gap or overlap: the time in
which the op could have run and did not (*idle*), the time that what it waited for took to reach it, or that fetching it took
(*transfer*), and the op that it waited for. Clocks that are a little off shorten a piece, to 0 at least; the pieces always add
up to the time walked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pptrace.analysis.explain.binding import Bindings
from pptrace.analysis.explain.step_times import Bool, StepTimes
from pptrace.model.tables import Int64
from pptrace.schedule.plan_table import NONE


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """One hop of those walks that go on: ``walk`` numbers them.

    Each is at the op of ``cell`` (step × rows + row), which waited for that of ``source``; where it waited for none, not
    ``has_source``, that is the step's first cell. ``idle`` and ``transfer`` are the lengths of the pieces between them,
    ``work`` that of the source, which began at ``begin``; ns.
    """

    walk: Int64
    cell: Int64
    source: Int64
    has_source: Bool
    idle: Int64
    transfer: Int64
    work: Int64
    begin: Int64

    def __len__(self) -> int:
        return len(self.walk)


class Walks:
    """Walks back through some steps, hop by hop.

    A walk ends where its op waited for nothing. What is not idle there (the time before the window) is in no piece.
    """

    def __init__(self, times: StepTimes, bindings: Bindings) -> None:
        self.most_hops = len(times.table) + 1
        """No more ops than there are, whatever wrong clocks make of their order."""
        first = np.arange(len(times.start))[:, np.newaxis] * len(times.table)
        self._source = (np.maximum(bindings.row, 0) + first).reshape(-1)
        self._has_source = (bindings.row != NONE).reshape(-1)
        self._ready, self._is_message = bindings.ready.reshape(-1), bindings.is_message.reshape(-1)
        self._start, self._end, self._moving = (
            matrix.reshape(-1) for matrix in (times.start, times.end, bindings.moving)
        )

    def hops(self, cell: Int64, cursor: Int64) -> Iterator[Hop]:
        """All hops of walks from the ops of some cells, at the times ``cursor``."""
        hop = self.first(cell, cursor)
        for _ in range(self.most_hops):
            if not len(hop):
                return
            yield hop
            hop = self.after(hop)

    def first(self, cell: Int64, cursor: Int64) -> Hop:
        """The first hop of these walks."""
        return self._hop(np.arange(len(cell)), cell, cursor)

    def _hop(self, walk: Int64, cell: Int64, cursor: Int64) -> Hop:
        source, has_source = self._source.take(cell), self._has_source.take(cell)
        begun, is_message = np.minimum(cursor, self._ready.take(cell)), self._is_message.take(cell)
        ended = np.where(has_source, self._end.take(source), begun)
        sent = np.where(is_message, np.minimum(begun, ended), begun)
        begin = np.where(has_source, np.minimum(sent, self._start.take(source)), sent)
        moving = np.where(is_message, 0, np.minimum(self._moving.take(cell), cursor - begun))
        idle, transfer = cursor - begun - moving, begun - sent + moving
        return Hop(walk, cell, source, has_source, idle, transfer, sent - begin, begin)

    def after(self, hop: Hop, continues: Bool | None = None) -> Hop:
        """The next hop of the walks that waited for something, or of those of them that ``continues`` marks."""
        on = np.flatnonzero(hop.has_source if continues is None else hop.has_source & continues)
        return self._hop(hop.walk[on], hop.source[on], hop.begin[on])
