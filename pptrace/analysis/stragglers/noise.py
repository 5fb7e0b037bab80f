"""Noise: what of a cause is no more than ops that vary by chance make of it.

A rank is slower than its replicas, or a stage heavier than the others, where the medians of its ops exceed theirs by more than
their standard errors allow for. Ops that vary cost a step time however healthy the run is: as much as ops that vary by
:data:`ORDINARY` would cost is not worth a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.alike import DEVIATION, Place
from pptrace.model.tables import Floats
from pptrace.schedule.message_graph import spans_of

ORDINARY = 0.1
"""Relative standard deviation of ops that is ordinary."""
_FALSE_ALARMS = 0.001
"""Share of noisy runs in which a place is taken for a slow one by chance, all places together."""
_MEDIAN = np.pi / 2
"""Variance of the median of many normally distributed values over that of their mean."""
_MOST_REPLAYED = 400_000
"""Ops in the replays of ordinary noise."""
_MOST_REPLAYS = 32
_FEWEST_RANKS = 3
"""Ranks of a pipeline: of fewer, one always has most of the variation."""


@dataclass(frozen=True, slots=True)
class Noise:
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


@dataclass(frozen=True, slots=True, eq=False)
class _Medians:
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
    num_replays = min(max(_MOST_REPLAYED // typical.size, 1), _MOST_REPLAYS)
    deviations = np.random.default_rng(0).standard_normal((num_replays, *typical.shape))
    varying = np.rint(typical * np.maximum(1 + ORDINARY * deviations, 0)).astype(np.int64)
    usual = spans_of(costs.table, costs.graph, np.rint(typical).astype(np.int64), transfers).max()
    every = varying.reshape(-1, varying.shape[-1]), np.tile(transfers, (num_replays, 1))
    noisy = spans_of(costs.table, costs.graph, *every).reshape(num_replays, -1).max(axis=1)
    return max(int(noisy.mean()) - int(usual), 0)
