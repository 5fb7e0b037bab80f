"""The whole report in one sentence: how long a step takes, where it goes, and what would give most of it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from pptrace.analysis.result import Finding, RankDevice, Report, Severity

_WORTH_NAMING = 0.02
"""A part below this share of the step is left out of the sentence."""
_NAMES = {
    "compute": "compute",
    "structural": "the fill and drain of {schedule}",
    "imbalance": "stages of unequal cost",
    "jitter": "ops that vary",
    "communication": "exposed communication",
    "host": "launching",
    "unexplained": "unexplained",
}


def with_verdict(report: Report) -> Report:
    """The report with one sentence about the run, which is about its typical step."""
    return replace(report, verdict=_verdict(report))


def _verdict(report: Report) -> str:
    step, steps, schedule, findings = report.typical_step, report.steps, report.schedule, report.findings
    if report.hang is not None:
        return f"The run hung: {report.hang['detail']}"
    if step is None:
        return _without_steps(report.device)
    if step.span_ns is None:
        number = "1 step was" if len(steps) == 1 else f"{len(steps)} steps were"
        return f"{number} recognised; how long is not known, because the ranks' clocks cannot be compared."
    length = f"The {'typical ' if len(steps) > 1 else ''}step takes {_ms(step.span_ns)} ms"
    if step.bubble.waterfall_ns is not None:
        parts = {name: value or 0 for name, value in asdict(step.bubble.waterfall_ns).items()}
        shares = {_NAMES[name].format(schedule=schedule.name): value / step.span_ns for name, value in parts.items()}
        return f"{length}: {_listed(shares)}{_largest(findings)}."
    ranks = step.ranks
    window = sum(rank.window_ns for rank in ranks)
    compute = _sum([rank.compute_ns for rank in ranks])
    exposed = _sum([rank.exposed_comm_ns for rank in ranks])
    bubble = _sum([rank.bubble_ns for rank in ranks])
    if compute is None or not window:
        return f"{length}; what it was spent on is not known."
    if exposed is None or bubble is None:
        return (
            f"{length}: {compute / window:.0%} compute; the rest is waiting and exposed communication, not told apart."
        )
    waiting = "bubble" if step.has_pipeline else "waiting for other ranks, input and Python"
    shares = {"compute": compute / window, "exposed communication": exposed / window, waiting: bubble / window}
    return f"{length}: {_listed(shares)}{_largest(findings)}."


def _without_steps(device: Sequence[RankDevice]) -> str:
    known = [entry.breakdown for entry in device if entry.breakdown.busy_ns is not None]
    whole = sum((part.busy_ns or 0) + (part.idle_ns or 0) for part in known)
    if not whole:
        return "No training step was recognised in these traces."
    shares = {
        "computing": sum(part.compute_ns or 0 for part in known) / whole,
        "communicating": sum(part.communication_ns or 0 for part in known) / whole,
        "moving memory": sum(part.memory_ns or 0 for part in known) / whole,
        "idle": sum(part.idle_ns or 0 for part in known) / whole,
    }
    devices = "The device was" if len(known) == 1 else f"The {len(known)} devices were"
    return f"No training step was recognised in these traces. {devices} {_listed(shares)}."


def _listed(shares: Mapping[str, float]) -> str:
    named = sorted(shares.items(), key=lambda item: (item[0] != "compute", -item[1]))
    return ", ".join(f"{share:.0%} {name}" for name, share in named if share >= _WORTH_NAMING)


def _largest(findings: Sequence[Finding]) -> str:
    """What the largest finding that is not the schedule itself would give back."""
    gains = [(gain, of) for of in findings if of.severity is not Severity.INFO and (gain := of.gain_ns)]
    if not gains:
        return ""
    gain, finding = max(gains, key=lambda pair: pair[0])
    name = _NAMES.get(str(finding.evidence.get("waterfall")), finding.title)
    return f"; the most to win back is {_ms(gain)} ms a step of {name}" if name != "unexplained" else ""


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.1f}" if ns < 1e9 else f"{ns / 1e6:,.0f}"
