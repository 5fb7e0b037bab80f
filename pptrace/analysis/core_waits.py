"""Ranks that waited for a processor core: what other work on their machine, or more threads than cores, cost them.

``pptrace run`` records for how long the threads of a rank were ready to run and had no core (Linux: schedstat of its threads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from pptrace.analysis.result import Finding
from pptrace.analysis.stragglers.alike import LONG_OPS
from pptrace.analysis.stragglers.hosts import LATE_LAUNCHES, LATE_START, PAUSES
from pptrace.analysis.whole_run import CoreWait

USUAL_CORE_WAIT = 0.03
"""Share of the time up to which ranks may wait for a core without their runs deviating more from one another."""
CORE_WAIT = 0.2
"""Standard deviation from run to run as a share of the time for which ranks waited for a core: what else a machine does differs
from run to run. Runs of one program deviated by 0.16 % where they waited for 0.9 %, with ops a quarter as long by 0.4 % where
they waited for 1.9 %, and by 3 to 5 % where they waited for 20 to 50 %.
"""
_DOUBTFUL = 0.1
"""Share of the time for which ranks wait for a core from which on a report says so."""
_LEAST_SHARE = 0.05
"""Smaller shares are named in no finding."""
_CAUSES = frozenset({"host", "jitter", "straggler", "unexplained"})
"""Causes that a wait for a core may explain."""
_REASONS = frozenset({None, LONG_OPS, LATE_LAUNCHES, LATE_START, PAUSES})
"""Reasons that it may explain; others are explained."""


def core_waits_of(facts: Mapping[int, Mapping[str, Any]]) -> tuple[CoreWait, ...]:
    """Waits of the ranks for a core, by the facts of their traces; of those that tell."""
    waits = ((rank, _share(of_rank.get("core_wait"))) for rank, of_rank in sorted(facts.items()))
    return tuple(CoreWait(rank, share) for rank, share in waits if share is not None)


def _share(recorded: object) -> float | None:
    if not isinstance(recorded, Mapping):
        return None
    waited, elapsed = recorded.get("wait_ns"), recorded.get("elapsed_ns")
    is_known = isinstance(waited, int) and isinstance(elapsed, int) and waited >= 0 and elapsed > 0
    return waited / elapsed if is_known else None  # type: ignore[operator]


def line_of_waits(waits: Sequence[CoreWait]) -> str:
    """The line about waits that make times of a run doubtful; "" where they are short or not known."""
    share = fmean(wait.share for wait in waits) if waits else 0.0
    if share <= _DOUBTFUL:
        return ""
    return (
        f"ranks waited for a core for {share:.1%} of the time, because of other work on the machine or more threads than cores: "
        "what ops take has that in it; record on a quiet machine"
    )


def wait_behind(finding: Finding, waits: Sequence[CoreWait], step_ns: int) -> CoreWait | None:
    """The wait for a core of the finding's rank, or of the rank that waited most, where it is long enough to be all of it in a
    step of this length, ns; else None.
    """
    evidence = finding.evidence
    if evidence.get("cause") not in _CAUSES or evidence.get("reason") not in _REASONS:
        return None
    named = evidence["where"].get("rank")
    most = max((wait for wait in waits if named in (None, wait.rank)), key=lambda wait: wait.share, default=None)
    least = max(_LEAST_SHARE, (finding.gain_ns or 0) / max(step_ns, 1))
    return most if most is not None and most.share >= least else None
