"""Findings on hosts of steps without a pipeline: loading of data and the like, time between operators, and a rank that comes last
to collectives.

Ranks that collectives hold together take a step as long as the last of them does. What one rank has more of makes it late, so
that what is between operators counts as far as every rank has it.

Synchronisations in a finding about launching: the calls for which devices ran dry, and where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pptrace.analysis.findings.steps import finding_of
from pptrace.analysis.part_words import IDLE_WORDS
from pptrace.analysis.result import Finding, RankStep, StepReport, typical_of
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
    named = [[sum((rank.idle_spans or {}).values()) for rank in step.ranks] for step in steps]
    lost = np.array([min(np.subtract(*of_step)) for of_step in zip(known, named, strict=True)], dtype=np.int64)
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


def idle_span_findings(steps: Sequence[StepReport]) -> Iterator[Finding]:
    """Findings on what hosts do while their ranks have nothing else to do, in steps without a pipeline: of devices the mean over
    the ranks, without that of a rank while others waited for it; of hosts alone what every rank has.
    """
    known = [step for step in steps if 2 * len(_ranks_of_known_spans(step)) > len(step.ranks)]
    span, typical = sum(step.length_ns or 0 for step in known), typical_of(steps)
    for kind, words in IDLE_WORDS.items() if span else ():
        of_steps = np.array([_idle_in(step, kind) for step in known], dtype=np.int64)
        if not _is_finding(of_steps, span / len(known)):
            continue
        most, share = known[int(of_steps.argmax())], int(of_steps.sum()) / span
        is_rare = typical in known and _idle_in(typical, kind) < _FAR_LESS * share * (typical.length_ns or 0)
        of = "all steps" if is_rare else "the step"
        devices = "is device idle time" if any(step.has_devices for step in known) else "has no operator running"
        longest = (
            f"{of_steps.max() / 1e6:,.1f} ms of step {most.step}, {np.median(of_steps) / 1e6:,.1f} of the median one"
        )
        yield finding_of(
            of_steps,
            f"{words.phrase.capitalize()}: {share:.1%} of {of} {devices} while hosts {words.takes}",
            f"{longest}: {words.advice}",
            {"cause": words.label, "where": {}, "reason": words.phrase, "share": share},
        )


_FAR_LESS = 0.5


def ranks_of_known_hosts(step: StepReport) -> list[RankStep]:
    """The ranks of a step of which it is known what their devices waited for."""
    return [rank for rank in step.ranks if rank.host is not None]


def _ranks_of_known_spans(step: StepReport) -> list[RankStep]:
    return [rank for rank in step.ranks if rank.idle_spans is not None]


def _idle_in(step: StepReport, kind: str) -> int:
    """Time of a step in which its ranks had nothing to do but what a range of this kind names, ns."""
    idle = [((rank.idle_spans or {}).get(kind, 0), rank.late_ns or 0) for rank in _ranks_of_known_spans(step)]
    if step.has_devices:
        return sum(max(ns - late, 0) for ns, late in idle) // len(idle)
    return min(ns for ns, _ in idle)


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
        words: [_mean_of(steps, number, of_rank, own) for own in (True, False)] for words, of_rank in _INSTEAD.items()
    }
    longer = {name: (own, others) for name, (own, others) in parts.items() if own is not None and others is not None}
    name, (own, others) = max(longer.items(), key=lambda part: part[1][0] - part[1][1], default=("", (0.0, 0.0)))
    if own <= others:
        return ""
    return f": it is {own / 1e6:,.1f} ms {name}, the others {others / 1e6:,.1f}"


def _idle_in_range(kind: str) -> Callable[[RankStep], int | None]:
    return lambda rank: None if rank.idle_spans is None else rank.idle_spans.get(kind, 0)


_INSTEAD: Mapping[str, Callable[[RankStep], int | None]] = {
    **{f"in {words.phrase}": _idle_in_range(kind) for kind, words in IDLE_WORDS.items()},
    "between operators (Python, input)": lambda rank: rank.between_operators_ns,
    "in compute": lambda rank: rank.compute_ns,
}
"""What a late rank may do longer than others, ns: of two that tell as much the first one."""


def _mean_of(
    steps: Sequence[StepReport], number: int, of_rank: Callable[[RankStep], int | None], own: bool
) -> float | None:
    """The mean of a figure of one rank (``own``) or of all others, ns; None where one is not known."""
    ranks: list[RankStep] = [rank for step in steps for rank in step.ranks if (rank.rank == number) is own]
    values = list(map(of_rank, ranks))
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


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


def _total_of(group: Sequence[tuple[int, SyncSummary]], num_steps: int) -> dict[str, Any]:
    """All synchronisations by one call in one operator, from (rank, summary) of all ranks and steps; ``drained_ns`` is per step,
    over all ranks.
    """
    rank, longest = max(group, key=lambda entry: entry[1].longest_ns)
    return {
        "call": longest.call,
        "operator": longest.operator,
        "count": sum(sync.count for _, sync in group),
        "drained_ns": sum(sync.drained_ns for _, sync in group) // num_steps,
        "longest_ns": longest.longest_ns,
        "longest_start_ns": longest.longest_start_ns,
        "longest_rank": rank,
        "longest_op": longest.longest_op,
    }


def with_idle_spans(finding: Finding, steps: Sequence[StepReport]) -> Finding:
    """Add to a finding about the host of a pipeline what ranges say that hosts did while devices waited for launches."""
    ranks = [rank for step in steps for rank in step.ranks if rank.host is not None]
    starved = sum(rank.host.launch_starved_ns for rank in ranks if rank.host is not None)
    idle = Counter[str]()
    for rank in ranks:
        idle.update(rank.idle_spans or {})
    shares = {kind: ns / starved for kind, ns in idle.most_common() if ns > _LEAST_PART * starved}
    if finding.evidence["cause"] != "host" or not shares:
        return finding
    words = (f"{share:.0%} of it while hosts {IDLE_WORDS[kind].takes}" for kind, share in shares.items())
    advice = IDLE_WORDS[next(iter(shares))].advice if max(shares.values()) > _MOST_OF_IT else finding.detail
    return replace(finding, detail=f"{', '.join(words)}: {advice}", evidence={**finding.evidence, "idle_spans": shares})


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
        (_total_of(group, len(steps)) for group in by_call.values()), key=lambda total: -total["drained_ns"]
    )
    evidence = {
        **finding.evidence,
        "launch_starved_ns": starved // len(steps),
        "synchronisations": totals[:_MOST_CALLS],
    }
    drained = sum(total["drained_ns"] for total in totals) * len(steps)
    if drained <= _LEAST_PART * starved:
        return replace(finding, evidence=evidence)
    calls = ", ".join(
        f"{total['call']}{' in ' * bool(total['operator'])}{total['operator']} ({total['count']} in all, the longest "
        f"{total['longest_ns'] / 1e6:,.3f} ms on rank {total['longest_rank']}"
        f"{' before ' * bool(total['longest_op'])}{total['longest_op'] or ''})"
        for total in totals[:_MOST_CALLS]
    )
    detail = (
        f"{min(drained / max(starved, 1), 1):.0%} of it follows calls that wait for the device: {calls}: avoid them"
    )
    return replace(finding, detail=f"{detail}; {finding.detail}", evidence=evidence)
