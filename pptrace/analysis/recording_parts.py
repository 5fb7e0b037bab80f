"""The report's block on what recording did to a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pptrace.analysis.whole_run import Waterfall
from pptrace.model.device_idle import HostIdle

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
