"""Parts of steps for tests of what is said about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pptrace.analysis.whole_run import Cause, Waterfall


def by_cause(causes: Iterable[Cause] | None) -> Counter[str]:
    """Time of each cause at all its places, ns."""
    sums = Counter[str]()
    for cause in causes or ():
        sums[cause.cause] += cause.ns
    return sums


def parts_ns(
    compute: int,
    structural: int = 0,
    imbalance: int = 0,
    jitter: int = 0,
    communication: int = 0,
    host: int | None = None,
    unexplained: int = 0,
    *,
    straggler: int = 0,
    interaction: int = 0,
) -> Waterfall:
    """The parts of a step that has few of them, ns."""
    return Waterfall(compute, structural, imbalance, straggler, jitter, communication, host, interaction, unexplained)
