"""Root causes: what makes several findings, so that it stands once, above them.

Evidence that findings need: the kinds that a run is too short for, or has nothing to compare with, and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.result import Finding, MissingEvidence, StepReport
from pptrace.analysis.shared_devices import OWN_DEVICE, TAKING_TURNS, SharedDevice, wait_behind, who_shares
from pptrace.analysis.steps.step_series import FEWEST_OF_LEVEL
from pptrace.analysis.stragglers.alike import SLOW_RANK
from pptrace.analysis.stragglers.communication import FEWEST_ALIKE, LATE_RECEIVES, SLOW_LINK, num_links
from pptrace.analysis.stragglers.hosts import FEWEST_WINDOWS
from pptrace.analysis.stragglers.reason import FEWEST_STEPS
from pptrace.analysis.whole_run import CLOCKS_OFF, CoreWait, Doubt, RootCause
from pptrace.model.wording import as_ranges

SHARED_DEVICE, CLOCKS, CORES = "shared device", "clocks", "cores"
FOLLOWS_FROM = "follows_from"
"""Evidence of a finding that follows from a root cause: its name."""
_OF_CLOCKS = frozenset({"communication", "unexplained", SLOW_LINK, LATE_RECEIVES})
"""Causes and reasons that compare moments of different ranks."""
_ALSO_SHORT = 0.5
"""Part of the wait of the rank that waited most for a core from which on another one was short of them too."""
_HARDLY_BUSY = 0.2
"""Part of the time below which a GPU that ranks share is busy too little for turns to explain much."""
_MUCH = 0.1
"""Part of a finding's gain from which on what the clocks may be off by is what it follows from."""


def above_doubt(findings: Sequence[Finding], uncertainty_ns: int | None, *, has_devices: bool = False) -> list[Finding]:
    """The findings without those that compare moments of ranks and gain less than their clocks may be off by, ns.

    What hosts cost is known by their devices, or else by what other ranks had sent them.
    """
    doubt = uncertainty_ns or 0
    kept = []
    for finding in findings:
        is_late = finding.evidence.get("cause") == "host" and not finding.evidence.keys() & {"reason", "steps", "step"}
        is_in_doubt = _compares_moments(finding) or (is_late and not has_devices)
        if not is_in_doubt or finding.gain_ns is None or finding.gain_ns > doubt:
            kept.append(finding)
    return kept


def with_root_causes(
    findings: Sequence[Finding],
    sharing: Sequence[SharedDevice],
    waits: Sequence[CoreWait],
    step_ns: int,
    doubts: Sequence[Doubt] = (),
    uncertainty_ns: int | None = None,
    num_steps: int = FEWEST_STEPS,
) -> tuple[tuple[RootCause, ...], tuple[Finding, ...]]:
    """(root causes from which findings follow, the findings, each with the first one that it follows from).

    ``sharing`` are the GPUs that several ranks have, ``step_ns`` is the length of a mean step of ``num_steps``,
    ``uncertainty_ns`` what the clocks may be off by; ``doubts`` say whether that is much.
    """
    named = list(findings)
    roots: list[RootCause] = []
    if sharing:
        shares = [device.busy_share for device in sharing if device.busy_share is not None]
        is_little = len(shares) == len(sharing) and max(shares) < _HARDLY_BUSY
        for index, finding in enumerate(named):
            if finding.evidence.get("cause") not in (None, "structural"):
                named[index] = _following(finding if is_little else _with_turns(finding), SHARED_DEVICE)
        roots.append(
            RootCause(
                SHARED_DEVICE,
                tuple(rank for device in sharing for rank in device.ranks),
                who_shares(sharing),
                (
                    f"all of them together keep it busy for {max(shares):.0%} of the time, so that turns explain little: "
                    "what else they share, as processor cores and memory, is in these times too"
                    if is_little
                    else TAKING_TURNS
                ),
                f"{OWN_DEVICE}, and record again",
                "what that saves is not known, as these times are not those of such a run",
            )
        )
    line = next((doubt.line for doubt in doubts if doubt.line.startswith(CLOCKS_OFF)), "")
    if line and uncertainty_ns is not None:
        for index, finding in enumerate(named):
            much = finding.gain_ns is not None and uncertainty_ns >= _MUCH * finding.gain_ns
            if FOLLOWS_FROM not in finding.evidence and _compares_moments(finding) and much:
                named[index] = _following(finding, CLOCKS)
        title, _, detail = line.partition(": ")
        roots.append(
            RootCause(
                CLOCKS,
                (),
                title,
                detail,
                "record the ranks of a host in one run of pptrace run, which relates their clocks, and keep the clocks of hosts "
                "together (PTP, chrony)",
                "what that costs is known no better than the clocks are",
            )
        )
    cores, named = _short_of_cores(named, waits, step_ns, num_steps)
    roots += [] if cores is None else [cores]
    following = {finding.evidence.get(FOLLOWS_FROM) for finding in named}
    return tuple(root for root in roots if root.name in following), tuple(named)


