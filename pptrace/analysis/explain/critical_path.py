"""The critical path of a step: the chain of ops, transfers and idle times that ends with its last op.

Walks back in time along what ops waited for, many at once.

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
from pptrace.analysis.explain.step_times import StepTimes
from pptrace.analysis.whole_run import CriticalPath, PathOps
from pptrace.model.tables import Bool, Int64
from pptrace.schedule.actions import KINDS
from pptrace.schedule.plan_table import NONE
from pptrace.slices import group_sums


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


def critical_paths(
    times: StepTimes, bindings: Bindings, windows: Int64, host_before: Int64
) -> tuple[list[CriticalPath], Int64]:
    """The critical path of each of some windows, and how much of it lies in each op, shape (windows, rows).

    ``host_before`` (steps, rows) is what of the idle time before each op is the host's; with the host's part of ops it is the
    path's ``host``.
    The parts of a path sum to the span. A transfer counts for the stage that sent it, an idle time for that of the op after it.
    """
    table = times.table
    last = times.end[windows].argmax(axis=1)
    work, transfer, idle, host = (np.zeros((len(windows), len(table)), dtype=np.int64) for _ in range(4))
    start = times.start[windows, last]
    work[np.arange(len(windows)), last] = times.end[windows, last] - start
    for hop in Walks(times, bindings).hops(windows * len(table) + last, start):
        number, row, source = hop.walk, hop.cell % len(table), hop.source % len(table)
        of_host = np.minimum(host_before.reshape(-1)[hop.cell], hop.idle)
        idle[number, row] += hop.idle - of_host
        host[number, row] += of_host
        transfer[number, source] += hop.transfer
        work[number, source] += hop.work
    inside = np.minimum(times.host[windows], work)
    work, host = work - inside, host + inside
    codes = np.unique(table.kind).tolist()
    parts = {KINDS[code].value: work[:, table.kind == code].sum(axis=1) for code in codes}
    parts |= {"transfer": transfer.sum(axis=1), "idle": idle.sum(axis=1)}
    if times.knows_host[windows].any() or host.any():
        parts["host"] = host.sum(axis=1)
    by_stage = group_sums(work + transfer + idle + host, table.stage, table.num_stages).tolist()
    stage_and_kind, of_row = np.unique(table.stage * np.int64(len(KINDS)) + table.kind, return_inverse=True)
    ops = [(number // len(KINDS), KINDS[number % len(KINDS)].value) for number in stage_and_kind.tolist()]
    of_ops = group_sums(work, of_row.ravel(), len(ops)).tolist()
    spans = (times.finish - times.begin)[windows].tolist()
    return [
        CriticalPath(
            span,
            {name: int(ns[index]) for name, ns in parts.items()},
            dict(enumerate(by_stage[index])),
            tuple(PathOps(*op, ns) for op, ns in zip(ops, of_ops[index], strict=True) if ns),
        )
        for index, span in enumerate(spans)
    ], work + inside
