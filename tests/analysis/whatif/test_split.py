"""The best split, against all splits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt
import pytest

from pptrace.analysis.whatif.memory import LayerMemory
from pptrace.analysis.whatif.split import _of_chunks, _partitions, best_splits
from pptrace.analysis.whatif.stage_costs import stage_costs
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from tests.support.extent import ALL
from tests.support.measured import measured_costs

ENDS = (0.0, 0.0)


def all_splits(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """All splits; of three stages or more the first and the last may have no layer."""
    none = int(num_stages > 2)
    return [
        tuple(int(count) for count in np.diff((0, *cuts, num_layers)))
        for cuts in combinations(range(1 - none, num_layers + none), num_stages - 1)
    ]


def loads_of(split: Sequence[int], layers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    bounds = np.cumsum([0, *split])
    return np.array([layers[begin:end].sum() for begin, end in pairwise(bounds)])


@pytest.mark.parametrize("seed", range(40 if ALL else 20))
def test_no_split_has_a_lighter_heaviest_stage(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_layers, num_stages = int(rng.integers(4, 13)), int(rng.integers(2, 5))
    layers, ends = (
        rng.integers(1, 20, num_layers).astype(float),
        (float(rng.integers(0, 30)), float(rng.integers(0, 30))),
    )

    def heaviest(split: tuple[int, ...]) -> float:
        loads = loads_of(split, layers)
        loads[0] += ends[0]
        loads[-1] += ends[1]
        return float(max(loads))

    splits = all_splits(num_layers, num_stages)

    def squares(split: tuple[int, ...]) -> tuple[float, float]:
        loads = loads_of(split, layers)
        loads[[0, -1]] += ends
        return float(max(loads)), float((loads**2).sum())

    chosen = _partitions(layers, ends, num_stages)
    least = min(map(squares, splits))
    best = [split for split in splits if squares(split) == least]
    assert sorted(chosen[: len(best)]) == best
    nearly = [split for split in splits if heaviest(split) <= 1.05 * least[0]]
    assert sorted(chosen) == nearly if len(nearly) <= 64 else set(chosen) <= set(nearly)
    assert heaviest(chosen[0]) == min(map(heaviest, splits))
    assert _partitions(layers / 1024, (ends[0] / 1024, ends[1] / 1024), num_stages) == chosen, "in another unit"


@pytest.mark.parametrize("seed", range(40 if ALL else 20))
def test_no_split_that_fits_has_a_lighter_heaviest_stage(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_layers, num_stages = int(rng.integers(4, 13)), int(rng.integers(2, 5))
    layers, state, activations = rng.integers(1, 20, (3, num_layers)).astype(float)
    base, held = rng.integers(0, 10, num_stages).astype(float), list(range(num_stages, 0, -1))
    of_ends = rng.integers(0, 30, (2, 2)).astype(float)
    memory = LayerMemory(
        base,
        *(np.array([first, *part, last]) for part, (first, last) in zip((state, activations), of_ends, strict=True)),
    )

    def peaks(split: Sequence[int]) -> npt.NDArray[np.float64]:
        loads = np.array([loads_of(split, state), loads_of(split, activations)])
        loads[:, [0, -1]] += of_ends
        return base + loads[0] + np.array(held) * loads[1]

    splits = all_splits(num_layers, num_stages)
    assert memory.peaks_of(build("1f1b", num_stages, 8), splits[-1], held).tolist() == peaks(splits[-1]).tolist()
    of_splits = sorted(float(peaks(split).max()) for split in splits)
    most = int(of_splits[len(of_splits) // 4])  # a quarter of them fit
    fitting = [split for split in splits if peaks(split).max() <= most]
    chosen, *_ = _partitions(layers, (0.0, 0.0), num_stages, partial(memory.fits, most, held))
    assert chosen in fitting
    assert loads_of(chosen, layers).max() == min(loads_of(split, layers).max() for split in fitting)
    assert _partitions(layers, (0.0, 0.0), num_stages, partial(memory.fits, int(of_splits[0]) - 1, held)) == []


@pytest.mark.parametrize("seed", [7, 8, 10, 11])
def test_over_chunks_no_split_of_twelve_layers_has_a_lighter_heaviest_rank(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, placement = rng.integers(50, 300, 12).astype(np.float64), [[0, 1, 1, 0], [0, 1, 0, 1]][seed in (8, 11)]
    splits = all_splits(12, 4)

    def heaviest(split: Sequence[int]) -> float:
        return float(np.bincount(placement, loads_of(split, layers)).max())

    found, *others = _of_chunks(layers, ENDS, np.array(placement), splits[(20 * seed) % len(splits)])
    assert {heaviest(split) for split in (found, *others)} == {min(map(heaviest, splits))}
    assert _of_chunks(layers, ENDS, np.array(placement), found)[0] == found


def test_over_chunks_many_layers_are_moved_from_the_measured_and_from_even_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pptrace.analysis.whatif.split._MOST_TRIED", 0)
    layers, placement = np.ones(12), np.array([0, 1, 0, 1])
    found, *_ = _of_chunks(layers, ENDS, placement, (9, 1, 1, 1))
    assert np.bincount(placement, loads_of(found, layers)).tolist() == [6, 6]


def test_over_chunks_the_heaviest_rank_has_least_work_as_well() -> None:
    """Two layers of 30 in each of four stages on two ranks, with an embedding of 60 and a head of 120 at the ends."""
    plan = build("interleaved-1f1b", 2, 4)
    more = np.array([60, 0, 0, 120])[plan.table.stage]
    durations = np.where(plan.table.kind == Kind.F.code, 20 + more // 3, 40 + more // 3 * 2)
    costs = stage_costs(plan, measured_costs(plan.table, np.tile(durations, (2, 1, 1))), (2, 2, 2, 2))
    layers = np.full(8, 30.0)

    def heaviest(split: Sequence[int]) -> float:
        return float(np.bincount(plan.placement, loads_of(split, layers) + np.array([60, 0, 0, 120])).max())

    found, *_ = best_splits(costs)
    assert heaviest(found) == min(map(heaviest, all_splits(8, 4))) == 210
