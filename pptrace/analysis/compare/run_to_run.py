"""Deviation from run to run, measured where a side has several runs.

The figure of a side is then the mean over its runs, and what runs differ by among themselves is how certain it is: Student's t
with the degrees of freedom of Welch and Satterthwaite, never more than if both sides had as few runs as the smaller one. Without
that limit, of 40,000 simulated pairs of 2 against 10 runs that deviate alike, 10 % were called different; with it 2 %. Where one
side deviates up to ten times as much as the other, it is 2 to 6 % with as many runs of both, 2 to 10.

A machine that gets slower or faster makes runs differ by when they were taken. Of runs taken in turns it makes both sides differ
alike: a line through the places of the runs in time, the same for both sides, is then taken out (analysis of covariance).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot, sqrt

import numpy as np

from pptrace.analysis.compare.bootstrap import Typical
from pptrace.analysis.compare.side import Order

Values = np.ndarray[tuple[int], np.dtype[np.float64]]
"""A value per run, ns."""

FEWEST_FOR_TREND = 4
"""With fewer runs of a side the degree of freedom that a line takes costs more than it gains."""


@dataclass(frozen=True, slots=True)
class TypicalOfSides:
    """The typical value of both sides, ns; ``deviation_a`` and ``deviation_b`` are those of one run from another of the side, ns,
    None with one run. ``trend`` is the change from one run to the next that was taken out, ns; None where none was.
    """

    a: Typical
    b: Typical
    deviation_a: float | None = None
    deviation_b: float | None = None
    trend: float | None = None


def typical_of_sides(a: Sequence[Typical], b: Sequence[Typical], order: Order | None = None) -> TypicalOfSides:
    """The typical values of both sides from those of their runs.

    Args:
        a: of each run of A.
        b: the same of B.
        order: that of all runs in time, None where it is not known.
    """
    if len(a) == len(b) == 1:
        return TypicalOfSides(a[0], b[0])
    values_a, values_b = (np.array([run.ns for run in runs], dtype=np.float64) for runs in (a, b))
    if any(run.deviation is None for run in (*a, *b)):
        return TypicalOfSides(Typical(round(float(values_a.mean()))), Typical(round(float(values_b.mean()))))
    if len(a) == 1 or len(b) == 1:
        return _against_one(a, b)
    trend = None
    if order is not None and order.is_in_turns and min(len(a), len(b)) >= FEWEST_FOR_TREND:
        trend = _Trend.through(values_a, values_b, order)
        values_a, values_b = trend.without(values_a, order.a), trend.without(values_b, order.b)
    (of_a, deviation_a), (of_b, deviation_b) = _of_runs(values_a, a, trend), _of_runs(values_b, b, trend)
    most = 2 * min(of_a.freedom, of_b.freedom)
    of_a, of_b = replace(of_a, most_freedom=most), replace(of_b, most_freedom=most)
    return TypicalOfSides(of_a, of_b, deviation_a, deviation_b, None if trend is None else trend.slope)


@dataclass(frozen=True, slots=True)
class _Trend:
    """A line through the values of both sides, each about its own mean. ``slope`` is per place; ``doubt`` is the variance that
    it adds to the mean of a side, in parts of the variance of a run.
    """

    slope: float
    middle: float
    doubt: float

    @classmethod
    def through(cls, values_a: Values, values_b: Values, order: Order) -> _Trend:
        places = [np.array(of, dtype=np.float64) for of in (order.a, order.b)]
        centred = [of - of.mean() for of in places]
        squares = float(sum((of**2).sum() for of in centred))
        slope = sum(float(of @ values) for of, values in zip(centred, (values_a, values_b), strict=True)) / squares
        return cls(slope, float(np.mean([of.mean() for of in places])), order.apart**2 / squares / 2)

    def without(self, values: Values, places: Sequence[int]) -> Values:
        """The values as they would be in the middle of all runs."""
        left: Values = values - self.slope * (np.array(places) - self.middle)
        return left


def _of_runs(values: Values, runs: Sequence[Typical], trend: _Trend | None) -> tuple[Typical, float]:
    """(the mean of the values and how certain it is, the deviation of one run from another)."""
    freedom = len(values) - (1.0 if trend is None else 1.5)  # both sides share the line
    variance = max(float(((values - values.mean()) ** 2).sum()) / freedom, _within(runs))
    doubt = 0.0 if trend is None else trend.doubt
    mean = Typical(round(float(values.mean())), sqrt(variance * (1 / len(values) + doubt)), freedom)
    return mean, sqrt(variance)


def _against_one(a: Sequence[Typical], b: Sequence[Typical]) -> TypicalOfSides:
    """One run against several: it is taken to deviate from its likes as much as those do, in parts of its length."""
    several, one = (a, b[0]) if len(b) == 1 else (b, a[0])
    mean, deviation = _of_runs(np.array([run.ns for run in several], dtype=np.float64), several, None)
    scale = one.ns / mean.ns if mean.ns > 0 else 1.0
    between = sqrt(max(deviation**2 - _within(several), 0.0))
    alone = Typical(one.ns, hypot(scale * between, one.deviation or 0.0), mean.freedom, most_freedom=mean.freedom)
    mean = replace(mean, most_freedom=mean.freedom)
    return (
        TypicalOfSides(alone, mean, None, deviation) if several is b else TypicalOfSides(mean, alone, deviation, None)
    )


def _within(runs: Sequence[Typical]) -> float:
    """The variance of a run's value by the steps that it is taken from, the mean over runs."""
    return sum((run.deviation or 0.0) ** 2 for run in runs) / len(runs)
