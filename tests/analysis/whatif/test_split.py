"""The best split, against all splits."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from pptrace.analysis.whatif.split import _partition, layer_costs, paste_lines


@pytest.mark.parametrize("seed", range(40))
def test_no_split_has_a_lighter_heaviest_stage(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_layers, num_stages = int(rng.integers(4, 13)), int(rng.integers(2, 5))
    layers, ends = (
        rng.integers(1, 20, num_layers).astype(float),
        (float(rng.integers(0, 30)), float(rng.integers(0, 30))),
    )

    def heaviest(split: tuple[int, ...]) -> float:
        bounds = np.cumsum([0, *split])
        loads = [layers[begin:end].sum() for begin, end in pairwise(bounds)]
        loads[0] += ends[0]
        loads[-1] += ends[1]
        return float(max(loads))

    splits = [
        tuple(int(count) for count in np.diff((0, *cuts, num_layers)))
        for cuts in combinations(range(1, num_layers), num_stages - 1)
    ]
    chosen = _partition(layers, ends, num_stages)
    assert chosen in splits
    assert heaviest(chosen) == min(map(heaviest, splits))


def test_layers_that_cost_alike_are_shared_out_evenly_where_the_heaviest_stage_leaves_a_choice() -> None:
    assert _partition(np.ones(10), (0.0, 0.0), 4) in {
        (3, 2, 3, 2),
        (2, 3, 2, 3),
        (3, 3, 2, 2),
        (2, 2, 3, 3),
        (2, 3, 3, 2),
        (3, 2, 2, 3),
    }
    assert _partition(np.ones(8), (0.0, 0.0), 4) == (2, 2, 2, 2)
    assert _partition(np.ones(8), (0.0, 3.0), 3) in {(4, 3, 1), (3, 4, 1)}


def test_the_ends_keep_what_their_layers_do_not_cost() -> None:
    typical = np.array(
        [[12.0, 10.0, 10.0], [8.0, 8.0, 8.0], [8.0, 8.0, 8.0], [14.0, 8.0, 8.0]]
    )  # 4 layers in each stage
    layers, (embedding, head) = layer_costs(typical, (4, 4, 4, 4))
    assert layers.tolist() == [6.0] * 16
    assert (embedding, head) == (8.0, 6.0)


def test_a_split_is_written_as_frameworks_take_it() -> None:
    text = paste_lines((3, 4, 4, 1))
    assert "--split 3,4,4,1;" in text
    assert '--pipeline-model-parallel-layout "Et*3|t*4|t*4|tL"' in text
    assert "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1" in text
    assert "layers.3,layers.7,layers.11" in text
    assert "--decoder-first" not in paste_lines((3, 4, 5, 1))
