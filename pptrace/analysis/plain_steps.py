"""Steps of runs without a pipeline (DDP, FSDP, one rank): compute, communication and the rest of each rank's step."""

from __future__ import annotations

import pandas as pd

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.result import Bubble, RankStep, StepReport
from pptrace.analysis.steps import comms_of_step, durations, peak_memory
from pptrace.intervals import length
from pptrace.recognise.device.work import breakdown
from pptrace.timeline.windows import StepWindow

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
    that is neither: waiting for other ranks, Python between operators, input. Ratios to an ideal are None: there is no schedule.

    Args:
        windows: of :func:`marked_windows`.
        data: everything measured.
    """
    by_step: dict[int, list[StepWindow]] = {}
    for window in windows:
        by_step.setdefault(window.step, []).append(window)
    return tuple(_report(step, step_windows, data) for step, step_windows in sorted(by_step.items()))


def _report(step: int, windows: list[StepWindow], data: AlignedRun) -> StepReport:
    start, end = min(window.start_ns for window in windows), max(window.end_ns for window in windows)
    ranks = tuple(window.ranks[0] for window in windows)
    comparable = data.is_comparable(StepWindow(step, ranks, start, end))
    return StepReport(
        step=step,
        start_ns=start,
        end_ns=end,
        span_ns=max(window.span_ns for window in windows),
        bubble=NO_PIPELINE,
        ranks=tuple(_report_rank(window, data, comparable) for window in windows),
    )


def _report_rank(window: StepWindow, data: AlignedRun, comparable: bool) -> RankStep:
    (rank,) = window.ranks
    part, work = data.part(rank, window.step), data.work[rank]
    lane = data.lanes[rank].clipped(window.start_ns, window.end_ns)
    return RankStep(
        rank=rank,
        stage=None,
        window_ns=window.span_ns,
        compute_ns=None if work.missing_device_events else length(lane.compute),
        exposed_comm_ns=lane.exposed_ns(window.start_ns, window.end_ns) if comparable else None,
        bubble_ns=lane.bubble_ns(window.start_ns, window.end_ns) if comparable else None,
        phases={},
        comms=comms_of_step(part.comms, rank, window.step, data, matched=comparable),
        spans=durations(part.spans.where(part.spans["kind"] != "STEP")),
        device=breakdown(work, *(data.clock.to_rank_clock(rank, time) for time in (window.start_ns, window.end_ns))),
        peak_memory_bytes=peak_memory(data, rank, part.spans),
        ops=(),
    )
