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
"""With fewer steps the interval of a gain is from the least to the largest."""
_NUM_SAMPLES = 1000


def gain_interval(of_steps: Int64) -> tuple[int, int]:
    """The 90 % interval of the mean over steps, by bootstrap; with few steps from the least to the largest, ns."""
    if len(of_steps) < FEWEST_STEPS:
        return int(of_steps.min()), int(of_steps.max())
    size = (_NUM_SAMPLES, min(len(of_steps), _NUM_SAMPLES))
    chosen = np.random.default_rng(0).integers(0, len(of_steps), size)
    low, high = np.percentile(of_steps[chosen].mean(axis=1), (5, 95))
    return int(np.floor(low)), int(np.ceil(high))
