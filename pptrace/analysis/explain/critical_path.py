"""The critical path of a step: the chain of ops, transfers and idle times that ends with its last op."""

from __future__ import annotations

import numpy as np

from pptrace.analysis.explain.binding import Bindings
from pptrace.analysis.explain.step_times import StepTimes
from pptrace.analysis.explain.walk import Walks
from pptrace.analysis.step_parts import CriticalPath, PathOps
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.slices import group_sums


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
    kinds = {str(kind): work[:, table.kind == kind.code] for kind in Kind if (table.kind == kind.code).any()}
    parts = {name: part.sum(axis=1) for name, part in kinds.items()}
    parts |= {"transfer": transfer.sum(axis=1), "idle": idle.sum(axis=1)}
    if times.knows_host[windows].any() or host.any():
        parts["host"] = host.sum(axis=1)
    by_stage = group_sums(work + transfer + idle + host, table.stage, table.num_stages).tolist()
    stage_and_kind, of_row = np.unique(table.stage * np.int64(len(Kind)) + table.kind, return_inverse=True)
    names = {kind.code: str(kind) for kind in Kind}
    ops = [(int(one) // len(Kind), names[int(one) % len(Kind)]) for one in stage_and_kind]
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
