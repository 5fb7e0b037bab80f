"""The report of a run: its steps and findings, and what each question found.

Each field is the JSON field of the same name, and None is its ``null``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
from pptrace.model.device_idle import HostIdle
from pptrace.model.mesh import MeshSizes
from pptrace.model.wording import counted

MOST_ERROR = 0.1
"""A prediction that may be off by more says nothing about hosts."""

KERNELS_MISSING = "kernels are missing in the traces"
"""Reason why what recording cost is not taken out."""


@dataclass(frozen=True, slots=True)
class RecordedRank:
    """Figures of one rank in a recorded step, as in ``steps[].ranks[]``."""

    rank: int
    compute_ns: int | None
    exposed_comm_ns: int | None
    bubble_ns: int | None
    host: HostIdle | None


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Figures of one step as it was recorded, as in ``steps[]``."""

    step: int
    span_ns: int | None
    period_ns: int | None
    bubble_share: float | None
    waterfall_ns: Waterfall | None
    ranks: tuple[RecordedRank, ...]


@dataclass(frozen=True, slots=True)
class AsRecorded:
    """The report's main figures as they were recorded, where its own are those of the run without its recording."""

    verdict: str
    steps: tuple[RecordedStep, ...]


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Kind of damage or distortion of a recording: how much of it there is, of which ranks, in which steps.

    ``affects`` says which figures it makes null or wrong, and what was done about it, ``cure`` how to record without it.
    """

    kind: str
    count: int
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    affects: str
    cure: str


@dataclass(frozen=True, slots=True)
class RecordingReport:
    """The typical step as it was recorded, measured without recording, and predicted by a replay without its cost.

    ``low_ns`` to ``high_ns`` is the 90 % interval of the prediction, ``error`` predicted / unrecorded − 1, ``slowdown``
    recorded / (unrecorded, else predicted). ``figures`` are whose figures the report has, ``unrecorded`` or ``recorded``.
    ``reason`` says why nothing is predicted, None where something is. ``slowed_after`` is how much longer the steps after the
    recording took than those before it (1: as long). ``audit`` is what the recorder got wrong.
    """

    recorded_step_ns: int | None = None
    unrecorded_step_ns: int | None = None
    predicted_step_ns: int | None = None
    low_ns: int | None = None
    high_ns: int | None = None
    error: float | None = None
    slowdown: float | None = None
    cost_per_event_ns: float | None = None
    cost_source: str | None = None
    events_per_step: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    device_idle_share: float | None = None
    slowed_after: float | None = None
    figures: str = "recorded"
    as_recorded: AsRecorded | None = None
    reason: str | None = None
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


ANSWER_OF, SHOWN = "question", "shown"


def answer_of(question: str, shown: int = 100) -> Mapping[str, Any]:
    """Metadata of a field that a question answers: a folder of this package (:mod:`pptrace.analysis.questions`).

    ``shown`` is the place of the question's tables among those of the others.
    """
    return {ANSWER_OF: question, SHOWN: shown}


@dataclass(frozen=True, slots=True)
class Report:
    pptrace_version: str
    inputs: tuple[InputInfo, ...]
    framework: str
    mesh: MeshSizes
    schedule: ScheduleSummary
    clock: ClockSummary
    steps: tuple[StepReport, ...]
    marked_steps: tuple[MarkedStep, ...]
    device: tuple[RankDevice, ...]
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    verdict: str = ""
    """The report in one sentence (:mod:`pptrace.analysis.findings.verdict`)."""
    memory: MemoryReport | None = field(default=None, metadata=answer_of("memory", shown=5))
    hang: Mapping[str, Any] | None = None
    """Diagnosis of a run that hung, as :func:`pptrace.hang_diagnosis.verdict.as_json` writes it."""
    step_series: StepSeries | None = None
    links: tuple[Link, ...] = field(default=(), metadata=answer_of("links", shown=4))
    late_ranks: tuple[LateRank, ...] = field(default=(), metadata=answer_of("links", shown=4))
    stragglers: Stragglers | None = field(default=None, metadata=answer_of("stragglers", shown=2))
    interconnect: Interconnect | None = field(default=None, metadata=answer_of("links", shown=4))
    collectives: tuple[CollectiveSpeed, ...] = field(default=(), metadata=answer_of("links", shown=4))
    missing_evidence: tuple[MissingEvidence, ...] = ()
    core_waits: tuple[CoreWait, ...] = ()
    root_causes: tuple[RootCause, ...] = ()
    experts: ExpertsReport | None = field(default=None, metadata=answer_of("experts", shown=1))
    recording: RecordingReport | None = None
    stages: StageCompute | None = field(default=None, metadata=answer_of("stages", shown=3))
    """Compute of the stages by kind of work; None where no trace tells what ops did."""
    early_receives: EarlyReceives | None = field(default=None, metadata=answer_of("early_receives", shown=6))
    """Receives that held up what was posted behind them; None of a run without messages between stages."""
    recompute: RecomputeReport | None = field(default=None, metadata=answer_of("recompute", shown=3))
    """Forwards that backwards run again, and gradients of weights in them; None where nothing tells either."""
    doubts: tuple[Doubt, ...] = ()
    """Doubts that all times hang on, with their lines among the warnings."""

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
