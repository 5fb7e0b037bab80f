"""The report of a run: its steps and findings, and what each question found.

Each field is the JSON field of the same name, and None is its ``null``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pptrace.analysis.early_receives.types import EarlyReceives
from pptrace.analysis.experts.types import ExpertsReport
from pptrace.analysis.links.types import Interconnect, LateRank, Link
from pptrace.analysis.memory.types import MemoryReport
from pptrace.analysis.recompute.types import RecomputeReport
from pptrace.analysis.recording_parts import RecordingReport
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
from pptrace.analysis.whole_run import CoreWait, Doubt, RootCause, StepSeries, Stragglers
from pptrace.model.mesh import MeshSizes
from pptrace.model.wording import counted

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
    """Diagnosis of a run that hung, as :func:`pptrace.hang_diagnosis.words.as_json` writes it."""
    step_series: StepSeries | None = None
    links: tuple[Link, ...] = field(default=(), metadata=answer_of("links", shown=4))
    late_ranks: tuple[LateRank, ...] = field(default=(), metadata=answer_of("links", shown=4))
    stragglers: Stragglers | None = field(default=None, metadata=answer_of("stragglers", shown=2))
    interconnect: Interconnect | None = field(default=None, metadata=answer_of("links", shown=4))
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
