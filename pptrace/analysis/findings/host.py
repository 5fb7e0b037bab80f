"""Synchronisations in a finding about launching: the calls for which devices ran dry, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from pptrace.analysis.result import Finding, StepReport
from pptrace.model.device_idle import SyncSummary

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
