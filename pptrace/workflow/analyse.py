"""Analyse a run: from the ranks' traces to the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.aligned import AlignedRun, RowsByRank, StepsOfRank
from pptrace.analysis.early_receives.answer import with_reason
from pptrace.analysis.early_receives.repair import RepairedOrder
from pptrace.analysis.experts.types import TrafficMatrix
from pptrace.analysis.findings.find import find
from pptrace.analysis.findings.reasons import mean_length, with_reasons
from pptrace.analysis.findings.root_causes import above_doubt, missing_evidence, with_root_causes, without_found
from pptrace.analysis.findings.steps import outside_findings
from pptrace.analysis.findings.verdict import with_verdict
from pptrace.analysis.links.answer import steps_of_ranks
from pptrace.analysis.links.peaks import is_same_host
from pptrace.analysis.lost_steps import lost_steps, outside_lost, without_unknown_times
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.notes import doubts_of_times, explain_nulls, explain_unknown_idle
from pptrace.analysis.questions import (
    ASKED_FIRST,
    QUESTIONS,
    Answers,
    ask_ranks,
    early_receives_in,
    experts_in,
    with_answers,
)
from pptrace.analysis.report import Report
from pptrace.analysis.result import (
    ClockSummary,
    HostWindow,
    InputInfo,
    RankDevice,
    ScheduleCandidate,
    ScheduleSummary,
    StepReport,
)
from pptrace.analysis.shared_devices import SharedDevice, core_waits_of, line_of_waits, shared_devices, with_busy_shares
from pptrace.analysis.steps.communication import total_comms, with_waits
from pptrace.analysis.steps.host_idle import host_idle_of_windows, synchronisations_of_windows
from pptrace.analysis.steps.outside_pipeline import with_periods
from pptrace.analysis.steps.plain_steps import marked_windows, report_marked_steps
from pptrace.analysis.steps.step_series import series_of
from pptrace.analysis.steps.steps import marked_steps, report_steps, without_impossible
from pptrace.analysis.stragglers.detectors import Study, study_steps
from pptrace.analysis.whole_run import Doubt
from pptrace.clock import Clock, estimate_clock, shift
from pptrace.clock.bounds import without_matches_of
from pptrace.errors import UsageError
from pptrace.intervals import Int64, length, merge
from pptrace.memory import give_back_freed_memory
from pptrace.model.damage import LackingRecords
from pptrace.model.device import with_host_waits
from pptrace.model.mesh import MeshInfo
from pptrace.model.predicted import predictions_of
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.model.step_memory import read_recorded_memory
from pptrace.model.traces import Trace
from pptrace.model.wording import as_ranges
from pptrace.processes import num_cpus
from pptrace.recognise.device.work import NO_DEVICE, breakdown, is_much
from pptrace.recognise.messages.match import (
    has_posting_time_only,
    unknown_by_rank,
    warn_of_unknown,
    with_transfers,
)
from pptrace.recognise.messages.match_without_groups import match_by_end_times, match_inside_ops
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.recording.replay import Corrections
from pptrace.recognise.run import RecognisedRun, recognise_ranks
from pptrace.schedule.registry import SCHEDULES
from pptrace.slices import Slice, rows_where, slice_of, slices_by_rank
from pptrace.timeline.lanes import host_parts, host_waits, lane_of
from pptrace.timeline.windows import StepWindow, step_windows, tag_ops
from pptrace.version import __version__
from pptrace.workflow.planned_steps import planned_steps

if TYPE_CHECKING:
    from pptrace.analysis.experts.answer import ExpertsOfRun
    from pptrace.analysis.op_slack import OpSlack


@dataclass(frozen=True)
class Analysis:
    """A report and the tables it was made from, for figures, exports, comparisons and predictions.

    ``costs`` are what the ops and messages of the whole steps cost, by plan. ``facts`` are what each rank's recorder wrote about
    itself ({} for others' traces), ``run`` what ``pptrace run`` did of the whole run (run.json). ``expert_traffic`` are the rows
    from rank to rank, None where they are not known. ``corrections`` took what recording cost out of the files' times, None where
    they are as recorded. ``sharing`` are GPUs that several ranks have, ``lacking`` records that some ranks lack,
    ``order`` a better order of sends and receives, where some hold up others. ``with_rest`` adds the answers to the
    questions that no other figure needs, where the report is without them.
    """

    report: Report
    data: AlignedRun
    schedule: ScheduleInfo
    mesh: MeshInfo
    windows: tuple[StepWindow, ...]
    costs: tuple[StepMatrix, ...] = ()
    facts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    expert_traffic: TrafficMatrix | None = None
    corrections: Corrections | None = None
    sharing: tuple[SharedDevice, ...] = ()
    lacking: LackingRecords = field(default_factory=LackingRecords)
    order: RepairedOrder | None = None
    with_rest: Callable[[Report], Report] | None = None

    def answered(self) -> Analysis:
        """The same with the answers to all questions."""
        if self.with_rest is None:
            return self
        return dataclasses.replace(self, report=self.with_rest(self.report), with_rest=None)

    @property
    def num_ops(self) -> int:
        """Number of rows of the table of ops."""
        return len(self.data.ops)

    def with_report(self, report: Report) -> Analysis:
        """The same with another report."""
        return dataclasses.replace(self, report=report)

    @property
    def ops_with_slack(self) -> pd.DataFrame:
        """The ops with ``slack_ns`` (−1 where unknown) and ``on_critical_path`` (nullable)."""
        slack = self.op_slack
        known = slack.on_critical_path >= 0
        on_path = pd.arrays.BooleanArray(slack.on_critical_path > 0, ~known)
        return self.data.ops.assign(slack_ns=slack.slack_ns, on_critical_path=on_path)

    @cached_property
    def op_slack(self) -> OpSlack:
        """Slack and critical path of every row of ``data.ops``, found when they are first asked for."""
        from pptrace.analysis.op_slack import slack_of_ops  # no report needs it

        return slack_of_ops(planned_steps(self.windows, self.data, self), self.data)


def analyse_ranks(
    ranks: Sequence[RecognisedRank],
    schedule: str | None = None,
    step: int | None = None,
    num_ranks: int | None = None,
    warnings: Sequence[str] = (),
    jobs: int | None = 1,
    sharing: tuple[SharedDevice, ...] | None = None,
    is_brief: bool = False,
) -> Analysis:
    """Analyse a run.

    Args:
        ranks: the recognised ranks, each with its number set.
        schedule: compare with this schedule instead of the recognised one.
        step: report only this step.
        num_ranks: the number of ranks of the run, None if unknown.
        warnings: lines from reading the traces, put before those of the analysis.
        jobs: processes that work, where they can be forked (None: one per core).
        sharing: the GPUs that several ranks have; None: as the traces tell.
        is_brief: leave the questions that no other figure needs for later (:meth:`Analysis.answered`).

    Raises:
        UsageError: there is no such step or schedule.
    """
    run = recognise_ranks(ranks, schedule, num_ranks)
    inputs = tuple(
        InputInfo(info.path, str(info.format), info.rank, info.num_events, info.producer, info.warnings)
        for info in (rank.info for rank in ranks)
    )
    del ranks  # their tables are in the run's, and what these replaced takes memory
    data, by_end_times = _on_one_clock(run)
    every_window = step_windows(data.ops, run.mesh)
    marked = () if every_window else marked_windows(data.ops)
    windows = every_window
    if step is not None:
        windows, marked = (_only(step, windows), ()) if windows else ((), _only(step, marked))
    jobs = num_cpus() if jobs is None else jobs
    give_back_freed_memory()
    comparable = steps_of_ranks(window for window in windows or marked if data.is_comparable(window))
    every, of_ranks = [window.step for window in windows], steps_of_ranks(windows or marked)
    steps_of = {
        rank: StepsOfRank(every, comparable.get(rank, ()), of_ranks.get(rank, ()), not comparable)
        for rank in data.lanes
    }
    ask = partial(ask_ranks, data, steps_of, run.facts)
    answers = ask(ASKED_FIRST if is_brief else QUESTIONS)
    experts = experts_in(answers, run, steps_of)
    routing = None if experts is None else experts.routing
    steps, costs = report_steps(planned_steps(windows, data, run), data, run.mesh, jobs, routing)
    periods = with_periods(steps or report_marked_steps(marked, data), every_window, data, num_ranks=run.mesh.num_ranks)
    steps, costs, line = without_impossible(periods, costs)
    measured = _Measured(
        inputs,
        run,
        data,
        windows,
        step,
        steps,
        costs,
        answers,
        experts,
        _device_of_ranks(run, data),
        ask if is_brief else None,
    )
    return measured.analysis((*warnings, *run.warnings, *by_end_times, *([line] if line else [])), sharing)


class MeasuredSteps(Struct, frozen=True, eq=False):
    """Steps of which nothing is explained, the tables that they are from, and the warnings about what is null in them."""

    steps: tuple[StepReport, ...]
    data: AlignedRun
    warnings: tuple[str, ...]


def measure(traces: Sequence[Trace], num_ranks: int | None = None) -> MeasuredSteps:
    """Partition the steps of these traces as :func:`analyse_ranks` does, and explain none of them: a third of its time."""
    run = recognise_ranks([recognise_rank(trace) for trace in traces], num_ranks=num_ranks)
    data, by_end_times = _on_one_clock(run)
    planned = planned_steps(step_windows(data.ops, run.mesh), data, run)
    steps, _ = report_steps(planned, data, run.mesh, are_explained=False)
    steps = steps or report_marked_steps(marked_windows(data.ops), data)
    nulls = explain_nulls(run, data.clock, steps, are_explained=False)
    return MeasuredSteps(steps, data, (*run.warnings, *by_end_times, *_warn_of_unknown(data.comms, steps), *nulls))


def _on_one_clock(run: RecognisedRun) -> tuple[AlignedRun, tuple[str, ...]]:
    """The run on one clock, and warnings about matches by end times.

    What relates the clocks are execution times, of steps whose kernels are all there: host rows that only launch or post device
    work would mislead them.
    """
    run = replace(run, comms=rows_where(run.comms, run.comms["clock"] != "none"))
    missing_device_events = [rank for rank, work in run.work.items() if work.missing_device_events]
    launching = [*missing_device_events, *(rank for rank, work in run.work.items() if len(work))]
    has_times = ~run.comms["rank"].isin(missing_device_events) & ~has_posting_time_only(run.comms)
    executes = (run.ops["clock"] == "device") | ~run.ops["rank"].isin(launching)
    lost = lost_steps(run.ops, run.work)
    comms = rows_where(run.comms, has_times & outside_lost(run.comms, lost))
    ops = rows_where(run.ops, executes & outside_lost(run.ops, lost))
    return _align(run, estimate_clock(comms, list(run.facts), run.facts, ops, run.mesh.pipelines, run.ops))


class _Measured(Struct, frozen=True, eq=False):
    """Measurements of the ranks and steps of a run: the report follows from them.

    ``windows`` are those reported (of the only ``step``, where there is one), ``costs`` as measured, ``answers`` by rank, of all
    questions unless ``ask`` asks the ranks later.
    """

    inputs: tuple[InputInfo, ...]
    run: RecognisedRun
    data: AlignedRun
    windows: tuple[StepWindow, ...]
    step: int | None
    steps: tuple[StepReport, ...]
    costs: tuple[StepMatrix, ...]
    answers: Mapping[int, Answers]
    experts: ExpertsOfRun | None
    device: tuple[RankDevice, ...]
    ask: Callable[[], Mapping[int, Answers]] | None = None

    def analysis(self, warnings: tuple[str, ...], sharing: tuple[SharedDevice, ...] | None) -> Analysis:
        """The report, and what it was made from; ``warnings`` are those so far, ``sharing`` as :func:`analyse_ranks` takes it."""
        run, clock, steps, costs = self.run, self.data.clock, self.steps, self.costs
        if self.experts is not None and (routing := self.experts.routing) is not None:
            costs = tuple(map(routing.in_costs, costs))
        early = early_receives_in(self.answers, costs)
        hot_spot = None if self.experts is None else self.experts.hot_spot
        study = study_steps(costs, hot_spot, clock.uncertainty_ns, lambda ranks: is_same_host(ranks, run.facts))
        study = with_reason(study, early)
        if sharing is None:
            plan = run.schedule.plan
            sharing = shared_devices(run.facts, self.data.lanes, steps, None if plan is None else plan.num_microbatches)
        doubts = doubts_of_times(run, clock, steps, sharing)
        lines = (
            *warnings,
            *_warn_of_unknown(self.data.comms, steps),
            *explain_nulls(run, clock, steps, study.stragglers, doubts),
        )
        report = self._report(costs, lines, study, sharing, doubts)

        def with_rest(report: Report) -> Report:
            answers = self.answers if self.ask is None else self.ask()
            return with_answers(report, answers, run, costs, self.experts, early)

        return Analysis(
            with_rest(report) if self.ask is None else report,
            self.data,
            run.schedule,
            run.mesh,
            self.windows,
            costs,
            run.facts,
            expert_traffic=None if self.experts is None else self.experts.traffic.matrix,
            sharing=sharing,
            lacking=run.lacking,
            order=order if early is not None and isinstance(order := early.order, RepairedOrder) else None,
            with_rest=None if self.ask is None else with_rest,
        )

    def _report(
        self,
        costs: tuple[StepMatrix, ...],
        warnings: tuple[str, ...],
        study: Study,
        sharing: Sequence[SharedDevice],
        doubts: tuple[Doubt, ...],
    ) -> Report:
        """The report without the answers to questions."""
        run, clock, ops = self.run, self.data.clock, self.data.ops
        summary, series, waits = (
            _schedule_summary(run.schedule, self.steps),
            series_of(self.steps),
            core_waits_of(run.facts),
        )
        marked = marked_steps(ops if self.step is None else ops[ops["step"] == self.step])
        missing = tuple(missing_evidence(self.steps, costs))
        steps, study = with_reasons(self.steps, study, series)
        found = find(steps, summary, study, series, missing, list(outside_findings(steps, run.mesh)))
        line = line_of_waits(waits)
        unknown_idle = explain_unknown_idle(steps, self.device, run.work, {each.format for each in self.inputs})
        step_ns, off_ns = mean_length(steps) if steps else 0, clock.uncertainty_ns
        shared = with_busy_shares(sharing, self.device)
        has_devices = any(each.has_devices for each in steps)
        sure = above_doubt(found, off_ns, has_devices=has_devices)
        roots, findings = with_root_causes(sure, shared, waits, step_ns, doubts, off_ns, len(steps))
        report = Report(
            pptrace_version=__version__,
            inputs=self.inputs,
            framework=run.framework,
            mesh=run.mesh.sizes,
            schedule=summary,
            clock=ClockSummary(
                str(clock.method),
                {str(rank): offset for rank, offset in clock.offsets_ns.items()},
                clock.uncertainty_ns,
            ),
            steps=steps,
            marked_steps=marked,
            device=self.device,
            findings=findings,
            warnings=(*warnings, *unknown_idle, *([line] if line else [])),
            step_series=series,
            stragglers=study.stragglers,
            missing_evidence=without_found(missing, findings),
            core_waits=waits,
            root_causes=roots,
            doubts=doubts,
        )
        return with_verdict(report)


def _warn_of_unknown(comms: pd.DataFrame, steps: Sequence[StepReport]) -> tuple[str, ...]:
    """Warn of communication in unknown groups, on ranks with a bubble only: elsewhere it changes no figure."""
    unknown = unknown_by_rank(comms)
    counted = {rank.rank for step in steps for rank in step.ranks if rank.bubble_ns is not None} if steps else unknown
    counts = [count for rank, count in unknown.items() if rank in counted]
    return warn_of_unknown(sum(messages for messages, _ in counts), sum(collectives for _, collectives in counts))


def _device_of_ranks(run: RecognisedRun, data: AlignedRun) -> tuple[RankDevice, ...]:
    """Sums over each rank's trace, on its own clock, and without steps what its calls waited on the common one."""
    of_ranks, none = slices_by_rank(run.comms, ()), slice_of(run.comms.iloc[:0])
    aligned = slices_by_rank(data.comms, ()) if data.compares_without_steps else {}
    devices = []
    for rank, work in sorted(run.work.items()):
        comms = of_ranks.get(rank, none)
        device = NO_DEVICE if is_much(work.lost, work.lost.num_missing) else breakdown(work)
        totals = with_waits(total_comms(comms, work.compute if len(work) else None), aligned.get(rank, none))
        if device.first_ns is None or device.last_ns is None or work.idle.reason:
            devices.append(RankDevice(rank, device, totals, on_host=_on_host(run.host_work.get(rank), comms)))
            continue
        idle, window = with_host_waits(work.idle, host_waits(comms)), ([device.first_ns], [device.last_ns])
        host = host_idle_of_windows(work, idle, *window)[0]
        synchronisations = synchronisations_of_windows(idle.synchronisations, *window)[0]
        devices.append(RankDevice(rank, device, totals, host, synchronisations))
    return tuple(devices)


def _on_host(work: Int64 | None, comms: Slice) -> HostWindow | None:
    if work is None or not len(work):
        return None
    compute, communication = host_parts(work, comms)
    either = merge(compute, communication)
    first, last = int(either[0, 0]), int(either[-1, 1])
    computing, both = length(compute), length(either)
    return HostWindow(first, last, computing, both - computing, last - first - both)


def _align(run: RecognisedRun, clock: Clock) -> tuple[AlignedRun, tuple[str, ...]]:
    """Shift all times to one clock and match collectives by their end times; with warnings about these matches."""
    ops = tag_ops(shift(run.ops, clock), run.schedule.plan_of, run.schedule.has_phases)
    known = without_matches_of(run.comms, clock.early_ends)
    matched, by_end_times = match_by_end_times(shift(known, clock), ops, run.mesh, clock)
    matched = match_inside_ops(matched, ops, run.mesh, clock)
    without = [rank for rank, work in run.work.items() if work.missing_device_events]
    lost = lost_steps(run.ops, run.work)
    comms = with_transfers(without_unknown_times(matched, without, lost))
    by_rank = RowsByRank(ops, comms)
    lacking = frozenset(rank for rank in run.facts if run.mesh.lacks_ranks(rank, run.facts))
    lacks_members = run.mesh.num_ranks > len(run.facts)
    lanes = {
        rank: lane_of(
            *(rank, rows.ops, rows.comms, run.work.get(rank), clock, rank in lacking, run.host_work.get(rank)),
            lacks_members=lacks_members,
        )
        for rank in run.facts
        for rows in (by_rank.of_rank(rank),)
    }
    memory = shift(run.memory, clock) if len(run.memory) else run.memory
    predicted = predictions_of(run.facts, run.schedule)
    recorded = {rank: read_recorded_memory(facts.get("memory")) for rank, facts in run.facts.items()}
    facts = (lacking, {rank: memory for rank, memory in recorded.items() if memory is not None}, lost)
    return AlignedRun(ops, comms, memory, by_rank, lanes, run.work, clock, predicted, *facts), by_end_times


def _only(step: int, windows: tuple[StepWindow, ...]) -> tuple[StepWindow, ...]:
    selected = tuple(window for window in windows if window.step == step)
    if not selected:
        present = as_ranges({window.step for window in windows}) or "none"
        raise UsageError(f"step {step}: the trace has no such step; it has {present}")
    return selected


def _schedule_summary(info: ScheduleInfo, steps: Sequence[StepReport]) -> ScheduleSummary:
    training = [step.step for step in steps if not step.is_evaluation]
    plans = info.candidates if info.plan is None else (info.plan,)

    def common_size(name: str) -> int | None:
        values = {getattr(plan, name) for plan in plans}
        return values.pop() if len(values) == 1 else None

    candidates = []
    for one in info.candidates:
        pp_ranks = {str(rank): pp_rank for rank, pp_rank in one.pp_ranks.items()}
        sizes = (one.pp, one.num_microbatches, one.num_stages, one.num_chunks)
        candidates.append(ScheduleCandidate(one.name, *sizes, pp_ranks))
    return ScheduleSummary(
        name=info.name if info.plan is None or info.name in SCHEDULES else "custom",
        num_microbatches=common_size("num_microbatches")
        if info.plan is None
        else info.usual_num_microbatches(training),
        num_stages=common_size("num_stages"),
        num_chunks=common_size("num_chunks"),
        source=str(info.source),
        mismatches=info.mismatches,
        candidates=tuple(candidates),
        runs=info.runs,
    )
