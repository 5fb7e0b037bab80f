"""All that is found out from the costs of whole steps together: the slowdowns, and reasons that have findings of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.alike import Place, gains_of_places
from pptrace.analysis.stragglers.detectors import SHARED, SINGLE, Known, detect
from pptrace.analysis.stragglers.noise import Noise, noise_of
from pptrace.analysis.stragglers.reason import Reason
from pptrace.analysis.stragglers.slowdowns import slowdowns
from pptrace.analysis.stragglers.unequal_routes import HotSpot
from pptrace.analysis.whole_run import Stragglers
from pptrace.model.tables import Int64

_MOST_REPLAYED = 100_000_000
"""Ops in the replays of all stages and pipeline ranks together; they take about 40 ns each."""


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """``stragglers`` is None where there is no whole step.

    ``gains`` is what each step would get back if the slowest stage or rank cost what its like costs, ns; ``steps`` are the
    numbers of the steps that they and the gains of the reasons are of. ``noise`` is what chance explains of them.
    """

    stragglers: Stragglers | None = None
    reasons: tuple[Reason, ...] = ()
    gains: Mapping[Place, Int64] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    noise: Noise | None = None


def study_steps(plans: Sequence[StepMatrix], hot_spot: HotSpot | None = None, uncertainty_ns: int | None = 0) -> Study:
    """The study of whole steps, or of as many of them, evenly spaced, as :data:`_MOST_REPLAYED` allows.

    ``hot_spot`` and ``uncertainty_ns`` are what :class:`pptrace.analysis.stragglers.detectors.Known` has.
    """
    plans = [costs for costs in plans if len(costs.step)]
    num_replayed = sum(costs.durations.size * (costs.table.num_stages + costs.table.pp) for costs in plans)
    plans = [costs.every(-(-num_replayed // _MOST_REPLAYED)) for costs in plans]
    if not plans:
        return Study()
    # As the published study replays: with the waits and transfers that were recorded.
    stragglers = slowdowns([costs.as_recorded() for costs in plans])
    reasons, plans = detect((*SHARED, *SINGLE), plans, Known(hot_spot, uncertainty_ns))
    steps = np.concatenate([np.unique(costs.step) for costs in plans]).tolist()
    return Study(stragglers, reasons, gains_of_places(plans), tuple(steps), noise_of(plans))
