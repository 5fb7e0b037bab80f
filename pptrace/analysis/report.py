"""The report of a run: its steps and findings, and what each question found.

Each field is the JSON field of the same name, and None is its ``null``. Its comment is its row in docs/report.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from msgspec import Struct, field

from pptrace.analysis.early_receives.types import EarlyReceives
from pptrace.analysis.experts.types import ExpertsReport
from pptrace.analysis.links.types import CollectiveSpeed, Interconnect, LateRank, Link
from pptrace.analysis.memory.types import MemoryReport
from pptrace.analysis.recompute.types import RecomputeReport
from pptrace.analysis.result import (
    ClockSummary,
    Finding,
    InputInfo,
    MarkedStep,
    MissingEvidence,
    RankDevice,
    ScheduleSummary,
    StepReport,
    typical_of,
)
from pptrace.analysis.stages.types import StageCompute
from pptrace.analysis.whole_run import CoreWait, Doubt, RootCause, StepSeries, Stragglers, Waterfall
from pptrace.model.device import HostIdle
from pptrace.model.mesh import MeshSizes
from pptrace.model.wording import counted

MOST_ERROR = 0.1
"""A prediction that may be off by more says nothing about hosts."""

KERNELS_MISSING = "kernels are missing in the traces"
"""Reason why what recording cost is not taken out."""


class RecordedRank(Struct, frozen=True):
    """Figures of one rank in a recorded step, as in ``steps[].ranks[]``."""

    rank: int  #: global rank
    compute_ns: int | None  #: compute, likewise recorded; null as there
    exposed_comm_ns: int | None  #: exposed communication; null as there
    bubble_ns: int | None  #: bubble; null as there
    host: HostIdle | None  #: reasons why the device was idle; null as there


class RecordedStep(Struct, frozen=True):
    """Figures of one step as it was recorded, as in ``steps[]``."""

    step: int  #: number of the training step
    span_ns: int | None  #: span of the pipeline; null as there
    period_ns: int | None  #: time to the next step's start; null as there
    bubble_share: float | None  #: bubble / window; null as ``share`` of the step's ``bubble``
    waterfall_ns: Waterfall | None  #: parts of the span; null as those of the step's ``bubble``
    ranks: tuple[RecordedRank, ...]  #: one entry per rank


class AsRecorded(Struct, frozen=True):
    """The report's main figures as they were recorded, where its own are those of the run without its recording."""

    verdict: str  #: first sentence of the report
    steps: tuple[RecordedStep, ...]  #: one entry per step


class AuditEntry(Struct, frozen=True):
    """Kind of damage or distortion of a recording, as ``pptrace doctor PATH`` prints it."""

    kind: str  #: name of the kind
    count: int  #: events of that kind; of ``missing_ranks`` ranks, of ``incomplete_steps`` steps
    ranks: tuple[int, ...]  #: ranks concerned; empty where it is of the run
    steps: tuple[int, ...]  #: steps in which it lies; empty where it is in none, or not known when it was
    affects: str  #: figures that it makes null or wrong, and what was done about it
    cure: str  #: way to record without it


class RecordingReport(Struct, frozen=True):
    """Effects of recording on a run. Lengths of steps are of the typical step: the median."""

    #: step while it was recorded; null where the trace shows no step that begins and ends on all ranks
    recorded_step_ns: int | None = None
    #: step without recording, as timed in the same run; null where nothing timed it: ``pptrace run`` does
    unrecorded_step_ns: int | None = None
    #: recorded run replayed without what recording cost; null where that or a step's length is not known
    predicted_step_ns: int | None = None
    low_ns: int | None = None  #: lower end of the prediction's 90 % interval; null as ``predicted_step_ns``
    high_ns: int | None = None  #: upper end of it; null as ``predicted_step_ns``
    error: float | None = None  #: ``predicted_step_ns`` / ``unrecorded_step_ns`` − 1; null where either is
    #: ``recorded_step_ns`` / ``unrecorded_step_ns``, or, where that is null, / ``predicted_step_ns``; null where both are
    slowdown: float | None = None
    #: cost of recording a host event (operator, range, call of the device's runtime), mean of the ranks; null where it is not
    #: known
    cost_per_event_ns: float | None = None
    #: ``measured`` (fitted to unrecorded steps of this run) or ``trace`` (judged from the trace alone); null as
    #: ``cost_per_event_ns``
    cost_source: str | None = None
    #: host events in a step, mean of the ranks; null where the trace has no host events
    events_per_step: int | None = None
    #: settings of the recorder, by torch's names of the options: ``record_shapes``, ``with_stack``, ``profile_memory``, …; empty
    #: where the trace does not say
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: share of the predicted step in which a device did nothing, mean of the ranks with a device; of the recorded step where
    #: nothing is predicted; null without a device
    device_idle_share: float | None = None
    #: steps after the recording over those before it; null where too few were timed to tell
    slowed_after: float | None = None
    #: run that the figures of this report are of: ``unrecorded``, without its recording, or ``recorded``
    figures: str = "recorded"
    #: main figures as they were recorded; null where ``figures`` is ``recorded``
    as_recorded: AsRecorded | None = None
    reason: str | None = None  #: reason why nothing is predicted; null where something is
    #: mistakes of the recorder, an entry for each kind; empty of a recording that is whole
    audit: tuple[AuditEntry, ...] = ()

    @property
    def relative_error(self) -> float | None:
        """Relative error of the predicted step; None where there is no prediction."""
        if not self.predicted_step_ns or self.low_ns is None or self.high_ns is None:
            return None
        return (self.high_ns - self.low_ns) / 2 / self.predicted_step_ns

    @property
    def differs_otherwise(self) -> bool:
        """Return whether measured unrecorded steps differ from the recorded ones by more than recording can cost."""
        measured, low, high = self.unrecorded_step_ns, self.low_ns, self.high_ns
        return measured is not None and low is not None and high is not None and not low <= measured <= high

    @property
    def is_too_uncertain(self) -> bool:
        """Return whether the step without recording is not known well enough to say anything about hosts."""
        error = self.relative_error
        return (self.slowdown or 1.0) > 1 + MOST_ERROR if error is None else error > MOST_ERROR


