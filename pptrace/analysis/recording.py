"""Effects of recording on a run: its step without the recording, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.analysis.findings.verdict import with_verdict
from pptrace.analysis.report import AsRecorded, RecordedRank, RecordedStep, RecordingReport, Report
from pptrace.analysis.result import Finding, MissingEvidence, StepReport
from pptrace.model.known import all_known
from pptrace.model.tables import Int64

_WARM_UP = 2
_MOST_STEPS = 10
"""Unrecorded steps that are looked at on each side of the recorded ones."""
_FEWEST_RECORDED = 3
_FEWEST_BEFORE = 3
"""Steps before the recording whose median tells; of fewer all must be shorter than all after it, and the recorder be attached."""
_ELSEWHERE, _MOST_ELSEWHERE = 0.03, 0.25
"""Shares by which a typical step is another one where steps begin elsewhere; by more, the marks are not those of steps."""
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
    more than what the typical step is longer than its compute, spread evenly over the ranks, but those on what computes longer
    than it might; of what comes in some steps alone what the mean step is longer than that.
    """
    report, missing = replace(report, recording=recording), report.missing_evidence
    findings: Iterable[Finding] = report.findings
    if recording.is_too_uncertain:
        of_steps = recording.figures == "unrecorded"  # a replay that is so uncertain tells no step from another
        findings = [
            finding
            for finding in findings
            if finding.evidence.get("cause") != "host" and not (of_steps and "steps" in finding.evidence)
        ]
        others = (entry for entry in missing if entry.findings != _OF_HOST)
        missing = (*others, MissingEvidence(_OF_HOST, _reason(recording)))
    step = report.typical_step
    most, of_mean = (None, None) if step is None else (_most_gain([step], step), _most_gain(report.steps, step))
    if most is not None and of_mean is not None:
        limited = []
        for finding in findings:
            if finding.evidence.get("cause") in _COMPUTING:
                limited.append(finding)
                continue
            limit = of_mean if _OF_SOME_STEPS & finding.evidence.keys() else most
            gains = {name: getattr(finding, name) for name in ("gain_ns", "gain_low_ns", "gain_high_ns")}
            limited.append(replace(finding, **{name: min(ns, limit) for name, ns in gains.items() if ns is not None}))
        findings = limited
    return with_verdict(replace(report, findings=tuple(findings), missing_evidence=missing))


_OF_HOST = ("host",)


def _reason(recording: RecordingReport) -> str:
    half = recording.relative_error
    known = "how long the step is without its recording is not known"
    if half is not None:
        known = f"how long the step is without its recording is known to ±{half:.0%} only"
    elif recording.slowdown is not None:
        known = f"recorded steps take {recording.slowdown:.2f} times as long, and what of that is the recorder's is not known"
    if recording.unrecorded_step_ns is None:
        cure = "record with less (no shapes, stacks or modules), by `pptrace run`, which measures it"
    elif recording.settings.get("level") != "light":
        cure = "record with less (pptrace run --record light), or more steps on a machine that does nothing else"
    else:
        cure = "take more steps on a machine that does nothing else"
    return f"{known}, so that there are no findings about hosts: {cure}"


_COMPUTING = ("imbalance", "straggler", "jitter")
"""Causes in what ops compute: without them compute is shorter too."""
_OF_SOME_STEPS = {"reason", "steps", "step"}
"""Evidence of findings on what may come in some steps alone."""


