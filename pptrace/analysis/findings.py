"""Findings: the main causes of lost time, each with where it is and what a step would get back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pptrace.analysis.host_findings import with_synchronisations
from pptrace.analysis.result import Cause, Finding, ScheduleSummary, Severity, StepReport
from pptrace.model.tables import Int64

_CAUSES = {
    "imbalance": (
        "goes to stages of unequal cost",
        "goes to {place}, which costs more than the others",
        "the slowest stage sets the pace; move layers away from it (embedding and head count too)",
    ),
    "straggler": (
        "is lost to ranks that are slower than their replicas",
        "is lost to {place}, which is slower than its replicas",
        "other ranks run the same stage faster: look at this one's host, clocks, neighbours and length of inputs",
    ),
    "jitter": (
        "goes to ops of one stage that vary",
        "goes to ops of one stage that vary, most of them on {place}",
        "look for noise on the host, clock changes or uneven input lengths",
    ),
    "communication": (
        "goes to communication that no compute hides",
        "goes to communication that no compute hides",
        "overlap it with compute, or send fewer bytes",
    ),
    "host": (
        "goes to devices that have nothing to do because their hosts have not launched it",
        "goes to {place}, whose device has nothing to do because its host has not launched it",
        "launch less and earlier: CUDA graphs or torch.compile, fewer and larger kernels, less Python between ops",
    ),
    "unexplained": (
        "goes to time that belongs to neither ops nor transfers",
        "goes to time that belongs to neither ops nor transfers",
        "between ops the ranks did something that no mark covers: launching, Python, waiting for a late receive; on devices also "
        "copies, and gaps between kernels that had been launched in time",
    ),
}
"""What a finding says of a cause, what where most of it is at one place, and what to do."""
_LEAST_SHARE = 0.02
"""A cause below this share of the step is not mentioned."""
_MOST_OF_IT = 0.5
"""A place with this share of a cause is named."""
_FEWEST_STEPS = 5
"""With fewer steps the interval of a gain is from the least to the largest."""
_NUM_SAMPLES = 1000


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
    explained = [step for step in steps if step.causes is not None]
    if not explained:
        return (*findings, *_host_without_pipeline([step for step in steps if not step.has_pipeline]))
    span = sum(step.span_ns or 0 for step in explained)
    losses = _losses_of([step.causes or () for step in explained])
    candidates = [_finding(losses[name], span) for name in _CAUSES if name in losses]
    named = [with_synchronisations(_with_axes(finding, explained), explained) for finding in candidates if finding]
    ordered = sorted(named, key=lambda finding: -(finding.gain_ns or 0))
    structural = [_structural(losses["structural"], span, schedule)] if "structural" in losses else []
    return (*findings, *structural, *ordered)


@dataclass(frozen=True, slots=True, eq=False)
class _Loss:
    """What a cause took of each step, ns, shape (steps,), and of all steps at each place."""

    name: str
    of_steps: Int64
    places: Mapping[tuple[str, int | str], int]

    @property
    def total(self) -> int:
        return int(self.of_steps.sum())

    @property
    def where(self) -> dict[str, int | str]:
        """The place that has most of it; {} if there is none."""
        if not self.places:
            return {}
        place, ns = max(self.places.items(), key=lambda item: (item[1], str(item[0])))
        return {place[0]: place[1]} if ns >= _MOST_OF_IT * max(self.total, 1) else {}

    def interval(self) -> tuple[int, int]:
        """The 90 % interval of the mean over steps, by bootstrap; with few steps from the least to the largest, ns."""
        values = self.of_steps
        if len(values) < _FEWEST_STEPS:
            return int(values.min()), int(values.max())
        chosen = np.random.default_rng(0).integers(0, len(values), (_NUM_SAMPLES, min(len(values), _NUM_SAMPLES)))
        low, high = np.percentile(values[chosen].mean(axis=1), (5, 95))
        return int(np.floor(low)), int(np.ceil(high))


def _losses_of(causes: Sequence[Sequence[Cause]]) -> dict[str, _Loss]:
    """The losses by the name of their cause."""
    of_steps: dict[str, Int64] = {}
    places: dict[str, Counter[tuple[str, int | str]]] = {}
    for index, of_step in enumerate(causes):
        for cause in of_step:
            of_steps.setdefault(cause.cause, np.zeros(len(causes), dtype=np.int64))[index] += cause.ns
            places.setdefault(cause.cause, Counter()).update(dict.fromkeys(cause.where.items(), cause.ns))
    return {name: _Loss(name, values, places[name]) for name, values in of_steps.items()}


def _finding(loss: _Loss, span: int) -> Finding | None:
    low, high = loss.interval()
    is_noise = low <= 0 and len(loss.of_steps) >= _FEWEST_STEPS
    if loss.total < _LEAST_SHARE * span or is_noise:
        return None
    anywhere, somewhere, advice = _CAUSES[loss.name]
    where = loss.where
    place = " ".join(f"{kind} {at}" for kind, at in where.items())
    return Finding(
        Severity.WARNING,
        f"{loss.name.capitalize()}: {loss.total / span:.1%} of the step {somewhere.format(place=place) if where else anywhere}",
        advice,
        gain_ns=loss.total // len(loss.of_steps),
        evidence={"cause": loss.name, "where": where, "share": loss.total / span},
        gain_low_ns=low,
        gain_high_ns=high,
    )


def _with_axes(finding: Finding, steps: Sequence[StepReport]) -> Finding:
    """Add the axes to a finding about communication."""
    if finding.evidence["cause"] != "communication":
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


def _host_without_pipeline(steps: Sequence[StepReport]) -> tuple[Finding, ...]:
    """The finding on launching in steps without a pipeline: the mean over the ranks of what their devices waited for it."""
    known = [step for step in steps if step.ranks and all(rank.host is not None for rank in step.ranks)]
    if not known:
        return ()
    starved = [
        sum(rank.host.launch_starved_ns for rank in step.ranks if rank.host is not None) // len(step.ranks)
        for step in known
    ]
    loss = _Loss("host", np.array(starved, dtype=np.int64), {})
    finding = _finding(loss, sum(sum(rank.window_ns for rank in step.ranks) // len(step.ranks) for step in known))
    return () if finding is None else (with_synchronisations(finding, known),)


def _structural(loss: _Loss, span: int, schedule: ScheduleSummary) -> Finding:
    low, high = loss.interval()
    return Finding(
        Severity.INFO,
        f"Structural: {loss.total / span:.1%} of the step is the fill and drain of {schedule.name} itself",
        "more microbatches, or a schedule with a smaller bubble (interleaved, zero-bubble), would shrink it",
        gain_ns=loss.total // len(loss.of_steps),
        evidence={"cause": "structural", "where": {}, "share": loss.total / span},
        gain_low_ns=low,
        gain_high_ns=high,
    )