class AnswerOf(NamedTuple):
    """Marks a field that a question answers: a folder of this package (:mod:`pptrace.analysis.questions`)."""

    question: str
    shown: int = 100  #: place of the question's tables among those of the others


class Report(Struct, frozen=True, kw_only=True):
    """The report of a run."""

    pptrace_version: str  #: version of the program that wrote the report
    inputs: tuple[InputInfo, ...]  #: one input for each rank that was read
    framework: str  #: source of the ops' labels; without labels, who names process groups so; else ``unlabelled``
    mesh: MeshSizes  #: sizes of the axes
    schedule: ScheduleSummary  #: plan that the run followed
    clock: ClockSummary  #: relation of the ranks' clocks
    #: one per training step, in order; with ``--step`` only that one; empty where no step was recognised
    steps: tuple[StepReport, ...]
    #: steps as their marks show them, one entry per rank and step; empty without marks of steps
    marked_steps: tuple[MarkedStep, ...]
    device: tuple[RankDevice, ...]  #: device time of the whole trace, one entry per rank
    #: slowdowns by workers, stages and kinds of work, a what-if study; null where no step has every op of a known plan, or the
    #: ranks' times do not compare
    stragglers: Annotated[Stragglers | None, AnswerOf("stragglers", shown=2)] = None
    #: facts to know first: a run off its plan, then warnings, then what is information (the structural part, single long steps),
    #: the largest gain first; empty where nothing is worth a line
    findings: tuple[Finding, ...]
    verdict: str = ""  #: report in one sentence (:mod:`pptrace.analysis.findings.verdict`)
    #: verdict on a run that hung (:func:`pptrace.hang_diagnosis.verdict.as_json`); null unless flight-recorder dumps or a run
    #: directory show a hang that has a verdict
    hang: Mapping[str, Any] | None = None
    #: lines: what is wrong, null or estimated, what that means for the figures, what to do; empty where nothing is
    warnings: tuple[str, ...]
    #: memory of every rank: peaks, microbatches in flight, predictions; null without steps
    memory: Annotated[MemoryReport | None, AnswerOf("memory", shown=5)] = None
    #: lengths of training steps over the run: percentiles, outliers, changes of level; null where no training step's length is
    #: known
    step_series: StepSeries | None = None
    #: messages from rank to rank, all steps together: who was late, and how fast they were; the link with most waiting first;
    #: empty without matched messages
    links: Annotated[tuple[Link, ...], AnswerOf("links", shown=4)] = ()
    #: ranks that come last to collectives; empty without matched collectives
    late_ranks: Annotated[tuple[LateRank, ...], AnswerOf("links", shown=4)] = ()
    #: peaks of the links between devices, and what collectives reach of them; null where no device communicated in a step
    interconnect: Annotated[Interconnect | None, AnswerOf("links", shown=4)] = None
    #: collectives by size: latency and bandwidth, and what NCCL's kernels are named after; empty without collectives in
    #: comparable steps
    collectives: Annotated[tuple[CollectiveSpeed, ...], AnswerOf("links", shown=4)] = ()
    #: kinds of findings that this run does not show, and why; empty where there is enough of everything, or no step
    missing_evidence: tuple[MissingEvidence, ...] = ()
    #: waits of each rank for a processor core; empty where the traces do not tell: ``pptrace run`` records it on Linux
    core_waits: tuple[CoreWait, ...] = ()
    root_causes: tuple[RootCause, ...] = ()  #: causes from which several findings follow; empty where none do
    #: loads of experts, who comes last, and what unequal routes cost; null where nothing communicates along ep and no routes were
    #: counted
    experts: Annotated[ExpertsReport | None, AnswerOf("experts", shown=1)] = None
    #: effects of recording on the run, and its step without it; null without steps
    recording: RecordingReport | None = None
    #: compute of the stages, by kind of work and part of the model; null where no trace tells what ops did (tables of ops, no
    #: stages, missing device events)
    stages: Annotated[StageCompute | None, AnswerOf("stages", shown=3)] = None
    #: receives that held up what was posted behind them; null without messages between stages
    early_receives: Annotated[EarlyReceives | None, AnswerOf("early_receives", shown=6)] = None
    #: parts of backwards: forwards that run again, gradients of weights; null where neither ranges nor operators nor the run
    #: itself tell either, and without ops of a pipeline
    recompute: Annotated[RecomputeReport | None, AnswerOf("recompute", shown=3)] = None
    #: doubts that all times hang on, with their lines among the ``warnings``; empty where there are none
    doubts: tuple[Doubt, ...] = ()

    def __repr__(self) -> str:
        """The report's size and its verdict, without its tens of thousands of letters."""
        size = f"{counted(self.mesh.num_ranks, 'rank')}, {counted(len(self.steps), 'step')}"
        return f"<Report: {self.framework}, {size}, {counted(len(self.findings), 'finding')}: {self.verdict}>"

    @property
    def typical_step(self) -> StepReport | None:
        """The step to show first: the median by length, of two the faster, of those whose bubble is known, else of all; of
        training steps, if there are any.
        """
        return typical_of(self.steps)