def _most_gain(steps: Sequence[StepReport], typical: StepReport) -> int | None:
    """Mean excess of steps over the compute of the typical one's ranks, spread evenly, ns; None where that is not known."""
    lengths = [step.length_ns for step in steps if step.length_ns is not None and step.ranks]
    computes = all_known(rank.compute_ns for rank in typical.ranks)
    return max(sum(lengths) // len(lengths) - sum(computes) // len(computes), 0) if lengths and computes else None


class UnrecordedSteps(Struct, frozen=True):
    """Lengths of steps that were not recorded, ns: of those before the recording, and of those after it; ``recorded`` are those
    of the recorded ones, from start to start as the others. ``is_detached``: the recorder left nothing on that slows later steps.
    """

    before: Int64
    after: Int64
    recorded: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    is_detached: bool = False

    @property
    def typical_ns(self) -> int | None:
        """The median of those before and, unless the recording slowed them, those after; None without any."""
        return round(float(np.median(self.lengths))) if len(self.lengths) else None

    @property
    def lengths(self) -> Int64:
        """The steps that are as they were before the recording: those before it and, unless it slowed them, those after."""
        is_slowed = (self.slowed_after or 1.0) > _SLOWED
        return self.before if is_slowed else np.concatenate((self.before, self.after))

    def like(self, step_ns: int) -> UnrecordedSteps:
        """The same lengths where steps begin elsewhere, so that the typical recorded one takes ``step_ns`` (the median, of an
        even number the lower one): what does not come in every step is in another one then.
        """
        if len(self.recorded) < _FEWEST_RECORDED:
            return self
        ratio = step_ns / float(np.sort(self.recorded)[(len(self.recorded) - 1) // 2])
        if not _ELSEWHERE < abs(ratio - 1) < _MOST_ELSEWHERE:
            return self
        before, after, recorded = (
            np.rint(steps * ratio).astype(np.int64) for steps in (self.before, self.after, self.recorded)
        )
        return UnrecordedSteps(before, after, recorded, self.is_detached)

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
        """Ratio of steps after the recording to those before it; None where too few of them tell."""
        if not len(self.before) or not len(self.after):
            return None
        is_apart = _SLOWED * self.before.max() < self.after.min()
        is_told = len(self.before) >= _FEWEST_BEFORE or (is_apart and not self.is_detached)
        return float(np.median(self.after) / np.median(self.before)) if is_told else None


def unrecorded_steps(times: Sequence[Mapping[str, Any]], *, is_detached: bool = False) -> UnrecordedSteps:
    """The unrecorded steps of ranks, of which each wrote when its steps began and ended.

    The length of a step is from its start to the next one's, without what the recorder did in between: the median of the ranks.
    The first steps and those that a recorder disturbed otherwise do not count.
    """
    before, after, inside = [], [], []
    for of_rank in times:
        try:
            start, end = (np.array(of_rank[name], dtype=np.int64) for name in ("start_ns", "end_ns"))
            first, recorded = int(of_rank.get("first_step") or 0), of_rank.get("recorded")
            device, disturbed = of_rank.get("device_ns"), of_rank.get("disturbed") or ()
        except (KeyError, TypeError, ValueError):
            continue
        if recorded is None or len(start) != len(end):
            continue
        periods, is_known = end - start, np.ones(len(start), dtype=np.bool_)
        if isinstance(device, Sequence) and len(device) == len(start) and any(ns is not None for ns in device):
            periods = np.array([ns or 0 for ns in device], dtype=np.int64)
            is_known = np.array([ns is not None for ns in device])
        steps = first + np.arange(len(start))
        counts = (steps >= _WARM_UP) & ~np.isin(steps, disturbed) & is_known
        before.append(periods[counts & (steps < recorded[0])][-_MOST_STEPS:])
        after.append(periods[counts & (steps >= recorded[1])][:_MOST_STEPS])
        inside.append(periods[counts & (steps >= recorded[0]) & (steps < recorded[1])])
    return UnrecordedSteps(_median_of_ranks(before), _median_of_ranks(after), _median_of_ranks(inside), is_detached)


def _median_of_ranks(of_ranks: Sequence[Int64]) -> Int64:
    """The median over the ranks of each step, of those that all of them have."""
    num = min(map(len, of_ranks), default=0)
    if not num:
        return np.empty(0, dtype=np.int64)
    return np.median([steps[-num:] for steps in of_ranks], axis=0).astype(np.int64)