def _short_of_cores(
    findings: Sequence[Finding], waits: Sequence[CoreWait], step_ns: int, num_steps: int
) -> tuple[RootCause | None, list[Finding]]:
    """(the root cause of findings that waits for processor cores may explain, the findings that follow from it marked so)."""
    named, short = list(findings), dict[int, CoreWait]()
    for index, finding in enumerate(named):
        wait = None if FOLLOWS_FROM in finding.evidence else wait_behind(finding, waits, step_ns, num_steps)
        if wait is not None:
            short[wait.rank] = wait
            named[index] = _following(finding, CORES, core_wait={"rank": wait.rank, "share": wait.share})
    if not short:
        return None, named
    most = max(short.values(), key=lambda wait: wait.share)
    ranks = sorted({*short, *(wait.rank for wait in waits if wait.share >= _ALSO_SHORT * most.share)})
    who = f"rank {most.rank} was" if len(ranks) == 1 else f"ranks {as_ranges(ranks)} were"
    whose = "its threads" if len(ranks) == 1 else f"the threads of rank {most.rank}"
    root = RootCause(
        CORES,
        tuple(ranks),
        f"{who} short of processor cores",
        f"on average {most.share:.2f} of {whose} were runnable and waited for a core",
        "look for other work on the machine, and for more threads than cores (OMP_NUM_THREADS)",
    )
    return root, named


def _compares_moments(finding: Finding) -> bool:
    is_outside = "is_outside" in finding.evidence
    return not is_outside and bool({finding.evidence.get("cause"), finding.evidence.get("reason")} & _OF_CLOCKS)


def in_groups(
    roots: Sequence[RootCause], findings: Sequence[Finding]
) -> Iterator[tuple[RootCause | None, list[Finding]]]:
    """The findings below the root causes that they follow from, then the others, each in their order."""
    for root in roots:
        if below := [finding for finding in findings if finding.evidence.get(FOLLOWS_FROM) == root.name]:
            yield root, below
    names = {root.name for root in roots}
    if others := [finding for finding in findings if finding.evidence.get(FOLLOWS_FROM) not in names]:
        yield None, others


def _with_turns(finding: Finding) -> Finding:
    """The finding; of what is not explained it says that turns of ranks that share a GPU are in it."""
    if finding.evidence.get("cause") != "unexplained" or "reason" in finding.evidence:
        return finding
    return replace(finding, detail=f"waits for a turn on the shared GPU are in it; {finding.detail}")


def _following(finding: Finding, name: str, **evidence: object) -> Finding:
    return replace(finding, evidence={**finding.evidence, **evidence, FOLLOWS_FROM: name})


STRAGGLER = "straggler"
_OF_PLAN = ("imbalance", STRAGGLER, "jitter", "communication", "host")
"""Kinds of findings that need steps which can be compared with their plan."""
_NEEDED_STEPS = (
    ("interval of the gain", 2),
    ("pauses", FEWEST_WINDOWS),
    ("outliers", FEWEST_OF_LEVEL),
    ("change of level", 2 * FEWEST_OF_LEVEL),
)


def missing_evidence(steps: Sequence[StepReport], plans: Sequence[StepMatrix]) -> Iterator[MissingEvidence]:
    """The kinds of findings that this run does not show.

    Args:
        steps: all steps of the report.
        plans: the costs of those that are whole.
    """
    known = [step for step in steps if step.span_ns is not None and not step.is_evaluation]
    if not known:
        return
    has_pipeline = any(step.has_pipeline for step in known)
    whole = [step for step in known if step.causes is not None] if has_pipeline else known
    if not whole:
        yield MissingEvidence(_OF_PLAN, "no step has every op of a known plan")
    if lacking := [(kind, needed) for kind, needed in _NEEDED_STEPS if len(whole) < needed]:
        needs = ", ".join(f"{kind} ({needed})" for kind, needed in lacking)
        number = f"{len(whole)} whole step{'s' if len(whole) != 1 else ''}"
        yield MissingEvidence(tuple(kind for kind, _ in lacking), f"{number}, too few for {needs}")
    if not any(step.has_devices for step in known):
        counts = [(int((costs.transfers < 0).sum()), costs.transfers.size) for costs in plans]
        unknown, total = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        if unknown:
            yield MissingEvidence(
                ("host",),
                f"{unknown} of {total} messages between stages have no known transfer: waits for them and ops that begin late "
                "cannot be distinguished",
            )
    if not plans or max(costs.table.pp for costs in plans) == 1:
        return
    if max(len(np.unique(costs.ranks, axis=0)) for costs in plans) > 1:
        return  # a single pipeline has no other to be compared with
    yield MissingEvidence((STRAGGLER,), "one pipeline: a slow worker cannot be distinguished from a heavy stage")
    if (links := max(map(num_links, plans))) <= FEWEST_ALIKE:
        count = "1 link" if links == 1 else f"{links} links"
        yield MissingEvidence(("slow link",), f"{count} of one pipeline: too few to tell which is slow")


def without_found(missing: Sequence[MissingEvidence], findings: Sequence[Finding]) -> tuple[MissingEvidence, ...]:
    """Keep what the run does not show, without slow workers where one is found all the same, by each of its stages."""
    is_found = any(finding.evidence.get("reason") == SLOW_RANK for finding in findings)
    return tuple(kinds for kinds in missing if not (is_found and kinds.findings == (STRAGGLER,)))
