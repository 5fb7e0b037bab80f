"""The best division of the model's layers over its stages, by measured costs, and the options of frameworks for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from pptrace.analysis.whatif.stage_costs import StageCosts
from pptrace.analysis.whatif.stage_map import Floats, end_shares


def best_split(costs: StageCosts) -> tuple[int, ...] | None:
    """The layers of each stage with which the stage that has most work has the least; at least one layer each.

    Exact, by dynamic programming over stages (the linear partition problem): layers of a measured stage cost alike, and the
    embedding and the head stay at the ends. Of several such splits the one whose squares sum to the least. None where the layers
    of the stages are not known, or a rank has several stages: there the work of a rank is not that of a stage.
    """
    if costs.layers is None or costs.plan.num_chunks > 1 or len(costs.layers) < 2:
        return None
    layers, ends = layer_costs(costs.typical(), costs.layers)
    return _partition(layers, ends, len(costs.layers))


def layer_costs(typical: Floats, layers: Sequence[int]) -> tuple[Floats, tuple[float, float]]:
    """(work of each layer, that of the embedding and of the head), F and backward of one microbatch together, ns."""
    work, shares = typical.sum(axis=1), end_shares(typical, layers)
    first, last = (float((typical[stage] * shares[end]).sum()) for end, stage in ((0, 0), (1, -1)))
    work = work - np.array([first, *[0.0] * (len(layers) - 2), last])
    return np.repeat(work / np.array(layers), layers), (first, last)


def _partition(layers: Floats, ends: tuple[float, float], num_stages: int) -> tuple[int, ...]:
    """Cut layers into stages: least maximum, then least sum of squares."""
    before = np.concatenate(([0.0], np.cumsum(layers)))
    num_layers = len(layers)
    most = np.full((num_stages + 1, num_layers + 1), np.inf)
    squares, cut = np.full(most.shape, np.inf), np.zeros(most.shape, dtype=np.int64)
    most[0, 0] = squares[0, 0] = 0.0
    for stage in range(1, num_stages + 1):
        extra = ends[0] * (stage == 1) + ends[1] * (stage == num_stages)
        for end in range(stage, num_layers - (num_stages - stage) + 1):
            loads = before[end] - before[stage - 1 : end] + extra
            worst = np.maximum(most[stage - 1, stage - 1 : end], loads)
            sums = squares[stage - 1, stage - 1 : end] + loads**2
            least = worst.min()
            as_good = np.flatnonzero(worst <= least * (1 + 1e-12))
            chosen = as_good[sums[as_good].argmin()]
            most[stage, end], squares[stage, end], cut[stage, end] = least, sums[chosen], stage - 1 + chosen
    bounds = [num_layers]
    for stage in range(num_stages, 0, -1):
        bounds.append(int(cut[stage, bounds[-1]]))
    return tuple(int(count) for count in -np.diff(bounds)[::-1])


def paste_lines(split: Sequence[int]) -> str:
    """The split as an option of this project's runtime, of Megatron-LM, and as split points of torchtitan."""
    layout = "|".join(
        f"{'E' * (stage == 0)}{'t' * count if count < 3 else f't*{count}'}{'L' * (stage == len(split) - 1)}"
        for stage, count in enumerate(split)
    )
    points = ",".join(f"layers.{index}" for index in list(accumulate(split))[:-1])
    inner = set(split[1:-1])
    ends = (
        f" or --decoder-first-pipeline-num-layers {split[0]} --decoder-last-pipeline-num-layers {split[-1]}"
        if len(inner) == 1
        else ""
    )
    return (
        f'--split {",".join(map(str, split))}; Megatron-LM: --pipeline-model-parallel-layout "{layout}"{ends}; '
        f"torchtitan: split points {points}"
    )
