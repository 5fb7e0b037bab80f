"""The part of an op that it takes however much it does: its launches and messages, the Python around them.

Stages between the first and the last one have layers and nothing besides. Where they have other numbers of them, what their ops
take lies on a straight line over these: its slope is a layer, and what it has at none is the fixed part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pptrace.model.tables import Floats

_LEAST_RATIO = 1.5
"""Stages whose layers differ by less tell nothing: what they differ by on their own would count three times and more."""
_MOST_MEASURED = 0.25
"""Part of the shortest op beyond which no fixed part is believed: rather, ranks are not equally fast."""
_BETWEEN_RANKS = 0.02
"""Part of an op by which ranks of a kind differ: what a line makes of that is no fixed part."""
_MOST_CELLS = 2_000_000
"""Pairs of stages in as many microbatches, evenly spaced, are looked at."""
_STANDARD_ERRORS = 2.0
_NORMAL_MAD = 1.4826
"""Standard deviations of normal values in their median absolute deviation."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median of normal values, in standard errors of their mean."""


def measured_fixed_part(work: Floats, layers: Sequence[int] | None) -> Floats:
    """The fixed part of ops by output, ns; 0 where the stages do not tell.

    Args:
        work: what ops take, ns, shape (windows, stages, microbatches, outputs).
        layers: layers of each stage, None where they are not known.

    Every microbatch of every step gives an estimate, and their median counts where it is beyond its own error and what ranks
    differ by. It is the straight line of Theil and Sen, which one stage off it moves little where there are four or more. One of
    the ends that takes no more than its layers do on that line has nothing besides, and counts too. One output with a part that
    is too large makes all of them doubtful: a rank that is slow is so in all of its ops.
    """
    num_outputs = work.shape[3]
    none = np.zeros(num_outputs)
    if layers is None:
        return none
    count, samples = np.array(layers, dtype=np.float64), np.moveaxis(work, 2, 1).reshape(-1, *work.shape[1::2])
    typical = np.median(work, axis=(0, 2))
    found = none.copy()
    for output in range(num_outputs):
        stages = _on_the_line(typical[:, output], count)
        line = _lines(samples[:, stages, output], count[stages])
        if line is None:
            return none
        estimates = line[1]
        part = float(np.median(estimates))
        error = _NORMAL_MAD * _MEDIAN_ERROR * float(np.median(np.abs(estimates - part))) / np.sqrt(len(estimates))
        least = float(typical[stages, output].min())
        if part > _MOST_MEASURED * least:
            return none
        fewest, most = count[stages].min(), count[stages].max()
        if part > max(_STANDARD_ERRORS * error, _BETWEEN_RANKS * least * most / (most - fewest)):
            found[output] = part
    return found


def _on_the_line(typical: Floats, count: Floats) -> npt.NDArray[np.intp]:
    """The stages between the ends, and those of the ends that have no more than their layers."""
    stages = np.arange(1, len(count) - 1)
    line = _lines(typical[np.newaxis, stages], count[stages])
    if line is None:
        return stages
    beyond = typical - (line[1][0] + line[0][0] * count)
    return np.array([stage for stage in range(len(count)) if stage in stages or beyond[stage] <= 0])


def _lines(samples: Floats, count: Floats) -> tuple[Floats, Floats] | None:
    """(slope, value at no layers) of the line through each of the samples, shape (samples, stages); None of stages too alike."""
    one, other = np.triu_indices(len(count), 1)
    tells = np.maximum(count[one], count[other]) >= _LEAST_RATIO * np.minimum(count[one], count[other])
    if not tells.any():
        return None
    one, other = one[tells], other[tells]
    samples = samples[:: -(-len(samples) * len(one) // _MOST_CELLS)]
    slopes = np.median((samples[:, other] - samples[:, one]) / (count[other] - count[one]), axis=1)
    return slopes, np.median(samples - slopes[:, np.newaxis] * count, axis=1)
