"""Slack and critical path of every op of a run, as further columns of its table of ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.explain.binding import bindings_of
from pptrace.analysis.explain.rank_messages import MOVED, with_moved_times
from pptrace.analysis.explain.slack import meetings_of, slacks_of
from pptrace.analysis.explain.step_times import (
    IndexedWindows,
    RankTimes,
    numbers_of_whole,
    planned_rows,
    rows_in_steps,
    step_times,
)
from pptrace.analysis.steps.steps import PlannedStep
from pptrace.model.tables import COMPUTE_KINDS, MESSAGES, UNKNOWN, Int8, Int64
from pptrace.schedule.plan_table import PlanTable
from pptrace.slices import Slice, rows_among, slices_by_int
from pptrace.timeline.windows import StepWindow

_CELLS = 1 << 19
"""Ops of windows that are gone through together: more would take much memory."""


@dataclass(frozen=True, slots=True, eq=False)
class OpSlack:
    """``slack_ns`` and ``on_critical_path`` (1, 0) of each row of the run's ops, −1 where unknown."""

    slack_ns: Int64
    on_critical_path: Int8


def slack_of_ops(steps: Sequence[PlannedStep], data: AlignedRun) -> OpSlack:
    """Find the slack of the ops in those windows that have every op of their plan, and whose ranks' times compare."""
    found = OpSlack(np.full(len(data.ops), UNKNOWN, np.int64), np.full(len(data.ops), UNKNOWN, np.int8))
    if not data.lanes:
        return found
    windows_of_plan: dict[int, tuple[PlanTable, list[StepWindow]]] = {}
    for step in steps:
        if step.plan is not None:
            _, windows = windows_of_plan.setdefault(id(step.plan), (step.plan.table, []))
            windows.extend(window for window in step.windows if data.is_comparable(window))
    columns = ("rank", "step", "kind", "stage", "microbatch", "start_ns")
    ops = data.ops[list(columns)].assign(at=np.arange(len(data.ops)))
    rows = slices_by_int(ops[rows_among(ops["kind"], COMPUTE_KINDS)], "rank", ("step", "start_ns"))
    for table, windows in windows_of_plan.values():
        most = max(1, _CELLS // max(1, len(table)))
        for first in range(0, len(windows), most):
            _fill(found, table, IndexedWindows.of(windows[first : first + most]), data, rows)
    return found


def _fill(found: OpSlack, table: PlanTable, windows: IndexedWindows, data: AlignedRun, rows: dict[int, Slice]) -> None:
    """Fill in the ops of some windows of one plan."""
    ranks = [RankTimes.of(table, windows, rank, data) for rank in windows.of_rank]
    times = step_times(table, windows.windows, ranks)
    if not times.is_whole.any():
        return
    number, whole = numbers_of_whole(times.is_whole), times.whole()
    slack, on_path = slacks_of(whole, bindings_of(whole), meetings_of(_ends(windows, data, number)))
    for rank, indices in windows.of_rank.items():
        ops, window = rows_in_steps(rows[rank], windows.step[indices], indices)
        planned, of_whole = planned_rows(table, ops), number[window]
        known = (planned >= 0) & (of_whole >= 0)
        cells = of_whole[known], planned[known]
        found.slack_ns[ops["at"][known]] = slack[cells]
        found.on_critical_path[ops["at"][known]] = on_path[cells]


def _ends(windows: IndexedWindows, data: AlignedRun, number: Int64) -> Slice:
    """The ends of messages between ranks of one pipeline in its windows, as :func:`meetings_of` takes them."""
    parts = []
    for rank, indices in windows.of_rank.items():
        comms, window = rows_in_steps(data.rows.of_rank(rank).comms, windows.step[indices], indices)
        comms = with_moved_times(comms, window)
        is_message = (comms["axis"] == "pp") & comms.among("kind", MESSAGES) & (comms["match"] >= 0)
        is_message &= number[window] >= 0
        ends, place = comms.where(is_message), windows.windows[int(indices[0])].ranks.index(rank)
        columns = {name: ends[of] for name, of in _OF_ENDS.items()}
        columns |= {"window": number[window[is_message]], "is_send": ends["kind"] == "send"}
        parts.append(Slice(columns | {"rank": np.full(len(ends), place, dtype=np.int64)}))
    return Slice.joined(parts)


_OF_ENDS = {
    "match": "match",
    "ready": "start_ns",
    "asked": "asked_ns",
    "done": "end_ns",
    "met_ns": "transfer_start_ns",
    "moved_ns": MOVED,
}
