"""Cost of observing every step, from steps in between that were not observed."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

from msgspec import Struct

WARM_UP = 2
"""First steps, which are left out."""
_LEVEL = 0.95


class LiveCost(Struct, frozen=True):
    """``share`` of a step by which observed steps are longer than the unobserved ones between them, with its 95 % interval (None
    of fewer than six), from ``num_pairs`` unobserved steps.
    """

    share: float
    low: float | None
    high: float | None
    num_pairs: int

    def __str__(self) -> str:
        steps = f"{self.num_pairs} unobserved {'step' if self.num_pairs == 1 else 'steps'}"
        if self.low is None or self.high is None:
            return f"{self.share:+.2%} of a step, from {steps}: too few for an interval"
        return f"{self.share:+.2%} of a step (95 % interval {self.low:+.2%} to {self.high:+.2%}, {steps})"


class LiveCosts(Struct, frozen=True):
    """The cost of observing: ``measured`` by the steps in between, and ``own``, the share of a step that ranks counted as theirs
    (ranges and records; the median). None: not known.
    """

    measured: LiveCost | None
    own: float | None


def cost_of(steps: Sequence[tuple[int, int, bool, bool]]) -> LiveCost | None:
    """The cost from steps as (number, length in ns, observed, profiled); None where no unobserved step has both neighbours.

    Each unobserved step is compared with the mean of the observed ones just before and after it, which a drift moves as much as
    it. The median of these differences does not notice single long steps, and its interval holds for whatever distribution they
    have: order statistics by the sign test.
    """
    lengths = {
        number: (ns, is_observed) for number, ns, is_observed, profiled in steps if not profiled and number >= WARM_UP
    }
    observed = {number: ns for number, (ns, is_observed) in lengths.items() if is_observed}
    differences = sorted(
        (observed[number - 1] + observed[number + 1]) / 2 / ns - 1
        for number, (ns, is_observed) in lengths.items()
        if not is_observed and ns > 0 and {number - 1, number + 1} <= observed.keys()
    )
    if not differences:
        return None
    rank = _interval_rank(len(differences))
    low, high = (None, None) if rank is None else (differences[rank], differences[-rank - 1])
    return LiveCost(median(differences), low, high, len(differences))


def own_share(records: Sequence[tuple[int, int]]) -> float | None:
    """The share of a step that a rank spent on its records, from (own time, step) of each; None where there is none."""
    return median(own / step for own, step in records) if records else None


def _interval_rank(count: int) -> int | None:
    """Number of values on each side outside the median's interval; None where even the outermost two do not enclose it."""
    outside, rank = 0, None
    for index in range(count // 2):
        outside += comb(count, index)
        if 2 * outside / 2**count > 1 - _LEVEL:
            break
        rank = index
    return rank
