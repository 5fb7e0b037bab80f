"""Walks back in time along what ops waited for, many at once.

A walk begins at the start of an op and goes back through pieces that follow one another without gap or overlap: the time in
which the op could have run and did not (*idle*), the time that what it waited for took to reach it, or that fetching it took
(*transfer*), and the op that it waited for. Clocks that are a little off shorten a piece, to 0 at least; the pieces always add
up to the time walked.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from pptrace.analysis.explain.binding import Bindings
from pptrace.analysis.explain.step_times import Bool, StepTimes
from pptrace.model.tables import Int64
from pptrace.schedule.plan_table import NONE


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """One hop of those walks that go on: ``walk`` numbers them.

    Each is in step ``step`` at the op ``row``, which waited for ``source`` (−1: nothing). ``idle`` and ``transfer`` are the
    lengths of the pieces between them, ``work`` that of the source; ns.
    """

    walk: Int64
    step: Int64
    row: Int64
    source: Int64
    idle: Int64
    transfer: Int64
    work: Int64


def walk_back(
    times: StepTimes, bindings: Bindings, step: Int64, row: Int64, cursor: Int64
) -> Generator[Hop, Bool | None, None]:
    """Walk back from the ops ``row`` of steps ``step``, at times ``cursor``; send a mask of the walks of a hop that go on.

    A walk ends where its op waited for nothing. What is not idle there (the time before the window) is in no piece.
    """
    walk = np.arange(len(step))
    for _ in range(len(times.table) + 1):  # no more ops than there are, whatever wrong clocks make of their order
        if not len(walk):
            return
        source, ready = bindings.row[step, row], bindings.ready[step, row]
        has_source = source != NONE
        is_message = bindings.is_message[step, row]
        begun = np.minimum(cursor, ready)
        ended = np.where(has_source, times.end[step, source], begun)
        sent = np.where(is_message, np.minimum(begun, ended), begun)
        start = np.where(has_source, np.minimum(sent, times.start[step, source]), sent)
        moving = np.where(is_message, 0, np.minimum(bindings.moving[step, row], cursor - begun))
        idle, transfer = cursor - begun - moving, begun - sent + moving
        continues = yield Hop(walk, step, row, source, idle, transfer, sent - start)
        on = has_source if continues is None else has_source & continues
        walk, step, row, cursor = walk[on], step[on], source[on], start[on]
