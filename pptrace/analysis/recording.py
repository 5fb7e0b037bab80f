"""Effects of recording on a run: its step without the recording, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pptrace.analysis.recording_parts import AsRecorded, RecordedRank, RecordedStep, RecordingReport
from pptrace.analysis.result import Finding, MissingEvidence, Report, StepReport
from pptrace.analysis.verdict import with_verdict
from pptrace.model.tables import Int64

_WARM_UP = 2
_MOST_STEPS = 10
"""Unrecorded steps that are looked at on each side of the recorded ones."""
_SLOWED = 1.05
"""Steps after the recording that take this much longer than those before it were slowed by it."""
_MEDIAN_DEVIATION, _MEDIAN_ERROR, _NORMAL_90 = 1.4826, 1.2533, 1.645
"""Constants of a normal distribution: its deviation over its median deviation; the error of a median over that of a mean; half of
the 90 % interval over the deviation.
"""


def recorded_figures(report: Report) -> AsRecorded:
    """The main figures of a report of what was recorded."""
    return AsRecorded(
        report.verdict,
        tuple(
            RecordedStep(
                step.step,
                step.span_ns,
                step.period_ns,
                step.bubble.share,
                step.bubble.waterfall_ns,
                tuple(
                    RecordedRank(rank.rank, rank.compute_ns, rank.exposed_comm_ns, rank.bubble_ns, rank.host)
                    for rank in step.ranks
                ),
            )
            for step in report.steps
        ),
    )


def with_recording(report: Report, recording: RecordingReport) -> Report:
    """The report with what recording did to the run.

    Where the step without it is hardly known, findings about hosts would be about the recorder: there is none. No finding gains
    more than what the typical step is longer than its compute, spread evenly over the ranks.
    """
    report, missing = replace(report, recording=recording), report.missing_evidence
    findings: Iterable[Finding] = report.findings
    if recording.is_too_uncertain:
        findings = [finding for finding in findings if finding.evidence.get("cause") != "host"]
        others = (entry for entry in missing if entry.findings != _OF_HOST)
        missing = (*others, MissingEvidence(_OF_HOST, _reason(recording)))
    most = _most_gain(report.typical_step)
    if most is not None:
        findings = [_limited(finding, most) for finding in findings]
    return with_verdict(replace(report, findings=tuple(findings), missing_evidence=missing))


_OF_HOST = ("host",)


def _reason(recording: RecordingReport) -> str:
    half = recording.relative_error
    known = "is not known" if half is None else f"is known to ±{half:.0%} only"
    return (
        f"how long the step is without its recording {known}, so that nothing is said about hosts: `pptrace run` measures it; "
        "record with less (no shapes, stacks or modules)"
    )


def _most_gain(step: StepReport | None) -> int | None:
    """Excess of a step over the compute of its ranks, spread evenly; None where that is not known."""
    if step is None or step.length_ns is None or not step.ranks:
        return None
    computes = [rank.compute_ns for rank in step.ranks if rank.compute_ns is not None]
    return max(step.length_ns - sum(computes) // len(step.ranks), 0) if len(computes) == len(step.ranks) else None


def _limited(finding: Finding, most: int) -> Finding:
    gain, low, high = (
        None if ns is None else min(ns, most) for ns in (finding.gain_ns, finding.gain_low_ns, finding.gain_high_ns)
    )
    return replace(finding, gain_ns=gain, gain_low_ns=low, gain_high_ns=high)


@dataclass(frozen=True, slots=True)
class UnrecordedSteps:
    """Lengths of steps that were not recorded, ns: of those before the recording, and of those after it."""

    before: Int64
    after: Int64

    @property
    def typical_ns(self) -> int | None:
        """The median of those before and, unless the recording slowed them, those after; None without any."""
        return round(float(np.median(self.lengths))) if len(self.lengths) else None

    @property
    def lengths(self) -> Int64:
        """The steps that are as they were before the recording: those before it and, unless it slowed them, those after."""
        is_slowed = (self.slowed_after or 1.0) > _SLOWED
        return self.before if is_slowed else np.concatenate((self.before, self.after))

    @property
    def doubt_ns(self) -> int:
        """Half the 90 % interval of the median, from how the steps vary."""
        steps = self.lengths
        if len(steps) < 2:
            return 0
        deviation = _MEDIAN_DEVIATION * float(np.median(np.abs(steps - np.median(steps))))
        return int(_NORMAL_90 * _MEDIAN_ERROR * deviation / len(steps) ** 0.5)

    @property
    def slowed_after(self) -> float | None:
        """Ratio of steps after the recording to those before it, where they are longer; None where nothing tells."""
        if not len(self.before) or not len(self.after):
            return None
        return float(np.median(self.after) / np.median(self.before))


def unrecorded_steps(times: Sequence[Mapping[str, Any]]) -> UnrecordedSteps:
    """The unrecorded steps of ranks, of which each wrote when its steps began and ended.

    The length of a step is from its start to the next one's, without what the recorder did in between: the median of the ranks.
    The first steps and those that a recorder disturbed otherwise do not count.
    """
    before, after = [], []
    for of_rank in times:
        try:
            start, end = (np.array(of_rank[name], dtype=np.int64) for name in ("start_ns", "end_ns"))
            first, recorded = int(of_rank.get("first_step") or 0), of_rank.get("recorded")
            device, disturbed = of_rank.get("device_ns"), of_rank.get("disturbed") or ()
        except (KeyError, TypeError, ValueError):
            continue
        if recorded is None or len(start) != len(end):
            continue
        periods = np.array(device if device and None not in device else end - start, dtype=np.int64)
        steps = first + np.arange(len(start))
        counts = (steps >= _WARM_UP) & ~np.isin(steps, disturbed)
        before.append(periods[counts & (steps < recorded[0])][-_MOST_STEPS:])
        after.append(periods[counts & (steps >= recorded[1])][:_MOST_STEPS])
    return UnrecordedSteps(*(_median_of_ranks(of_ranks) for of_ranks in (before, after)))


def _median_of_ranks(of_ranks: Sequence[Int64]) -> Int64:
    """The median over the ranks of each step, of those that all of them have."""
    num = min(map(len, of_ranks), default=0)
    if not num:
        return np.empty(0, dtype=np.int64)
    return np.median([steps[-num:] for steps in of_ranks], axis=0).astype(np.int64)
