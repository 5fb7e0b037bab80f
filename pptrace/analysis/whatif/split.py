"""The best division of the model's layers over its stages, by measured costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations, islice
from math import comb

import numpy as np

from pptrace.analysis.whatif.memory import Fits
from pptrace.analysis.whatif.stage_costs import StageCosts
from pptrace.analysis.whatif.stage_map import FEWEST_STAGES
from pptrace.model.tables import Bool, Floats, Int64

_DIGITS = 12
"""Digits to which parts of the whole work are compared."""
_MOST_TRIED = 50_000
"""Splits over ranks with several stages that are all tried."""
_MOST_AS_GOOD = 64
"""Splits that are returned at most."""
_AS_GOOD = 1e-12
_NEARLY = 0.05
"""Part by which the heaviest stage may have more than it must for a split to be tried: a replay tells which step is shorter."""
_ALIKE = 0.05
"""Part of the usual work of a layer by which those of a stage may differ and be taken for the same."""


def best_splits(costs: StageCosts, fits: Fits | None = None) -> list[tuple[int, ...]]:
    """The layers of each stage with which the rank that has most work has the least: all splits, up to 64, that are as good or,
    with one stage on each rank, nearly so.

    Every stage has a layer at least, but the first and the last may have none where there are stages between them, which tell
    what the embedding and the head cost; splits without such stages come first. Layers of a measured stage cost alike, the
    embedding and the head stay at the ends, and what ops take however much they do is the same in all stages, so that it decides
    nothing. With one stage on each rank it is exact, by dynamic programming over stages (the linear partition problem); of
    several such splits those whose squares sum to the least. With several stages, it is where no layer can move to another stage
    for the better. [] where the layers of the stages are not known, or no split fits into the limit of memory.
    """
    plan = costs.plan
    if costs.layers is None or len(costs.layers) < 2 or plan.num_chains > 1:
        return []
    weights = None if costs.measured is None else costs.measured.weights
    layers, ends = layer_costs(costs.of_layers(), costs.layers, costs.ends(), weights)
    if plan.num_chunks > 1:
        splits = _of_chunks(layers, ends, np.array(plan.placement), costs.layers)
    else:
        splits = _partitions(layers, ends, len(costs.layers), fits)
    return sorted(splits, key=lambda split: split.count(0))


def layer_costs(
    typical: Floats, layers: Sequence[int], shares: Floats, weights: Floats | None = None
) -> tuple[Floats, tuple[float, float]]:
    """(work of each layer, that of the embedding and of the head), F and backward of one microbatch together, ns.

    ``shares`` are those of the embedding and the head in their stages, by output, ``weights`` what each layer takes, where that
    is known. Layers that cost about as much as all do are taken to cost the same, so that noise does not divide them unevenly.
    """
    work = typical.sum(axis=1)
    first, last = (float((typical[stage] * shares[end]).sum()) for end, stage in ((0, 0), (1, -1)))
    work = work - np.array([first, *[0.0] * (len(layers) - 2), last])
    counts = np.array(layers)
    usual, of_layer = work.sum() / sum(layers), np.divide(work, counts, out=np.zeros(len(counts)), where=counts > 0)
    each = np.repeat(of_layer, layers)
    if weights is not None:
        each = weights * np.repeat(of_layer * counts / np.add.reduceat(weights, np.cumsum([0, *layers[:-1]])), layers)
    return np.where(np.abs(each - usual) <= _ALIKE * usual, usual, each), (first, last)


def _partitions(
    layers: Floats, ends: tuple[float, float], num_stages: int, fits: Fits | None = None
) -> list[tuple[int, ...]]:
    """Cut layers into stages that fit into the memory: least maximum, then least sum of squares; then those of nearly the least
    maximum; all of them up to a number.
    """
    before, num_layers = np.concatenate(([0.0], np.cumsum(layers))), len(layers)

    def loads(stage: int, end: int) -> Floats:
        """Work of a stage by the layer with which it begins; ``end`` is that of a stage of none."""
        extra = ends[0] * (stage == 0) + ends[1] * (stage == num_stages - 1)
        of_stage: Floats = before[end] - before[: end + 1] + extra
        # A stage may have no layer if it has the embedding or the head, and what that costs is known.
        may_have_none = stage in (0, num_stages - 1) and num_stages >= FEWEST_STAGES
        of_stage[end] += 0.0 if may_have_none else np.inf
        if fits is not None:
            of_stage[~fits(stage, np.arange(end + 1), end)] = np.inf
        return of_stage

    most = _least(loads, num_stages, num_layers, np.maximum)
    if np.isinf(most[-1, -1]):
        return []
    heaviest = most[-1, -1] * (1 + _AS_GOOD)

    def squares(stage: int, end: int) -> Floats:
        of_stage = loads(stage, end)
        return np.where(of_stage <= heaviest, of_stage**2, np.inf)

    least = _least(squares, num_stages, num_layers, np.add)

    as_good, nearly = least * (1 + _AS_GOOD), most[-1, -1] * (1 + _NEARLY)
    every = chain(
        _cuts(lambda at, end: least[at, : end + 1] + squares(at, end) <= as_good[at + 1, end], num_stages, num_layers),
        _cuts(lambda at, end: np.maximum(most[at, : end + 1], loads(at, end)) <= nearly, num_stages, num_layers),
    )
    return list(islice(dict.fromkeys(islice(every, 2 * _MOST_AS_GOOD)), _MOST_AS_GOOD))


def _cuts(may_begin: Callable[[int, int], Bool], num_stages: int, num_layers: int) -> Iterator[tuple[int, ...]]:
    """The layers of stages; ``may_begin`` marks the layers with which a stage that ends before another one may begin."""
    if num_stages == 0:
        yield ()
        return
    for begin in np.flatnonzero(may_begin(num_stages - 1, num_layers)).tolist():
        yield from ((*first, num_layers - begin) for first in _cuts(may_begin, num_stages - 1, begin))


def _least(of_stage: Callable[[int, int], Floats], num_stages: int, num_layers: int, join: np.ufunc) -> Floats:
    """The least of so many stages up to each layer, shape (stages + 1, layers + 1); those before are joined with the next."""
    least = np.full((num_stages + 1, num_layers + 1), np.inf)
    least[0, 0] = 0.0
    for stage in range(num_stages):
        for end in range(num_layers + 1):
            least[stage + 1, end] = join(least[stage, : end + 1], of_stage(stage, end)).min()
    return least


def _of_chunks(
    layers: Floats, ends: tuple[float, float], placement: Int64, measured: Sequence[int]
) -> list[tuple[int, ...]]:
    """The best splits over ranks with several stages; the measured one first where none is better."""
    num_layers, num_stages = len(layers), len(measured)
    if comb(num_layers + 1, num_stages - 1) <= _MOST_TRIED:
        cuts = np.array(list(combinations(range(num_layers + 1), num_stages - 1)))
        tried = np.diff(np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, num_layers))), axis=1)
    else:
        share, rest = divmod(num_layers, num_stages)
        even = [share + (stage < rest) for stage in range(num_stages)]
        tried = np.array([_improved(layers, ends, placement, start) for start in (measured, even)])
    tried = np.concatenate(([measured], tried))
    scores = _score(tried, layers, ends, placement)
    best = scores[:, np.lexsort(scores[::-1])[0]]
    as_good = tried[(scores == best[:, np.newaxis]).all(axis=0)].tolist()
    return list(dict.fromkeys(map(tuple, as_good)))[:_MOST_AS_GOOD]


def _improved(layers: Floats, ends: tuple[float, float], placement: Int64, split: Sequence[int]) -> tuple[int, ...]:
    """Move one layer after the other between stages while the heaviest rank, or else a sum of squares, gets less."""
    moves = np.eye(len(split), dtype=np.int64)[:, np.newaxis] - np.eye(len(split), dtype=np.int64)
    moves = moves.reshape(-1, len(split))
    best = np.array(split)
    score = _score(best[np.newaxis], layers, ends, placement)[:, 0]
    fewest = [0, *[1] * (len(split) - 2), 0]
    while True:
        splits = best + moves[(best + moves >= fewest).all(axis=1)]
        scores = _score(splits, layers, ends, placement)
        first = np.lexsort(scores[::-1])[0]
        if tuple(scores[:, first]) >= tuple(score):
            return tuple(best.tolist())
        best, score = splits[first], scores[:, first]


def _score(splits: Int64, layers: Floats, ends: tuple[float, float], placement: Int64) -> Floats:
    """(work of the heaviest rank, sums of the squares of ranks and of stages), in parts of the whole work; shape (3, splits)."""
    bounds = np.cumsum(np.pad(splits, ((0, 0), (1, 0))), axis=1)
    of_stages = np.diff(np.concatenate(([0.0], np.cumsum(layers)))[bounds], axis=1)
    of_stages[:, [0, -1]] += ends
    of_stages /= layers.sum() + sum(ends)
    loads = of_stages @ (placement[:, np.newaxis] == np.arange(placement.max() + 1))
    return np.round([loads.max(axis=1), (loads**2).sum(axis=1), (of_stages**2).sum(axis=1)], _DIGITS)
