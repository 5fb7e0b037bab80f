"""Parts of steps for tests of what is said about them."""

from __future__ import annotations

from pptrace.analysis.whole_run import Waterfall


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
