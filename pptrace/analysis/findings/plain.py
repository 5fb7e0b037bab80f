"""Findings on hosts of steps without a pipeline: loading of data and the like, time between operators, and a rank that comes last
to collectives.

Ranks that collectives hold together take a step as long as the last of them does. What one rank has more of makes it late, so
that what is between operators counts as far as every rank has it.

Synchronisations in a finding about launching: the calls for which devices ran dry, and where.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.findings.steps import finding_of
from pptrace.analysis.part_words import IDLE_WORDS, NOT_HIDDEN, RECORD_ALL_RANKS
from pptrace.analysis.result import Finding, RankStep, Severity, StepReport, typical_of
from pptrace.analysis.stragglers.reason import LEAST_ANYWHERE, is_noise
from pptrace.model.device import SyncSummary
from pptrace.model.known import all_known
from pptrace.model.tables import MESSAGES, Int64

BETWEEN_OPERATORS = "time between operators"
LAST_TO_COLLECTIVES = "waiting for the last to the collectives"
_MOST_OF_IT = 0.5
"""A rank with this share of all waiting for the last one is named."""


def plain_host_findings(steps: Sequence[StepReport], outliers: Sequence[StepReport] = ()) -> Iterator[Finding]:
    """The findings of steps without a pipeline, each from a twentieth of the step on; what ranges name is that of all steps,
    ``outliers`` too.
    """
    span = sum(step.length_ns or 0 for step in steps)
    if span:
        yield from _idle_span_findings(sorted((*steps, *outliers), key=lambda step: step.step))
        yield from _between_operators(steps, span / len(steps))
        yield from _last_to_collectives(steps, span / len(steps))


def _between_operators(steps: Sequence[StepReport], mean_span: float) -> Iterator[Finding]:
    of_steps = [of_ranks(step, between_operators_ns) for step in steps]
    known = [ns for ns in of_steps if ns is not None]
    if len(known) < len(of_steps) or not _is_finding(lost := np.array(known, dtype=np.int64), mean_span):
        return
    if any(step.has_devices for step in steps):
        what = "the device is idle, and the host runs no operator for a millisecond or more"
    else:
        who = "" if len(steps[0].ranks) == 1 else "every rank has at least as much: "
        what = f"{who}no operator and no communication runs"
    place = place_of_pauses([rank for step in steps for rank in step.ranks])
    at = "data loading, logging and Python between operators" if place == ANYWHERE else "Python there"
    yield _finding(
        lost,
        mean_span,
        f"Host: {{share:.1%}} of the step is between operators ({place})",
        f"{what}; look at {at}, at sleeps and locks, and at other work on the machine's cores",
        {"cause": "host", "where": {}, "reason": BETWEEN_OPERATORS},
    )


ANYWHERE = "Python, input"


def place_of_pauses(ranks: Iterable[RankStep]) -> str:
    """Words for where ranks have their time between operators: the range in which most of it is, if there is one."""
    between, inside = 0, Counter[str]()
    for rank in ranks:
        between += between_operators_ns(rank) or 0
        inside.update(rank.paused_in)
    name, most = max(inside.items(), key=lambda entry: entry[1], default=("", 0))
    return f"in {name}" if most > _MOST_OF_IT * between else ANYWHERE


def between_operators_ns(rank: RankStep) -> int | None:
    """Time of a rank between operators, ns, without that in which a range says what its host did; None where it is not known."""
    return (
        None if rank.between_operators_ns is None else rank.between_operators_ns - sum((rank.idle_spans or {}).values())
    )


def idle_in_range(kind: str) -> Callable[[RankStep], int | None]:
    """The time in which a rank had nothing to do but what ranges of a kind name, ns, as a figure of it, and all of that in which
    it evaluated; None: not known.
    """
    if kind == "EVAL":
        return lambda rank: min(rank.spans.get(kind, 0), rank.window_ns)
    return lambda rank: None if rank.idle_spans is None else rank.idle_spans.get(kind, 0)


def of_ranks(step: StepReport, of_rank: Callable[[RankStep], int | None]) -> int | None:
    """Time that a step gets back without what its ranks have of something, ns: of devices the mean, without that of a rank while
    others waited for it, of hosts alone the least. Few ranks of which it is not known are taken for such as the others; None of
    more.
    """
    known = [(ns, rank.late_ns or 0) for rank in step.ranks if (ns := of_rank(rank)) is not None]
    if not step.has_devices:
        return min(ns for ns, _ in known) if known and len(known) == len(step.ranks) else None
    return sum(max(ns - late, 0) for ns, late in known) // len(known) if 2 * len(known) > len(step.ranks) else None


def _idle_span_findings(steps: Sequence[StepReport]) -> Iterator[Finding]:
    """Findings on what hosts do, as ranges say, while their ranks have nothing else to do, in steps without a pipeline."""
    typical, length = typical_of(steps), sum(step.length_ns or 0 for step in steps)
    for kind, words in IDLE_WORDS.items():
        of_steps = np.array([of_ranks(step, idle_in_range(kind)) or 0 for step in steps], dtype=np.int64)
        recurs = kind in _NOW_AND_THEN and int(np.count_nonzero(of_steps)) > 1
        if not _is_finding(of_steps, length / len(steps), may_recur=True, recurs=recurs):
            continue
        most, share = steps[int(of_steps.argmax())], int(of_steps.sum()) / length
        of_typical = 0 if typical is None else of_ranks(typical, idle_in_range(kind)) or 0
        is_rare = typical is not None and of_typical < _FAR_LESS * share * (typical.length_ns or 0)
        has_devices = any(step.has_devices for step in steps)
        does = (
            f"is device idle time while hosts {words.takes}"
            if has_devices
            else f"goes to hosts that {words.takes} and compute nothing else"
        )
        usual = f"{np.median(of_steps) / 1e6:,.1f} of the median one"
        where, of_rank = _rank_with_most(steps, idle_in_range(kind)) if has_devices else ({}, "")
        yield finding_of(
            of_steps,
            f"{words.phrase.capitalize()}: {share:.1%} of {'all steps' if is_rare else 'the step'} "
            f"{'goes to passes that train nothing' if kind == 'EVAL' else does}",
            f"{of_steps.max() / 1e6:,.1f} ms of step {most.step}, {usual}{of_rank}: {words.advice}",
            {"cause": words.label, "where": where, "reason": words.phrase, "share": share}
            | ({"in_some_steps": True} if is_rare else {}),
        )


def _rank_with_most(
    steps: Sequence[StepReport], of_rank: Callable[[RankStep], int | None]
) -> tuple[dict[str, int | str], str]:
    """(the rank that has twice as much of something as the mean of the others or more, words for it); neither where none has."""
    sums = Counter[int]()
    for rank in (rank for step in steps for rank in step.ranks):
        sums[rank.rank] += of_rank(rank) or 0
    (number, most), *others = sums.most_common()
    of_others = sum(ns for _, ns in others) / max(len(others), 1)
    if not others or most < 2 * of_others:
        return {}, ""
    a_step, other = (ns / len(steps) / 1e6 for ns in (most, of_others))
    return {"rank": number}, f"; {a_step:,.1f} ms a step on rank {number}, {other:,.1f} on the others"


_NOW_AND_THEN = ("EVAL", "CHECKPOINT")
_FAR_LESS = 0.5
WITH_WAITING = "communication with waiting"
LAUNCHED_WORK = "launched work that waits"
PAGEABLE = "copies from pageable memory"
_LARGE = 0.1


def device_findings(steps: Sequence[StepReport]) -> Iterator[Finding]:
    """Findings on what devices do in a tenth of the steps or more, of which nothing tells what would be won back: communication
    of ranks whose others have no trace, and idle time of devices though their next work had been launched; and from a twentieth
    on copies from pageable memory.
    """
    known = [step for step in steps if step.ranks and step.length_ns]
    words = {
        WITH_WAITING: (
            "communication",
            f"Communication: {{:.1%}} of the step is {NOT_HIDDEN}, with the waiting in it",
            "how much of it is waiting for other ranks is not known, whose traces are missing or whose clocks do not compare; "
            f"{RECORD_ALL_RANKS}, and see the warnings",
        ),
        LAUNCHED_WORK: (
            "unexplained",
            "Device: {:.1%} of the step the device is idle though its next work had been launched",
            "what that waited for was not recorded: an event, another process on the device, a copy by the network card, or work "
            "that the recorder lost; look at the largest gaps in the timeline of pptrace dashboard",
        ),
        PAGEABLE: (
            "unexplained",
            "Copies: {:.1%} of all steps the device only copies from pageable memory of its host",
            "the driver moves such copies piece by piece, while its caller waits; what is won without depends on what the device "
            "can do meanwhile; pin the batches (pin_memory=True), and copy the next one ahead with non_blocking=True",
        ),
    }
    for reason, (cause, title, detail) in words.items():
        of_steps = [_mean_over_ranks(step, reason) for step in known]
        share = sum(of_steps) / max(sum(step.length_ns or 0 for step in known), 1)
        if share >= (LEAST_ANYWHERE if reason == PAGEABLE else _LARGE):
            evidence = {"cause": cause, "where": {}, "reason": reason, "share": share}
            yield Finding(Severity.WARNING, title.format(share), detail, None, evidence)


def _mean_over_ranks(step: StepReport, reason: str) -> int:
    """Time of the mean rank of a step for one of these reasons, ns; 0 where it is not known of all ranks."""
    if reason == LAUNCHED_WORK:
        times = all_known(None if rank.host is None else rank.host.dependency_ns for rank in step.ranks)
    elif reason == PAGEABLE:
        times = all_known(rank.device.pageable_ns for rank in step.ranks)
    else:
        is_separated = any(rank.exposed_comm_ns is not None for rank in step.ranks)
        times = None if is_separated else all_known(map(communicating_ns, step.ranks))
    return sum(times) // len(times) if times else 0


def communicating_ns(rank: RankStep) -> int | None:
    """Time in which the device of a rank only communicates or waits inside of that, ns; None where its device work is not what
    the rank computed.
    """
    device = rank.device
    return None if device.compute_ns is None or device.compute_ns != rank.compute_ns else device.communication_ns


def _last_to_collectives(steps: Sequence[StepReport], mean_span: float) -> Iterator[Finding]:
    """The rank that others wait for, and what steps would get back if it came when the next one does."""
    numbers = sorted({rank.rank for step in steps for rank in step.ranks})
    if len(numbers) < 2 or not any(_late_by_itself(rank) for step in steps for rank in step.ranks):
        return
    lost = np.zeros((len(steps), len(numbers)), dtype=np.int64)
    for row, step in enumerate(steps):
        for rank in step.ranks:
            lost[row, numbers.index(rank.rank)] = _late_by_itself(rank)
    most = _clearly_last(lost)
    if most is not None:
        of_steps, number = lost[:, most], numbers[most]
        title = f"waiting for rank {number}, which comes last to the collectives"
        detail = (
            f"rank {number} comes last to the collectives, in all {of_steps.mean() / 1e6:,.1f} ms a step after the last but one: "
            f"what would be won if it came with that one; look at the {_instead(steps, number, of_steps.mean())}"
        )
        where: dict[str, int] = {"rank": number}
    else:
        # Several groups wait at the same time: no step loses more than its ranks wait.
        of_steps, where = np.minimum(lost.sum(axis=1), [_waited_by_the_mean_rank(step) for step in steps]), {}
        title = "waiting for the last rank to the collectives, now one, now another"
        detail = "look for input of uneven length, noise on the hosts, and other work on their cores"
    if _is_finding(of_steps, mean_span, may_recur=True):
        cause = "straggler" if where else "jitter"
        is_rare = bool(np.median(of_steps) < _FAR_LESS * of_steps.mean())
        title = f"{cause.capitalize()}: {{share:.1%}} of {'all steps' if is_rare else 'the step'} goes to {title}"
        evidence = {"cause": cause, "where": where, "reason": LAST_TO_COLLECTIVES}
        yield _finding(of_steps, mean_span, title, detail, evidence | ({"in_some_steps": True} if is_rare else {}))


def _clearly_last(lost: Int64) -> int | None:
    """The rank for which others wait most, by ``lost``, shape (steps, ranks), ns; None where none clearly is: most of the waiting
    is for it, and in most of the steps with much of it, of several steps in two at least, it is the last one.
    """
    of_steps = lost.sum(axis=1)
    most = int(lost.sum(axis=0).argmax())
    is_long = (of_steps > 0) & (of_steps >= _MOST_OF_IT * of_steps.mean())
    num_last = int((is_long & (lost.argmax(axis=1) == most)).sum())
    recurs = num_last >= min(len(lost), 2) and num_last > _MOST_OF_IT * is_long.sum()
    return most if recurs and lost[:, most].sum() >= _MOST_OF_IT * lost.sum() else None


def _late_by_itself(rank: RankStep) -> int:
    """Time for which others waited in collectives for a rank, ns, without what it waited for messages itself; 0 where that is not
    known: a stage of a pipeline that is not recognised comes last where its turn does.
    """
    waits = all_known(comm.wait_ns for comm in rank.comms if comm.kind in MESSAGES and comm.kind != "send")
    return 0 if waits is None else max((rank.late_ns or 0) - sum(waits), 0)


def _waited_by_the_mean_rank(step: StepReport) -> int:
    """Time for which the mean rank of a step waits in collectives, ns; the whole step where it is not known of all."""
    waits = [[comm.wait_ns for comm in rank.comms if comm.wait_ns is not None] for rank in step.ranks]
    return sum(map(sum, waits)) // len(waits) if all(waits) else step.end_ns - step.start_ns


def _instead(steps: Sequence[StepReport], number: int, late_ns: float) -> str:
    """Words for what a rank does longer than the others do, which explains half of ``late_ns`` or more; else for the rank."""
    parts = {
        words: [_mean_of(steps, number, of_rank, own) for own in (True, False)] for words, of_rank in _INSTEAD.items()
    }
    longer = {name: (own, others) for name, (own, others) in parts.items() if own is not None and others is not None}
    name, (own, others) = max(longer.items(), key=lambda part: part[1][0] - part[1][1], default=("", (0.0, 0.0)))
    if not name or own - others < _MOST_OF_IT * late_ns:
        return f"host, clocks and neighbours of rank {number}"
    return f"{name} of rank {number}: {own / 1e6:,.1f} ms a step, of the others {others / 1e6:,.1f}"


IDLE_FIGURES: Mapping[str, Callable[[RankStep], int | None]] = {
    **{words.phrase: idle_in_range(kind) for kind, words in IDLE_WORDS.items()},
    BETWEEN_OPERATORS: between_operators_ns,
    LAST_TO_COLLECTIVES: _late_by_itself,
}
"""Figures of a rank, ns, by the reason of the finding on them."""
_INSTEAD: Mapping[str, Callable[[RankStep], int | None]] = {
    **{words.phrase: IDLE_FIGURES[words.phrase] for words in IDLE_WORDS.values()},
    "time between operators (Python, input)": between_operators_ns,
    "compute": lambda rank: rank.compute_ns,
}
"""Figures of a late rank that may be larger than those of others, ns: of two that tell as much the first one."""


def _mean_of(
    steps: Sequence[StepReport], number: int, of_rank: Callable[[RankStep], int | None], own: bool
) -> float | None:
    """The mean of a figure of one rank (``own``) or of all others, ns; None where one is not known."""
    ranks: list[RankStep] = [rank for step in steps for rank in step.ranks if (rank.rank == number) is own]
    values = all_known(map(of_rank, ranks))
    return sum(values) / len(values) if values else None


def _is_finding(of_steps: Int64, mean_span: float, *, may_recur: bool = False, recurs: bool = False) -> bool:
    """Return whether what steps have is worth a finding. Of what a program does every so many steps (``may_recur``) it is no
    chance that others have none.
    """
    recurs |= may_recur and bool(np.count_nonzero(2 * of_steps >= of_steps.max()) > 1)
    return bool(of_steps.mean() >= LEAST_ANYWHERE * mean_span) and (recurs or not is_noise(of_steps))


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
    details = []
    for is_long, (follows, advice) in ((False, _WAITING_CALLS), (True, _LONG_CALLS)):
        named = [total for total in totals if is_long_call(total["call"]) is is_long]
        drained = sum(total["drained_ns"] for total in named) * len(steps)
        if drained > _LEAST_PART * starved:
            calls = ", ".join(map(_call_words, named[:_MOST_CALLS]))
            details.append(f"{min(drained / max(starved, 1), 1):.0%} of it {follows}: {calls}: {advice}")
    return replace(finding, detail="; ".join([*details, finding.detail]), evidence=evidence)


_WAITING_CALLS = ("follows calls that wait for the device", "avoid them")
LOOK_AT_LONG_CALLS = (
    "look for first use of kernels (modules are loaded lazily, but for CUDA_MODULE_LOADING=EAGER), allocation of memory "
    "(cudaMalloc and cudaFree, by torch's allocator as well), and other threads that hold the driver"
)
_LONG_CALLS = ("is in calls that take far longer than usual", LOOK_AT_LONG_CALLS)
_WAITS = re.compile("Synchronize|Memcpy")


def is_long_call(call: str) -> bool:
    """Return whether a call, of those for which a device ran dry, took long for something else than the device."""
    return _WAITS.search(call) is None


def _call_words(total: Mapping[str, Any]) -> str:
    return (
        f"{total['call']}{' in ' * bool(total['operator'])}{total['operator']} ({total['count']} in all, the longest "
        f"{total['longest_ns'] / 1e6:,.3f} ms on rank {total['longest_rank']}"
        f"{' before ' * bool(total['longest_op'])}{total['longest_op'] or ''})"
    )
