"""Findings: the main causes of lost time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from pptrace.analysis.result import Finding, ScheduleSummary, Severity, StepReport, Waterfall

_CAUSES = {
    "imbalance": (
        "stages of unequal cost",
        "the slowest stage sets the pace; move layers away from it (embedding and head count too)",
    ),
    "jitter": ("ops of one stage that vary", "look for noise on the host, clock changes or uneven input lengths"),
    "communication": ("communication that no compute hides", "overlap it with compute, or send fewer bytes"),
    "unexplained": (
        "time that belongs to neither ops nor transfers",
        "between ops the ranks did something that no mark covers: launching, Python, waiting for a late receive",
    ),
}
_LEAST_SHARE = 0.02
"""A cause below this share of the step is not mentioned."""


def find(steps: Sequence[StepReport], schedule: ScheduleSummary) -> tuple[Finding, ...]:
    """Findings over all steps, the largest gain first."""
    findings = [
        Finding(
            Severity.CRITICAL,  # every figure that rests on the plan is in doubt
            "The run does not follow the plan",
            f"{len(schedule.mismatches)} of its orders differ from {schedule.name}; the first: {schedule.mismatches[0]}",
        )
        for _ in schedule.mismatches[:1]  # one finding, however many differ
    ]
    explained = [step for step in steps if step.bubble.waterfall_ns is not None]
    if not explained:
        return tuple(findings)
    span = sum(step.span_ns or 0 for step in explained)
    waterfalls = [step.bubble.waterfall_ns for step in explained if step.bubble.waterfall_ns]
    candidates = [_cause(name, waterfalls, span) for name in _CAUSES]
    causes = [_with_axes(cause, explained) for cause in candidates if cause]
    ordered = sorted(causes, key=lambda finding: -(finding.gain_ns or 0))
    return (*findings, _structural(waterfalls, span, schedule), *ordered)


def _total(waterfalls: Sequence[Waterfall], name: str) -> int:
    return sum(asdict(waterfall)[name] for waterfall in waterfalls)


def _cause(name: str, waterfalls: Sequence[Waterfall], span: int) -> Finding | None:
    total = _total(waterfalls, name)
    if total < _LEAST_SHARE * span:
        return None
    what, advice = _CAUSES[name]
    return Finding(
        Severity.WARNING,
        f"{name.capitalize()}: {total / span:.1%} of the step goes to {what}",
        advice,
        gain_ns=total // len(waterfalls),
        evidence={"waterfall": name, "share": total / span},
    )


def _with_axes(finding: Finding, steps: Sequence[StepReport]) -> Finding:
    """Add the axes to a finding about communication."""
    if finding.evidence["waterfall"] != "communication":
        return finding
    exposed: Counter[str] = Counter()
    for comm in (comm for step in steps for rank in step.ranks for comm in rank.comms):
        exposed[comm.axis] += comm.exposed_ns or 0
    total = exposed.total()
    if not total:
        return finding
    shares = {axis: part / total for axis, part in exposed.most_common() if part}
    by_axis = ", ".join(f"{axis} {share:.0%}" for axis, share in shares.items())
    return replace(
        finding,
        detail=f"of what is exposed: {by_axis}; {finding.detail}",
        evidence={**finding.evidence, "exposed_by_axis": shares},
    )


def _structural(waterfalls: Sequence[Waterfall], span: int, schedule: ScheduleSummary) -> Finding:
    total = _total(waterfalls, "structural")
    return Finding(
        Severity.INFO,
        f"Structural: {total / span:.1%} of the step is the fill and drain of {schedule.name} itself",
        "more microbatches, or a schedule with a smaller bubble (interleaved, zero-bubble), would shrink it",
        gain_ns=total // len(waterfalls),
        evidence={"waterfall": "structural", "share": total / span},
    )
