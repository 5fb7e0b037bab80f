"""Detectors of reasons why steps are slow: passes over the costs of whole steps, one after the other.

A new detector is a function and its place in :data:`SHARED` or :data:`SINGLE`.

All that is found out from the costs of whole steps together: the slowdowns, and reasons that have findings of their own.

Noise is what of a cause is no more than ops that vary by chance make of it. A rank is slower than its replicas, or a stage
heavier than the others, where the medians of its ops exceed theirs by more than their standard errors allow for. Ops that vary
cost a step time however healthy the run is: as much as ops that vary by :data:`ORDINARY` would cost is not worth a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import NormalDist

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.alike import DEVIATION, Place, gains_of_places, long_ops, slow_rank
from pptrace.analysis.stragglers.communication import (
    HotSpot,
    OnOneHost,
    late_member,
    late_receives,
    not_known,
    slow_link,
    unequal_routes,
)
from pptrace.analysis.stragglers.hosts import garbage_collections, host_pauses, late_launches, late_ops, late_starts
from pptrace.analysis.stragglers.reason import Reason, gains
from pptrace.analysis.stragglers.sequences import LONG_SEQUENCES, long_sequences
from pptrace.analysis.stragglers.slowdowns import slowdowns
from pptrace.analysis.whole_run import Stragglers
from pptrace.model.tables import Floats, Int64
from pptrace.schedule.message_graph import spans_of

ORDINARY = 0.1
"""Relative standard deviation of ops that is ordinary."""
_FALSE_ALARMS = 0.001
"""Share of noisy runs in which a place is taken for a slow one by chance, all places together."""
_MEDIAN = np.pi / 2
"""Variance of the median of many normally distributed values over that of their mean."""
_MOST_SHUFFLED = 400_000
"""Ops in the replays of ordinary noise."""
_MOST_REPLAYS = 32
_FEWEST_RANKS = 3
"""Ranks of a pipeline: of fewer, one always has most of the variation."""


class Noise(Struct, frozen=True):
    """``slow`` are the stages and ranks that cost more than their like beyond chance; ``of_ordinary_ops`` is what ops that vary
    by :data:`ORDINARY` cost a step, ns, in pipelines of ``num_ranks``.
    """

    slow: frozenset[Place] = frozenset()
    of_ordinary_ops: int = 0
    num_ranks: int = 0

    def explains(self, cause: str, where: Mapping[str, int | str], gain: int) -> bool:
        """Return whether a cause that is mostly at a place, or at none, and costs a step ``gain`` ns, may be chance alone."""
        if cause == "jitter":
            return gain <= self.of_ordinary_ops and not (where and self.num_ranks >= _FEWEST_RANKS)
        kind = _COMPARED.get(cause)
        if kind is None:
            return False
        return not self.slow & where.items() if where else all(of != kind for of, _ in self.slow)


_COMPARED = {"imbalance": "stage", "straggler": "rank"}
"""The places that a cause compares."""


def noise_of(plans: Sequence[StepMatrix]) -> Noise:
    """Find the places that are slow beyond chance in whole steps, and what ordinary noise costs one of them."""
    slow: frozenset[Place] = frozenset()
    for costs in plans:
        medians = _Medians.of(costs)
        slow |= _beyond_chance(_ranks(costs, medians)) | _beyond_chance(_stages(costs, medians))
    longest = max(plans, key=lambda costs: len(costs.step))
    return Noise(slow, _cost_of_ordinary(longest), longest.table.pp)


class _Medians(Struct, frozen=True, eq=False):
    """Median cost of each cell in each pipeline, and its squared standard error, shape (pipelines, cells); ns.

    ``rows`` is how many ops of a cell a step has. The deviation of a cell is at least that of most cells, relative to its
    median: few ops tell little of how much they vary.
    """

    median: Floats
    variance: Floats
    rows: Floats

    @classmethod
    def of(cls, costs: StepMatrix) -> _Medians:
        pipelines, (cells, of_row) = costs.of_pipelines(), costs.cells
        typical = costs.typical_cells
        median = typical[[int(windows[0]) for windows in pipelines]]
        rows = np.bincount(of_row, minlength=len(cells)).astype(np.float64)
        deviation = np.empty_like(median)
        count = np.array([len(windows) for windows in pipelines])[:, np.newaxis] * rows
        for index, windows in enumerate(pipelines):
            durations = costs.own[windows]
            for cell in range(len(cells)):
                beyond = durations[:, of_row == cell] - median[index, cell]
                deviation[index, cell] = DEVIATION * np.median(np.abs(beyond))
        deviation *= count / np.maximum(count - 0.8, 0.2)  # Croux and Rousseeuw's correction for few values
        relative = np.divide(deviation, median, out=np.zeros_like(median), where=median > 0)
        deviation = np.maximum(deviation, np.median(relative) * median)
        return cls(median, _MEDIAN * deviation**2 / count, rows)


_Excess = tuple[Place, float, float]
"""A place, its excess over its like in a step, ns, and the variance of that."""


def _beyond_chance(places: Iterator[_Excess]) -> frozenset[Place]:
    """The places whose excess is more than chance makes of so many."""
    every = list(places)
    if not every:
        return frozenset()
    limit = NormalDist().inv_cdf(1 - _FALSE_ALARMS / len(every))
    return frozenset(place for place, ns, variance in every if ns > limit * np.sqrt(variance))


def _ranks(costs: StepMatrix, medians: _Medians) -> Iterator[_Excess]:
    """Each rank against its replicas."""
    _, of_row = costs.cells
    pipelines = costs.of_pipelines()
    if len(pipelines) < 2:
        return
    place_of_cell = costs.table.rank[np.unique(of_row, return_index=True)[1]]
    for index, windows in enumerate(pipelines):
        others = np.delete(np.arange(len(pipelines)), index)
        usual, spread = _median_of(medians, others)
        ns = medians.rows * (medians.median[index] - usual)
        variance = medians.rows**2 * (medians.variance[index] + spread)
        for place, rank in enumerate(costs.ranks[windows[0]].tolist()):
            of_rank = place_of_cell == place
            yield ("rank", rank), float(ns[of_rank].sum()), float(variance[of_rank].sum())


def _stages(costs: StepMatrix, medians: _Medians) -> Iterator[_Excess]:
    """Each stage against the others, by the medians of its replicas."""
    cells, _ = costs.cells
    kind, stage = np.divmod(cells, costs.table.num_stages)
    cost, spread = _median_of(medians, np.arange(len(medians.median)))
    for number in range(costs.table.num_stages):
        ns = variance = 0.0
        for cell in np.flatnonzero(stage == number).tolist():
            others = np.flatnonzero((kind == kind[cell]) & (stage != number))
            if len(others):
                of_others = float(spread[others].mean()) * _of_median(len(others))
                ns += medians.rows[cell] * (cost[cell] - float(np.median(cost[others])))
                variance += medians.rows[cell] ** 2 * (spread[cell] + of_others)
        yield ("stage", number), ns, variance


def _median_of(medians: _Medians, pipelines: np.typing.NDArray[np.intp]) -> tuple[Floats, Floats]:
    """The median over some pipelines of each cell, and its variance."""
    spread: Floats = medians.variance[pipelines].mean(axis=0) * _of_median(len(pipelines))
    middle: Floats = np.median(medians.median[pipelines], axis=0)
    return middle, spread


def _of_median(num_values: int) -> float:
    """Variance of the median of values over that of each."""
    return 1.0 if num_values < 3 else _MEDIAN / num_values


def _cost_of_ordinary(costs: StepMatrix) -> int:
    """Time by which a step is longer where each op varies by :data:`ORDINARY` around what is typical, ns."""
    windows = np.flatnonzero(costs.step == costs.step[0])
    _, of_row = costs.cells
    typical = costs.typical_cells[windows][:, of_row]
    transfers = np.maximum(costs.transfers[windows], 0)
    num_replays = min(max(_MOST_SHUFFLED // typical.size, 1), _MOST_REPLAYS)
    deviations = np.random.default_rng(0).standard_normal((num_replays, *typical.shape))
    varying = np.rint(typical * np.maximum(1 + ORDINARY * deviations, 0)).astype(np.int64)
    usual = spans_of(costs.table, costs.graph, np.rint(typical).astype(np.int64), transfers).max()
    every = varying.reshape(-1, varying.shape[-1]), np.tile(transfers, (num_replays, 1))
    noisy = spans_of(costs.table, costs.graph, *every).reshape(num_replays, -1).max(axis=1)
    return max(int(noisy.mean()) - int(usual), 0)


Plans = Sequence[StepMatrix]
"""The costs of whole steps, by plan."""


class Known(Struct, frozen=True):
    """Facts besides the costs: ``hot_spot`` is where most rows of experts are, of runs that have experts on several ranks;
    ``uncertainty_ns`` is that of the clocks; ``found`` are the reasons of earlier detectors; ``are_on_one_host`` tells of ranks.
    """

    hot_spot: HotSpot | None = None
    uncertainty_ns: int | None = 0
    found: tuple[Reason, ...] = ()
    are_on_one_host: OnOneHost = not_known


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


def _slow_link(plans: Plans, known: Known) -> tuple[Reason | None, Plans]:
    return slow_link(plans, known.are_on_one_host), plans


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
    _slow_link,
    _only_names(slow_rank),
    _only_names(late_member),
    _later_than_clocks_tell(late_starts),
    _later_than_clocks_tell(late_ops),
    _later_than_clocks_tell(host_pauses),
    _later_than_clocks_tell(late_launches),
)
"""Detectors of what single ops, links, ranks and hosts do, all in what those before have left. Long sequences come before long
ops, as they make ops long: with them, ops have no reason of their own. Ops that are always late come last, without late starts,
single late ops and pauses.
"""


_MOST_REPLAYED = 100_000_000
"""Ops in the replays of all stages and pipeline ranks together; they take about 40 ns each."""


class Study(Struct, frozen=True, eq=False):
    """``stragglers`` is None where there is no whole step.

    ``gains`` is what each step would get back if the slowest stage or rank cost what its like costs, ns; ``steps`` are the
    numbers of the steps that they and the gains of the reasons are of. ``noise`` is what chance explains of them.
    """

    stragglers: Stragglers | None = None
    reasons: tuple[Reason, ...] = ()
    gains: Mapping[Place, Int64] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    noise: Noise | None = None


def study_steps(
    plans: Sequence[StepMatrix],
    hot_spot: HotSpot | None = None,
    uncertainty_ns: int | None = 0,
    are_on_one_host: OnOneHost = not_known,
) -> Study:
    """The study of whole steps, or of as many of them, evenly spaced, as :data:`_MOST_REPLAYED` allows.

    ``hot_spot``, ``uncertainty_ns`` and ``are_on_one_host`` are what :class:`pptrace.analysis.stragglers.detectors.Known` has.
    """
    plans = [costs for costs in plans if len(costs.step)]
    num_replayed = sum(costs.durations.size * (costs.table.num_stages + costs.table.pp) for costs in plans)
    plans = [costs.every(-(-num_replayed // _MOST_REPLAYED)) for costs in plans]
    if not plans:
        return Study()
    # As the published study replays: with the waits and transfers that were recorded.
    stragglers = slowdowns([costs.as_recorded() for costs in plans])
    known = Known(hot_spot, uncertainty_ns, are_on_one_host=are_on_one_host)
    reasons, plans = detect((*SHARED, *SINGLE), plans, known)
    steps = np.concatenate([np.unique(costs.step) for costs in plans]).tolist()
    return Study(stragglers, reasons, gains_of_places(plans), tuple(steps), noise_of(plans))
