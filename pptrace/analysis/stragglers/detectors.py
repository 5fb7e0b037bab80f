"""Detectors of reasons why steps are slow: passes over the costs of whole steps, one after the other.

A new detector is a function and its place in :data:`SHARED` or :data:`SINGLE`.

All that is found out from the costs of whole steps together: the slowdowns, and reasons that have findings of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.alike import Place, gains_of_places, long_ops, slow_rank
from pptrace.analysis.stragglers.communication import HotSpot, late_member, late_receives, slow_link, unequal_routes
from pptrace.analysis.stragglers.hosts import (
    garbage_collections,
    host_pauses,
    late_firsts,
    late_launches,
    late_starts,
    pauses_of,
)
from pptrace.analysis.stragglers.noise import Noise, noise_of
from pptrace.analysis.stragglers.reason import Reason, gains
from pptrace.analysis.stragglers.sequences import LONG_SEQUENCES, long_sequences
from pptrace.analysis.stragglers.slowdowns import slowdowns
from pptrace.analysis.whole_run import Stragglers
from pptrace.model.tables import Int64

Plans = Sequence[StepMatrix]
"""The costs of whole steps, by plan."""


@dataclass(frozen=True, slots=True)
class Known:
    """Facts besides the costs: ``hot_spot`` is where most rows of experts are, of runs that have experts on several ranks;
    ``uncertainty_ns`` is that of the clocks; ``found`` are the reasons of earlier detectors.
    """

    hot_spot: HotSpot | None = None
    uncertainty_ns: int | None = 0
    found: tuple[Reason, ...] = ()


Detector = Callable[[Plans, Known], tuple[Reason | None, Plans]]
"""Returns the reason that it finds, and the costs for the detectors after it: without what it has explained, if it peels that."""


def detect(detectors: Sequence[Detector], plans: Plans, known: Known) -> tuple[tuple[Reason, ...], Plans]:
    """(the reasons that are known and those that the detectors find, the costs that they leave)."""
    for detector in detectors:
        reason, plans = detector(plans, known)
        known = known if reason is None else replace(known, found=(*known.found, reason))
    return known.found, plans


def _collections(plans: Plans, _: Known) -> tuple[Reason | None, Plans]:
    return garbage_collections(plans), [costs.without_collections() for costs in plans]


def _receives(plans: Plans, known: Known) -> tuple[Reason | None, Plans]:
    return late_receives(plans, known.uncertainty_ns), [costs.without_late_receives() for costs in plans]


def _routes(plans: Plans, known: Known) -> tuple[Reason | None, Plans]:
    if not any(len(costs.routed) for costs in plans):
        return None, plans
    equal = [costs.with_equal_routes() for costs in plans]
    gained = gains(plans, equal)
    reason = None if known.hot_spot is None else unequal_routes(gained, known.hot_spot)
    return reason, equal if gained.sum() > 0 else plans


def _long_ops(plans: Plans, known: Known) -> tuple[Reason | None, Plans]:
    has_long_sequences = any(reason.name == LONG_SEQUENCES for reason in known.found)
    return None if has_long_sequences else long_ops(plans), plans


def _late_launches(plans: Plans) -> Reason | None:
    named = [late + paused for late, paused in zip(late_firsts(plans), pauses_of(plans), strict=True)]
    return late_launches(plans, named)


def _only_names(find: Callable[[Plans], Reason | None]) -> Detector:
    """A detector that peels nothing."""
    return lambda plans, _: (find(plans), plans)


def _later_than_clocks_tell(find: Callable[[Plans], Reason | None]) -> Detector:
    """The same of what ranks are late by, by times of others: typically less than clocks may be off by, it names nobody."""

    def detector(plans: Plans, known: Known) -> tuple[Reason | None, Plans]:
        reason = find(plans)
        is_in_doubt = reason is not None and reason.evidence["typical_ns"] <= (known.uncertainty_ns or 0)
        return None if is_in_doubt else reason, plans

    return detector


SHARED: tuple[Detector, ...] = (_collections, _receives, _routes)
"""Detectors of what is no fault of single ops, ranks or hosts: each peels that, so that those after it take nobody to be slow by
it. What a garbage collection held up is no late op or host, and is recorded, so it comes first. A rank whose device still
receives is not late, whatever the clocks are. A rank that waits for one with more rows waits for no slow one: what the other two
explain would look like such waits.
"""
SINGLE: tuple[Detector, ...] = (
    _only_names(long_sequences),
    _long_ops,
    _only_names(slow_link),
    _only_names(slow_rank),
    _only_names(late_member),
    _later_than_clocks_tell(late_starts),
    _later_than_clocks_tell(host_pauses),
    _later_than_clocks_tell(_late_launches),
)
"""Detectors of what single ops, links, ranks and hosts do, all in what those before have left. Long sequences come before long
ops, as they make ops long: with them, ops have no reason of their own. Ops that are always late come last, without late starts
and pauses.
"""


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
