"""What a person should know first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from pptrace.analysis.result import Finding, ScheduleSummary, Severity, StepReport, Waterfall

_CAUSES = {
    "imbalance": (
        "stages of unequal cost",
        "the slowest stage sets the pace; move layers away from it (embedding and head count too)",
    ),
    "jitter": ("ops of one stage that vary", "look for noise on the host, clock changes or uneven input lengths"),
    "communication": ("transfers between stages", "overlap them with compute, or send fewer bytes"),
    "unexplained": (
        "time that neither ops nor transfers show",
        "between ops the ranks did something that no mark covers: launching, Python, waiting for a late receive",
    ),
}
_WORTH_SAYING = 0.02
"""A cause below this share of the step is not mentioned."""


def find(steps: Sequence[StepReport], schedule: ScheduleSummary) -> tuple[Finding, ...]:
    """Findings over all steps, the largest gain first."""
    findings = [
        Finding(
            Severity.WARNING,
            "The run does not follow the plan",
            f"{len(schedule.mismatches)} of its orders differ from {schedule.name}; the first: {schedule.mismatches[0]}",
        )
        for _ in schedule.mismatches[:1]  # one finding, however many differ
    ]
    explained = [step for step in steps if step.bubble.waterfall_ns is not None]
    if not explained:
        return tuple(findings)
    span = sum(step.span_ns for step in explained)
    falls = [step.bubble.waterfall_ns for step in explained if step.bubble.waterfall_ns]
    causes = [_cause(name, falls, span) for name in _CAUSES]
    found = sorted((cause for cause in causes if cause), key=lambda finding: -(finding.gain_ns or 0))
    return (*findings, _structural(falls, span, schedule), *found)


def _total(falls: Sequence[Waterfall], name: str) -> int:
    return sum(asdict(fall)[name] for fall in falls)


def _cause(name: str, falls: Sequence[Waterfall], span: int) -> Finding | None:
    total = _total(falls, name)
    if total < _WORTH_SAYING * span:
        return None
    what, advice = _CAUSES[name]
    return Finding(
        Severity.WARNING,
        f"{name.capitalize()}: {total / span:.1%} of the step goes to {what}",
        advice,
        gain_ns=total // len(falls),
        evidence={"waterfall": name, "share": total / span},
    )


def _structural(falls: Sequence[Waterfall], span: int, schedule: ScheduleSummary) -> Finding:
    total = _total(falls, "structural")
    return Finding(
        Severity.INFO,
        f"Structural: {total / span:.1%} of the step is the fill and drain of {schedule.name} itself",
        "more microbatches, or a schedule with a smaller bubble (interleaved, zero-bubble), would shrink it",
        gain_ns=total // len(falls),
        evidence={"waterfall": "structural", "share": total / span},
    )
