"""Mean steps, which count for throughput, and typical ones: a checkpoint in every third step is in the former alone.

Their standard deviations come from the same bootstrap. Whether the mean changes otherwise than the typical step is tested on the
logarithm of mean / median of each run: noise that lengthens both alike is in neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, inf, log, sqrt

import numpy as np

from pptrace.analysis.compare.bootstrap import (
    CONFIDENCE,
    FEWEST_STEPS,
    NOTHING_KNOWN,
    RUN_TO_RUN,
    Typical,
    block_length,
    drawn_steps,
    lower_median,
    p_value,
    sampled_deviation,
)
from pptrace.analysis.core_waits import CORE_WAIT
from pptrace.model.tables import Int64

_LEAST_APART = 0.01
"""Share by which a mean step has to change otherwise than the typical one, to be worth words."""


@dataclass(frozen=True, slots=True)
class MeanStep:
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
        return MeanStep(_mean_of_few(series, mean))
    sampled = series[drawn_steps(num_steps, block_length(num_steps))]
    means, medians = sampled.mean(axis=1), np.maximum(lower_median(sampled), 1)
    deviation, freedom = sampled_deviation(means, series)
    run_to_run = hypot(RUN_TO_RUN * mean, CORE_WAIT * core_wait_ns)
    apart, freedom_apart = sampled_deviation(np.log(means / medians), series)
    return MeanStep(Typical(round(mean), deviation, freedom, run_to_run), log(mean / median), apart, freedom_apart)


def _mean_of_few(series: Int64, mean: float) -> Typical:
    """The mean of few steps, as uncertain as one of them with what is known of steps before any is seen."""
    if len(series) < 2:
        return Typical(round(mean))
    known = 2 * (NOTHING_KNOWN.deviation * mean) ** 2
    freedom = len(series) + 1
    variance = (float(((series - mean) ** 2).sum()) + known) / freedom
    return Typical(round(mean), sqrt(variance), freedom, NOTHING_KNOWN.lasting * mean)


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
