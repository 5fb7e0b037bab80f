"""Steps of runs without a pipeline (DDP, FSDP, one rank): compute, communication and the rest of each rank's step.

Ranks that come last to collectives: the time in which all other members waited for one rank alone.

    member a   ----posts----asks~~~~~~~~waits~~~~~~~~|transfer
    member b   ------------------posts asks~~~waits~~|transfer
    member c   --------------------------------posts |transfer
                                       |-- late --|            c alone is missing, and b, the next one, waits

It ends when the last one comes, and begins when the others have all come and asked for the result: had it come when the next one
does, it would not be. What that next one computes meanwhile, as a device does during a collective, is no waiting. Collectives
under way at once are waited for at once, so that the times of a rank are their union.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.result import RankStep, StepReport
from pptrace.analysis.steps.rank_steps import (
    RankWindows,
    TimesInWindows,
    comms_of_steps,
    device_of_steps,
    durations_of_steps,
    host_of_steps,
    idle_by_host,
    memory_of_steps,
)
from pptrace.analysis.whole_run import Bubble
from pptrace.intervals import EMPTY, intersect, lengths_within, merge, subtract, union
from pptrace.model.known import masked
from pptrace.model.tables import MESSAGES, Int64
from pptrace.slices import rows_among
from pptrace.timeline.windows import StepWindow


def times_waited_for(comms: pd.DataFrame, uncertainty_ns: int, computes: Mapping[int, Int64]) -> dict[int, Int64]:
    """For each rank that comes last to any matched collective the times in which its others waited for it, as sets of intervals.

    Args:
        comms: with matches, on one clock (schema COMMS).
        uncertainty_ns: of the clocks: times that they may make up are left out.
        computes: when each rank computed, as sets of intervals.
    """
    names = ("match", "rank", "start_ns", "posted_ns", "asked_ns", "end_ns", "group_size")
    match, rank, start, posted, asked, end, size = (comms[name].to_numpy() for name in names)
    rows = np.flatnonzero((match >= 0) & ~rows_among(comms["kind"], MESSAGES))
    if not len(rows):
        return {}
    rows = rows[np.lexsort((start[rows], match[rows]))]
    first = np.flatnonzero(np.diff(match[rows], prepend=-1) != 0)
    count = np.diff(np.append(first, len(rows)))
    last = first + count - 1
    # a call that returns at its end waits in it
    waiting = np.where(posted >= end, start, np.maximum(start, asked))[rows]
    waiting[last] = np.iinfo(np.int64).min
    next_one = np.lexsort((waiting, match[rows]))[last]
    begins, ends = waiting[next_one], start[rows[last]]
    is_late = (count > 1) & (count == size[rows[last]])
    is_late[is_late] = ends[is_late] - begins[is_late] > 2 * uncertainty_ns
    late_rank, waiter = rank[rows[last]][is_late], rank[rows[next_one]][is_late]
    return _without_compute(late_rank, waiter, begins[is_late], ends[is_late], computes)


def _without_compute(
    late_rank: Int64, waiter: Int64, begins: Int64, ends: Int64, computes: Mapping[int, Int64]
) -> dict[int, Int64]:
    """The union of the times of each late rank, without what the rank that waits computes in them."""
    found: dict[int, list[Int64]] = {}
    order = np.lexsort((waiter, late_rank))
    is_first = (np.diff(late_rank[order], prepend=-1) != 0) | (np.diff(waiter[order], prepend=-1) != 0)
    for rows in np.split(order, np.flatnonzero(is_first)[1:]) if len(order) else ():
        times = union(begins[rows], ends[rows])
        computes_of = computes.get(int(waiter[rows[0]]))
        found.setdefault(int(late_rank[rows[0]]), []).append(
            times if computes_of is None else subtract(times, computes_of)
        )
    return {late: merge(*sets) for late, sets in found.items()}


NO_PIPELINE = Bubble(None, None, None, None, None)


def marked_windows(ops: pd.DataFrame) -> tuple[StepWindow, ...]:
    """The STEP ranges of each rank as windows, in order of step and rank; each rank has its own. ``ops`` are on one clock."""
    steps = ops[ops["kind"] == "STEP"].groupby(["step", "rank"]).agg(start=("start_ns", "min"), end=("end_ns", "max"))
    return tuple(
        StepWindow(step, (rank,), start, end) for step, rank, start, end in steps.reset_index().itertuples(index=False)
    )


def report_marked_steps(windows: tuple[StepWindow, ...], data: AlignedRun) -> tuple[StepReport, ...]:
    """The steps of a run without a pipeline.

    Each rank's own STEP range is partitioned exactly: ``window = compute + exposed communication + bubble``, where bubble is all
    that is neither: waiting for other ranks, Python between operators, input. On hosts without a device, ``bubble = waiting for
    others + between operators``. Ratios to an ideal are None: there is no schedule.

    Args:
        windows: of :func:`marked_windows`.
        data: everything measured.
    """
    by_step: dict[int, list[StepWindow]] = {}
    of_rank: dict[int, list[StepWindow]] = {}
    for window in windows:
        by_step.setdefault(window.step, []).append(window)
        of_rank.setdefault(window.ranks[0], []).append(window)
    comparable = {
        step: data.is_comparable(StepWindow(step, tuple(window.ranks[0] for window in of_step), *_bounds(of_step)))
        for step, of_step in by_step.items()
    }
    computes = {rank: data.lanes[rank].compute for rank in of_rank}
    late = times_waited_for(data.comms, data.clock.uncertainty_ns or 0, computes) if of_rank else {}
    ranks = {
        (rank.rank, window.step): rank
        for number, rank_windows in of_rank.items()
        for window, rank in zip(
            rank_windows,
            _plain_rank_steps(number, rank_windows, comparable, data, late.get(number, EMPTY)),
            strict=True,
        )
    }
    return tuple(
        StepReport(
            step=step,
            start_ns=_bounds(of_step)[0],
            end_ns=_bounds(of_step)[1],
            span_ns=max(window.span_ns for window in of_step),
            bubble=NO_PIPELINE,
            ranks=tuple(ranks[window.ranks[0], step] for window in of_step),
        )
        for step, of_step in sorted(by_step.items())
    )


def _bounds(windows: Sequence[StepWindow]) -> tuple[int, int]:
    return min(window.start_ns for window in windows), max(window.end_ns for window in windows)


def _plain_rank_steps(
    rank: int, of_steps: Sequence[StepWindow], comparable: Mapping[int, bool], data: AlignedRun, late: Int64
) -> list[RankStep]:
    """The steps of a rank; ``late`` is when others waited for it alone."""
    num_steps, rows = len(of_steps), data.rows.of_rank(rank)
    compare = [comparable[window.step] for window in of_steps]
    windows = RankWindows.of(rank, of_steps, data, compare, [False] * num_steps, [True] * num_steps)
    lane = data.lanes[rank]
    times = TimesInWindows(lane, windows.start_ns, windows.end_ns)
    comms, comm_window = windows.index_of(rows.comms)
    has_times = ~windows.lacks_work & lane.knows_compute
    known = windows.comparable & times.is_known & has_times
    is_matched = (comms["match"] >= 0) & ~comms.among("kind", MESSAGES)
    has_matches = windows.comparable & (np.bincount(comm_window[is_matched], minlength=num_steps) > 0)
    late_ns, in_transfer_ns = (
        lengths_within(times_late, windows.start_ns, windows.end_ns)
        for times_late in (late, intersect(late, lane.transfer))
    )
    hosts = host_of_steps(windows, data)
    columns: dict[str, Sequence[Any]] = {
        "window_ns": (windows.end_ns - windows.start_ns).tolist(),
        "compute_ns": masked(times.compute_ns, has_times),
        "exposed_comm_ns": masked(times.exposed_ns, known),
        "bubble_ns": masked(times.bubble_ns, known),
        **idle_by_host(rows.spans, times, has_times & lane.of_operators, hosts["host"]),
        "late_ns": masked(late_ns, has_matches),
        "late_in_transfer_ns": masked(in_transfer_ns, has_matches),
        "comms": comms_of_steps(comms, comm_window, windows, data),
        "spans": durations_of_steps(rows.spans.where(rows.spans["kind"] != "STEP"), windows),
        "device": device_of_steps(windows, data),
        **hosts,
        **memory_of_steps(rows, windows, data),
    }
    return [
        RankStep(rank=rank, stage=None, phases={}, ops=(), **dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ]
