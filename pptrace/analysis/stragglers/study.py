"""All that is found out from the costs of whole steps together: the slowdowns, and reasons that have findings of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.alike import Place, gains_of_places, long_ops
from pptrace.analysis.stragglers.garbage_collection import garbage_collections
from pptrace.analysis.stragglers.hosts import late_firsts, late_launches, late_starts
from pptrace.analysis.stragglers.late_members import late_member
from pptrace.analysis.stragglers.late_receives import late_receives
from pptrace.analysis.stragglers.links import slow_link
from pptrace.analysis.stragglers.noise import Noise, noise_of
from pptrace.analysis.stragglers.pauses import host_pauses, pauses_of
from pptrace.analysis.stragglers.reason import Reason
from pptrace.analysis.stragglers.sequences import long_sequences
from pptrace.analysis.stragglers.slowdowns import slowdowns
from pptrace.analysis.stragglers.unequal_routes import HotSpot, gains_of_equal_routes, unequal_routes
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

    ``hot_spot`` is where most rows of experts are, of runs that have experts on several ranks; ``uncertainty_ns`` is that of the
    clocks.
    """
    plans = [costs for costs in plans if len(costs.step)]
    num_replayed = sum(costs.durations.size * (costs.table.num_stages + costs.table.pp) for costs in plans)
    plans = [costs.every(-(-num_replayed // _MOST_REPLAYED)) for costs in plans]
    if not plans:
        return Study()
    # As the published study replays: with the waits and transfers that were recorded.
    stragglers = slowdowns([costs.as_recorded() for costs in plans])
    plans, shared = without_shared_reasons(plans, hot_spot, uncertainty_ns)
    sequences = long_sequences(plans)
    apart = [late + paused for late, paused in zip(late_firsts(plans), pauses_of(plans), strict=True)]
    known = (
        *shared,
        sequences,
        long_ops(plans) if sequences is None else None,  # sequences that are long make ops long
        slow_link(plans),
        late_member(plans),
        late_starts(plans),
        host_pauses(plans),
        late_launches(plans, apart),
    )
    steps = np.concatenate([np.unique(costs.step) for costs in plans]).tolist()
    reasons = tuple(reason for reason in known if reason is not None)
    return Study(stragglers, reasons, gains_of_places(plans), tuple(steps), noise_of(plans))


def without_shared_reasons(
    plans: Sequence[StepMatrix], hot_spot: HotSpot | None = None, uncertainty_ns: int | None = 0
) -> tuple[list[StepMatrix], tuple[Reason | None, ...]]:
    """(the costs without what is no fault of single ops, ranks or hosts; why steps are slow by it): garbage collections, kernels
    that receive late, unequal routes.
    """
    plans = list(plans)
    collections = garbage_collections(plans)
    if collections is not None:  # what it held up is no fault of ops or hosts
        plans = [costs.without_collections() for costs in plans]
    receives = late_receives(plans, uncertainty_ns)
    if any(
        len(costs.receiving) for costs in plans
    ):  # a rank whose device receives is not late, whatever the clocks are
        plans = [costs.without_late_receives() for costs in plans]
    gains = gains_of_equal_routes(plans)
    if gains is not None and gains.sum() > 0:  # a rank that waits for one with more rows waits for no slow one
        plans = [costs.with_equal_routes() for costs in plans]
    routes = None if gains is None or hot_spot is None else unequal_routes(gains, hot_spot)
    return plans, (collections, receives, routes)
