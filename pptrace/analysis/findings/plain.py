"""Findings on hosts of steps without a pipeline: time between operators, and a rank that comes last to collectives.

Ranks that collectives hold together take a step as long as the last of them does. What one rank has more of makes it late, so
that what is between operators counts as far as every rank has it.

Synchronisations in a finding about launching: the calls for which devices ran dry, and where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from pptrace.analysis.findings.outside import finding_of
from pptrace.analysis.result import Finding, RankStep, StepReport
from pptrace.analysis.stragglers.reason import FEWEST_STEPS, LEAST_ANYWHERE, gain_interval
from pptrace.model.device_idle import SyncSummary
from pptrace.model.tables import Int64

BETWEEN_OPERATORS = "time between operators"
LAST_TO_COLLECTIVES = "waiting for the last to the collectives"
_MOST_OF_IT = 0.5
"""A rank with this share of all waiting for the last one is named."""


def plain_host_findings(steps: Sequence[StepReport]) -> Iterator[Finding]:
    """The findings of steps without a pipeline, each from a twentieth of the step on."""
    span = sum(step.length_ns or 0 for step in steps)
    if span:
        yield from _between_operators(steps, span / len(steps))
        yield from _last_to_collectives(steps, span / len(steps))


def _between_operators(steps: Sequence[StepReport], mean_span: float) -> Iterator[Finding]:
    of_steps = [[rank.between_operators_ns for rank in step.ranks] for step in steps]
    known = [[ns for ns in of_step if ns is not None] for of_step in of_steps]
    if not all(of_step and len(of_step) == len(every) for of_step, every in zip(known, of_steps, strict=True)):
        return
    lost = np.array([min(of_step) for of_step in known], dtype=np.int64)
    if not _is_finding(lost, mean_span):
        return
    who = "" if len(known[0]) == 1 else "every rank has at least as much: "
    yield _finding(
        lost,
        mean_span,
        "Host: {share:.1%} of the step is between operators (Python, input)",
        f"{who}no operator and no communication runs; look at data loading, logging and Python between operators, at sleeps and "
        "locks, and at other work on the machine's cores",
        {"cause": "host", "where": {}, "reason": BETWEEN_OPERATORS},
    )


def _last_to_collectives(steps: Sequence[StepReport], mean_span: float) -> Iterator[Finding]:
    """The rank that others wait for, and what steps would get back if it came when the next one does."""
    numbers = sorted({rank.rank for step in steps for rank in step.ranks})
    if len(numbers) < 2 or not any(rank.late_ns for step in steps for rank in step.ranks):
        return
    lost = np.zeros((len(steps), len(numbers)), dtype=np.int64)
    for row, step in enumerate(steps):
        for rank in step.ranks:
            lost[row, numbers.index(rank.rank)] = rank.late_ns or 0
    most = int(lost.sum(axis=0).argmax())
    if lost[:, most].sum() >= _MOST_OF_IT * lost.sum():
        of_steps, number = lost[:, most], numbers[most]
        waiting = f"{of_steps.mean() / 1e6:,.1f} ms a step"
        title = (
            "Straggler: {share:.1%} of the step goes to waiting for "
            + f"rank {number}, which comes last to the collectives"
        )
        detail = (
            f"rank {number} comes last to the collectives; the others wait for it {waiting}{_instead(steps, number)}"
        )
        where: dict[str, int] = {"rank": number}
    else:
        of_steps, where = lost.sum(axis=1), {}
        title = (
            "Jitter: {share:.1%} of the step goes to waiting for the last rank to the collectives, now one, now another"
        )
        detail = "look for input of uneven length, noise on the hosts, and other work on their cores"
    if _is_finding(of_steps, mean_span):
        cause = "straggler" if where else "jitter"
        yield _finding(
            of_steps, mean_span, title, detail, {"cause": cause, "where": where, "reason": LAST_TO_COLLECTIVES}
        )


def _instead(steps: Sequence[StepReport], number: int) -> str:
    """Words for what a rank does longer than the others do; "" where that is not known."""
    parts = {
        "between operators (Python, input)": [
            _mean_of(steps, number, "between_operators_ns", own) for own in (True, False)
        ],
        "in compute": [_mean_of(steps, number, "compute_ns", own) for own in (True, False)],
    }
    longer = {name: (own, others) for name, (own, others) in parts.items() if own is not None and others is not None}
    name, (own, others) = max(longer.items(), key=lambda part: part[1][0] - part[1][1], default=("", (0.0, 0.0)))
    if own <= others:
        return ""
    return f": it is {own / 1e6:,.1f} ms {name}, the others {others / 1e6:,.1f}"


def _mean_of(steps: Sequence[StepReport], number: int, name: str, own: bool) -> float | None:
    """The mean of a figure of one rank (``own``) or of all others, ns; None where one is not known."""
    ranks: list[RankStep] = [rank for step in steps for rank in step.ranks if (rank.rank == number) is own]
    values = [getattr(rank, name) for rank in ranks]
    return sum(values) / len(values) if values and None not in values else None


def _is_finding(of_steps: Int64, mean_span: float) -> bool:
    low, _ = gain_interval(of_steps)
    is_noise = low is not None and low <= 0 and len(of_steps) >= FEWEST_STEPS
    return bool(of_steps.mean() >= LEAST_ANYWHERE * mean_span) and not is_noise


def _finding(of_steps: Int64, mean_span: float, title: str, detail: str, evidence: dict[str, object]) -> Finding:
    share = (int(of_steps.sum()) // len(of_steps)) / mean_span
    return finding_of(of_steps, title.format(share=share), detail, evidence | {"share": share})


_MOST_CALLS = 3
"""Calls that a finding names."""
_LEAST_PART = 0.1
"""Synchronisations that cause less than this part of the time without launches are not named."""


@dataclass(frozen=True, slots=True)
class SyncTotal:
    """All synchronisations by one call in one operator; ``drained_ns`` is per step, over all ranks."""

    call: str
    operator: str
    count: int
    drained_ns: int
    longest_ns: int
    longest_start_ns: int
    longest_rank: int
    longest_op: str | None

    @classmethod
    def of(cls, group: Sequence[tuple[int, SyncSummary]], num_steps: int) -> SyncTotal:
        """The total of (rank, summary) of all ranks and steps."""
        rank, longest = max(group, key=lambda entry: entry[1].longest_ns)
        return cls(
            longest.call,
            longest.operator,
            sum(sync.count for _, sync in group),
            sum(sync.drained_ns for _, sync in group) // num_steps,
            longest.longest_ns,
            longest.longest_start_ns,
            rank,
            longest.longest_op,
        )

    def __str__(self) -> str:
        operator = f" in {self.operator}" if self.operator else ""
        before = "" if self.longest_op is None else f" before {self.longest_op}"
        return (
            f"{self.call}{operator} ({self.count} in all, the longest {self.longest_ns / 1e6:,.3f} ms on rank "
            f"{self.longest_rank}{before})"
        )


def with_synchronisations(finding: Finding, steps: Sequence[StepReport]) -> Finding:
    """Add to a finding about the host the synchronisations for which devices ran dry, with the place of the longest."""
    if finding.evidence["cause"] != "host" or not any(step.has_devices for step in steps):
        return finding
    ranks = [rank for step in steps for rank in step.ranks]
    starved = sum(rank.host.launch_starved_ns for rank in ranks if rank.host is not None)
    by_call: dict[tuple[str, str], list[tuple[int, SyncSummary]]] = {}
    for rank in ranks:
        for sync in rank.synchronisations or ():
            if sync.drained_ns:
                by_call.setdefault((sync.call, sync.operator), []).append((rank.rank, sync))
    totals = sorted(
        (SyncTotal.of(group, len(steps)) for group in by_call.values()), key=lambda total: -total.drained_ns
    )
    evidence = {
        **finding.evidence,
        "launch_starved_ns": starved // len(steps),
        "synchronisations": [asdict(total) for total in totals[:_MOST_CALLS]],
    }
    drained = sum(total.drained_ns for total in totals) * len(steps)
    if drained <= _LEAST_PART * starved:
        return replace(finding, evidence=evidence)
    calls = ", ".join(map(str, totals[:_MOST_CALLS]))
    detail = (
        f"{min(drained / max(starved, 1), 1):.0%} of it follows calls that wait for the device: {calls}: avoid them"
    )
    return replace(finding, detail=f"{detail}; {finding.detail}", evidence=evidence)
