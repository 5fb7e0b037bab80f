"""The middle of a few values that lie evenly about it, and its interval, whatever their distribution.

Hodges and Lehmann's estimate (Annals of Mathematical Statistics 34, 1963): the median of the means of all pairs; its interval by
Wilcoxon's signed-rank test. One wild value moves neither far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MOST = 200
"""More values are taken together in so many runs of neighbours."""


@dataclass(frozen=True, slots=True)
class Middle:
    """``low`` and ``high`` are None where there are too few values for the confidence."""

    value: float
    low: float | None
    high: float | None


def middle_of(values: Sequence[float], confidence: float) -> Middle:
    """The middle of at least one value, with its interval."""
    of_runs = np.array([part.mean() for part in np.array_split(np.array(values), min(len(values), _MOST))])
    first, second = np.triu_indices(len(of_runs))
    means = np.sort((of_runs[first] + of_runs[second]) / 2)
    cut = _cut(len(of_runs), (1 - confidence) / 2)
    if cut < 0:
        return Middle(float(np.median(means)), None, None)
    return Middle(float(np.median(means)), float(means[cut]), float(means[-1 - cut]))


def _cut(n: int, chance: float) -> int:
    """Number of sorted means outside the interval on each side, at a ``chance`` on each; −1: even none is too many."""
    below = np.cumsum(_signed_ranks(n))
    return int(np.count_nonzero(below <= chance)) - 1


def _signed_ranks(n: int) -> npt.NDArray[np.float64]:
    """The chances that those of the ranks 1 … n that chance makes positive sum to each of 0 … n(n + 1)/2."""
    chances = np.zeros(n * (n + 1) // 2 + 1)
    chances[0] = 1
    for rank in range(1, n + 1):
        chances[rank:] = chances[rank:] + chances[:-rank]
        chances /= 2
    return chances
