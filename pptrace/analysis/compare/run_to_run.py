"""Deviation from run to run, measured where a side has several runs.

The figure of a side is then the mean over its runs, and what runs differ by among themselves is how certain it is: Student's t
with the degrees of freedom of Welch and Satterthwaite, never more than if both sides had as few runs as the smaller one. Without
that limit, of 40,000 simulated pairs of 2 against 10 runs that deviate alike, 10 % were called different; with it 2 %. Where one
side deviates up to ten times as much as the other, it is 2 to 6 % with as many runs of both, 2 to 10.

A machine that gets slower or faster makes runs differ by when they were taken. Of runs taken in turns it makes both sides differ
alike: a line through the places of the runs in time, the same for both sides, is then taken out (analysis of covariance).

Mean steps, which count for throughput, and typical ones: a checkpoint in every third step is in the former alone.

Their standard deviations come from the same bootstrap. Whether the mean changes otherwise than the typical step is tested on the
logarithm of mean / median of each run: noise that lengthens both alike is in neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, inf, log, sqrt

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.compare.bootstrap import (
    CONFIDENCE,
    FEWEST_STEPS,
    NOTHING_KNOWN,
    RUN_TO_RUN,
    Typical,
    drawn_steps,
    lower_median,
    p_value,
    sampled_deviation,
)
from pptrace.analysis.shared_devices import CORE_WAIT
from pptrace.model.tables import Int64

Values = np.ndarray[tuple[int], np.dtype[np.float64]]
"""A value per run, ns."""

FEWEST_FOR_TREND = 4
"""With fewer runs of a side the degree of freedom that a line takes costs more than it gains."""


class Order(Struct, frozen=True):
    """Places of the runs of both sides in the order in which they were taken, from 0 on."""

    a: tuple[int, ...]
    b: tuple[int, ...]

    @property
    def apart(self) -> float:
        """The number of places for which B's runs come after A's, on average; below 0 where they come before."""
        return sum(self.b) / len(self.b) - sum(self.a) / len(self.a)

    @property
    def is_in_turns(self) -> bool:
        """Return whether a machine that changes with time changes the runs of both sides alike."""
        return abs(self.apart) <= 1


class TypicalOfSides(Struct, frozen=True):
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
        # one run against several: it is taken to deviate from its likes as much as those do, in parts of its length
        several, one = (a, b[0]) if len(b) == 1 else (b, a[0])
        mean, deviation = _of_runs(np.array([run.ns for run in several], dtype=np.float64), several, None)
        scale = one.ns / mean.ns if mean.ns > 0 else 1.0
        between = sqrt(max(deviation**2 - _within(several), 0.0))
        alone = Typical(one.ns, hypot(scale * between, one.deviation or 0.0), mean.freedom, most_freedom=mean.freedom)
        mean = replace(mean, most_freedom=mean.freedom)
        return (
            TypicalOfSides(alone, mean, None, deviation)
            if several is b
            else TypicalOfSides(mean, alone, deviation, None)
        )
    slope, doubt = None, None
    if order is not None and order.is_in_turns and min(len(a), len(b)) >= FEWEST_FOR_TREND:
        # one line through the values of both sides, each about its own mean; doubt is the variance that it adds to these
        places = [np.array(of, dtype=np.float64) for of in (order.a, order.b)]
        centred = [of - of.mean() for of in places]
        squares = float(sum((of**2).sum() for of in centred))
        slope = sum(float(of @ values) for of, values in zip(centred, (values_a, values_b), strict=True)) / squares
        doubt, middle = order.apart**2 / squares / 2, float(np.mean([of.mean() for of in places]))
        values_a, values_b = values_a - slope * (places[0] - middle), values_b - slope * (places[1] - middle)
    (of_a, deviation_a), (of_b, deviation_b) = _of_runs(values_a, a, doubt), _of_runs(values_b, b, doubt)
    most = 2 * min(of_a.freedom, of_b.freedom)
    of_a, of_b = replace(of_a, most_freedom=most), replace(of_b, most_freedom=most)
    return TypicalOfSides(of_a, of_b, deviation_a, deviation_b, slope)


def _of_runs(values: Values, runs: Sequence[Typical], doubt: float | None) -> tuple[Typical, float]:
    """(the mean of the values and how certain it is, the deviation of one run from another); ``doubt`` is what a line that was
    taken out adds to the variance of the mean, in parts of that of a run, None without one.
    """
    freedom = len(values) - (1.0 if doubt is None else 1.5)  # both sides share the line
    variance = max(float(((values - values.mean()) ** 2).sum()) / freedom, _within(runs))
    mean = Typical(round(float(values.mean())), sqrt(variance * (1 / len(values) + (doubt or 0.0))), freedom)
    return mean, sqrt(variance)


def _within(runs: Sequence[Typical]) -> float:
    """The variance of a run's value by the steps that it is taken from, the mean over runs."""
    return sum((run.deviation or 0.0) ** 2 for run in runs) / len(runs)


_LEAST_APART = 0.01
"""Share by which a mean step has to change otherwise than the typical one, to be worth words."""


class MeanStep(Struct, frozen=True):
    """The mean of a run's steps, ns, and how certain it is. ``beyond`` is ln(mean / median), with its standard deviation and the
    degrees of freedom of that; None with too few steps.
    """

    mean: Typical
    beyond: float = 0.0
    deviation: float | None = None
    freedom: float = inf


def mean_step_of(series: Int64, core_wait_ns: float = 0.0) -> MeanStep:
    """The mean of a series of steps in order, ns.

    Args:
        series: a value per step, ns.
        core_wait_ns: for how long a rank waited for a core in a step.
    """
    mean, median, num_steps = float(series.mean()), int(lower_median(series)), len(series)
    if num_steps < FEWEST_STEPS or median <= 0:
        if num_steps < 2:
            return MeanStep(Typical(round(mean)))
        # As uncertain as one of them with what is known of steps before any is seen.
        known = 2 * (NOTHING_KNOWN.deviation * mean) ** 2
        variance = (float(((series - mean) ** 2).sum()) + known) / (num_steps + 1)
        return MeanStep(Typical(round(mean), sqrt(variance), num_steps + 1, NOTHING_KNOWN.lasting * mean))
    sampled = series[drawn_steps(num_steps)]
    means, medians = sampled.mean(axis=1), np.maximum(lower_median(sampled), 1)
    deviation, freedom = sampled_deviation(means, series)
    run_to_run = hypot(RUN_TO_RUN * mean, CORE_WAIT * core_wait_ns)
    apart, freedom_apart = sampled_deviation(np.log(means / medians), series)
    return MeanStep(Typical(round(mean), deviation, freedom, run_to_run), log(mean / median), apart, freedom_apart)


def changes_otherwise(a: Sequence[MeanStep], b: Sequence[MeanStep]) -> bool:
    """Return whether the mean step of B's runs against A's changes otherwise than the typical one, by more than chance."""
    apart, variance, spread = 0.0, 0.0, 0.0
    for runs, sign in ((a, -1), (b, 1)):
        for run in runs:
            if run.deviation is None:
                return False
            apart += sign * run.beyond / len(runs)
            of_run = (run.deviation / len(runs)) ** 2
            variance += of_run
            spread += of_run**2 / run.freedom
    if abs(apart) < _LEAST_APART:
        return False
    if spread <= 0:
        return True
    return p_value(apart / sqrt(variance), variance**2 / spread) < 1 - CONFIDENCE
