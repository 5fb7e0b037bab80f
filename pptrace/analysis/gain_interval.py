"""Certainty of a gain: its interval from how the steps vary, and the share of a step from which on it is mentioned."""

from __future__ import annotations

import numpy as np

from pptrace.model.tables import Int64

LEAST_SHARE = 0.02
"""A cause below this share of the step is not mentioned."""
LEAST_ANYWHERE = 0.05
"""The same of what every run has some of, wherever it has most of it: healthy runs have up to about 3 % each of ops that vary,
of transfers and of time between ops."""
FEWEST_STEPS = 5
"""With fewer steps there are too few to draw from: the interval of a gain is Student's."""
_STUDENT = {2: 6.3138, 3: 2.9200, 4: 2.3534}
"""95 % quantiles of Student's t by the number of steps, one more than its degrees of freedom."""
_NUM_SAMPLES = 1000


def gain_interval(of_steps: Int64) -> tuple[int | None, int | None]:
    """The 90 % interval of the mean over steps, by bootstrap, of two to four steps by Student's t; (None, None) of one, ns."""
    if len(of_steps) == 1:
        return None, None
    if len(of_steps) < FEWEST_STEPS:
        half = _STUDENT[len(of_steps)] * float(of_steps.std(ddof=1)) / len(of_steps) ** 0.5
        return int(np.floor(of_steps.mean() - half)), int(np.ceil(of_steps.mean() + half))
    size = (_NUM_SAMPLES, min(len(of_steps), _NUM_SAMPLES))
    chosen = np.random.default_rng(0).integers(0, len(of_steps), size)
    low, high = np.percentile(of_steps[chosen].mean(axis=1), (5, 95))
    return int(np.floor(low)), int(np.ceil(high))
