"""Traces in, report out: the whole way through the rooms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.communication import total_comms
from pptrace.analysis.findings import find
from pptrace.analysis.notes import explain_nulls, is_plan_of_all
from pptrace.analysis.plain_steps import marked_windows, report_marked_steps
from pptrace.analysis.result import (
    ClockSummary,
    InputInfo,
    MeshSizes,
    RankDevice,
    Report,
    ScheduleCandidate,
    ScheduleSummary,
    StepReport,
)
from pptrace.analysis.steps import Ideal, ideal_of, marked_steps, report_step
from pptrace.analysis.verdict import with_verdict
from pptrace.analysis.volume.step import volume_of_run
from pptrace.clock import Clock, estimate_clock, shift
from pptrace.errors import UsageError
from pptrace.model.device import DeviceWork
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import Candidate, ScheduleInfo
from pptrace.model.tables import Trace, TraceInfo
from pptrace.recognise.device.work import breakdown
from pptrace.recognise.messages.match import has_posting_time_only, warn_without_group_or_peer, with_transfers
from pptrace.recognise.messages.match_by_end_times import match_by_end_times
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.run import RecognisedRun, recognise_ranks
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES
from pptrace.simulator.course import ReplayGraph, compile_plan
from pptrace.timeline.lanes import lane_of
from pptrace.timeline.phases import tag_ops
from pptrace.timeline.windows import StepWindow, step_windows
from pptrace.version import __version__


@dataclass(frozen=True, slots=True)
class Analysis:
    """A report and the tables behind it, for pictures and exports."""

    report: Report
    data: AlignedRun
    schedule: ScheduleInfo
    mesh: MeshInfo
    windows: tuple[StepWindow, ...]


def analyse(
    traces: Sequence[Trace], schedule: str | None = None, step: int | None = None, num_ranks: int | None = None
) -> Analysis:
    """:func:`analyse_ranks` of what is found in these traces, one per rank, with their ranks set."""
    return analyse_ranks([recognise_rank(trace) for trace in traces], schedule, step, num_ranks)


def analyse_ranks(
    ranks: Sequence[RecognisedRank],
    schedule: str | None = None,
    step: int | None = None,
    num_ranks: int | None = None,
    warnings: Sequence[str] = (),
) -> Analysis:
    """Analyse a run.

    Args:
        ranks: what was found in each rank's trace, with their ranks set.
        schedule: compare with this schedule instead of the recognised one.
        step: report only this step.
        num_ranks: how many ranks the run had, where known.
        warnings: what reading the traces had to say.

    Raises:
        UsageError: there is no such step or schedule.
    """
    found = recognise_ranks(ranks, schedule, num_ranks)
    placed = replace(found, comms=found.comms[found.comms["clock"] != "none"])
    comms, ops = _causal(placed)
    clock = estimate_clock(comms, list(found.facts), found.facts, ops, found.mesh.pipelines)
    data, together = _align(placed, clock)
    windows = step_windows(data.ops, found.mesh)
    marked = () if windows else marked_windows(data.ops)
    if step is not None:
        windows, marked = (_only(step, windows), ()) if windows else ((), _only(step, marked))
    steps = _report_steps(windows, data, found) or report_marked_steps(marked, data)
    summary = _schedule_summary(found.schedule)
    report = Report(
        pptrace_version=__version__,
        inputs=tuple(_input_info(found.info) for found in ranks),
        framework=found.framework,
        mesh=MeshSizes(*(getattr(found.mesh, name) for name in MeshSizes.__slots__)),
        schedule=summary,
        clock=ClockSummary(
            str(clock.method), {str(rank): offset for rank, offset in clock.offsets_ns.items()}, clock.uncertainty_ns
        ),
        steps=steps,
        marked_steps=marked_steps(data.ops if step is None else data.ops[data.ops["step"] == step]),
        device=tuple(_rank_device(rank, work, found.comms) for rank, work in sorted(found.work.items())),
        findings=find(steps, summary),
        warnings=(*warnings, *found.warnings, *together, *_anonymous(data, steps), *explain_nulls(found, clock, steps)),
    )
    return Analysis(with_verdict(report), data, found.schedule, found.mesh, windows)


def _anonymous(data: AlignedRun, steps: Sequence[StepReport]) -> tuple[str, ...]:
    """What communication of no known group counts as, where it counts: not where its ranks' bubbles are null."""
    counted = {rank.rank for step in steps for rank in step.ranks if rank.bubble_ns is not None}
    return (
        warn_without_group_or_peer(data.comms[data.comms["rank"].isin(counted)])
        if steps
        else warn_without_group_or_peer(data.comms)
    )


