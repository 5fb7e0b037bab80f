"""The best split, against all splits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt
import pytest

from pptrace.analysis.whatif.memory import LayerMemory, MemoryLimit
from pptrace.analysis.whatif.split import _improved, _of_chunks, _partitions, best_splits, layer_costs
from pptrace.analysis.whatif.stage_costs import stage_costs
from pptrace.analysis.whatif.stage_map import end_shares
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
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


@pytest.mark.parametrize("seed", range(40))
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
    assert sorted(chosen) == [split for split in splits if squares(split) == least]
    assert heaviest(chosen[0]) == min(map(heaviest, splits))
    assert _partitions(layers / 1024, (ends[0] / 1024, ends[1] / 1024), num_stages) == chosen, "in another unit"


@pytest.mark.parametrize("seed", range(40))
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
    chosen, *_ = _partitions(layers, (0.0, 0.0), num_stages, MemoryLimit(memory, most, held))
    assert chosen in fitting
    assert loads_of(chosen, layers).max() == min(loads_of(split, layers).max() for split in fitting)
    assert _partitions(layers, (0.0, 0.0), num_stages, MemoryLimit(memory, int(of_splits[0]) - 1, held)) == []


@pytest.mark.parametrize("placement", [[0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 0, 1, 2]])
def test_layers_that_cost_alike_are_shared_out_over_chunks_as_well_as_they_can_be(placement: list[int]) -> None:
    layers, ends = np.ones(12), (1.5, 3.5)

    def heaviest(split: Sequence[int]) -> float:
        loads = loads_of(split, layers)
        loads[[0, -1]] += ends
        return float(np.bincount(placement, loads).max())

    splits = all_splits(12, len(placement))
    least = min(map(heaviest, splits))
    for start in splits[:: len(splits) // 20]:
        assert heaviest(_improved(layers, ends, np.array(placement), start)) == least


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


def test_where_one_rank_is_heaviest_anyhow_the_others_share_the_rest_evenly() -> None:
    layers, placement = np.ones(12), [0, 1, 2, 0, 1, 2]
    for start in all_splits(12, 6)[::20]:
        found = _improved(layers, (0.0, 20.0), np.array(placement), start)
        assert sorted(np.bincount(placement, loads_of(found, layers)).tolist()) == [1, 5, 6]


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


def test_layers_that_cost_alike_are_shared_out_evenly_where_the_heaviest_stage_leaves_a_choice() -> None:
    assert set(_partitions(np.ones(10), (0.0, 0.0), 4)) == {
        (3, 2, 3, 2),
        (2, 3, 2, 3),
        (3, 3, 2, 2),
        (2, 2, 3, 3),
        (2, 3, 3, 2),
        (3, 2, 2, 3),
    }
    assert _partitions(np.ones(8), (0.0, 0.0), 4) == [(2, 2, 2, 2)]
    assert set(_partitions(np.ones(8), (0.0, 3.0), 3)) == {(4, 3, 1), (3, 4, 1), (4, 4, 0)}
    assert _partitions(np.ones(9), (0.0, 3.5), 4) == [(3, 3, 3, 0)]
    assert len(_partitions(np.ones(40), (0.0, 0.0), 16)) == 64


def test_the_ends_keep_what_their_layers_do_not_cost() -> None:
    typical = np.array(
        [[12.0, 10.0, 10.0], [8.0, 8.0, 8.0], [8.0, 8.0, 8.0], [14.0, 8.0, 8.0]]
    )  # 4 layers in each stage
    layers, (embedding, head) = layer_costs(typical, (4, 4, 4, 4), end_shares(typical, (4, 4, 4, 4)))
    assert layers.tolist() == [6.0] * 16
    assert (embedding, head) == (8.0, 6.0)