def _causal(found: RecognisedRun) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The communication and the ops that run when their times say, not the launching or posting of what a device does later."""
    missing_device_events = [rank for rank, work in found.work.items() if work.missing_device_events]
    launching = [rank for rank, work in found.work.items() if len(work) or work.missing_device_events]
    ops = found.ops[(found.ops["clock"] == "device") | ~found.ops["rank"].isin(launching)]
    return found.comms[~found.comms["rank"].isin(missing_device_events) & ~has_posting_time_only(found.comms)], ops


def _rank_device(rank: int, work: DeviceWork, comms: pd.DataFrame) -> RankDevice:
    """A rank's whole trace, on its own clock."""
    compute = work.compute if len(work) else None
    return RankDevice(rank, breakdown(work), total_comms(comms[comms["rank"] == rank], compute))


def _align(found: RecognisedRun, clock: Clock) -> tuple[AlignedRun, tuple[str, ...]]:
    """Everything on one clock, and what that tells of collectives."""
    ops = tag_ops(shift(found.ops, clock), found.schedule.plan_of, found.schedule.has_phases)
    together = match_by_end_times(shift(found.comms, clock), ops, found.mesh, clock)
    comms = with_transfers(together.comms)
    lacking = frozenset(rank for rank in found.facts if found.mesh.lacks_ranks(rank, found.facts))
    lanes = {
        rank: lane_of(rank, ops, comms, found.work, clock, rank in lacking, found.host_work.get(rank))
        for rank in found.facts
    }
    memory = shift(found.memory, clock) if len(found.memory) else found.memory
    volume = volume_of_run([facts.get("model") for facts in found.facts.values()], found.mesh, found.schedule)
    return AlignedRun(ops, comms, memory, lanes, found.work, clock, volume, lacking), together.warnings


def _only(step: int, windows: tuple[StepWindow, ...]) -> tuple[StepWindow, ...]:
    chosen = tuple(window for window in windows if window.step == step)
    if not chosen:
        present = ", ".join(str(number) for number in sorted({window.step for window in windows})) or "none"
        raise UsageError(f"step {step}: the trace has no such step; it has {present}")
    return chosen


def _report_steps(windows: tuple[StepWindow, ...], data: AlignedRun, found: RecognisedRun) -> tuple[StepReport, ...]:
    is_whole = is_plan_of_all(found)
    shapes: dict[int, _Shape] = {}
    by_step: dict[int, list[StepWindow]] = {}
    for window in windows:
        by_step.setdefault(window.step, []).append(window)
    reports = []
    for number, chosen in sorted(by_step.items()):
        plan = found.schedule.plan_of(number) if is_whole else None
        if plan is not None and plan.num_microbatches not in shapes:
            shapes[plan.num_microbatches] = _Shape.of(plan)
        shape = None if plan is None else shapes[plan.num_microbatches]
        is_like = shape is not None and all(shape.has_ops_of(window, data, found.mesh) for window in chosen)
        ideal = shape.ideal if shape is not None and is_like else None
        reports.append(report_step(tuple(chosen), data, shape.course if shape else None, ideal, found.mesh))
    return tuple(reports)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What all steps of a plan have in common; ``num_ops`` is that of each of its ranks."""

    course: ReplayGraph
    ideal: Ideal
    num_ops: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> _Shape:
        return cls(
            compile_plan(plan), ideal_of(plan), tuple(len(plan.compute_actions(rank)) for rank in range(plan.pp))
        )

    def has_ops_of(self, window: StepWindow, data: AlignedRun, mesh: MeshInfo) -> bool:
        """Whether a step has as many ops on each rank, unless several have a trace, and others none: not one with fewer
        microbatches.
        """
        counts = tuple(len(data.part(rank, window.step).ops) for rank in window.ranks)
        if len(counts) == 1 and (place := mesh.pp_rank(window.ranks[0])) is not None:
            return place >= len(self.num_ops) or counts[0] == self.num_ops[place]
        return len(counts) != len(self.num_ops) or counts == self.num_ops


def _schedule_summary(info: ScheduleInfo) -> ScheduleSummary:
    plans = info.candidates if info.plan is None else (info.plan,)

    def common(size: str) -> int | None:
        values = {getattr(plan, size) for plan in plans}
        return values.pop() if len(values) == 1 else None

    return ScheduleSummary(
        name=info.name if info.plan is None or info.name in SCHEDULES else "custom",
        num_microbatches=common("num_microbatches"),
        num_stages=common("num_stages"),
        num_chunks=common("num_chunks"),
        source=str(info.source),
        mismatches=info.mismatches,
        candidates=tuple(map(_candidate, info.candidates)),
    )


def _candidate(found: Candidate) -> ScheduleCandidate:
    sizes = (found.pp, found.num_microbatches, found.num_stages, found.num_chunks)
    return ScheduleCandidate(found.name, *sizes, {str(rank): place for rank, place in found.pp_ranks.items()})


def _input_info(info: TraceInfo) -> InputInfo:
    return InputInfo(info.path, str(info.format), info.rank, info.num_events, info.producer, info.warnings)
