"""Layers, embedding and head as measured, of stages whose parts are known, and the splits that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from pptrace.analysis.stages.types import StageCompute, StageOps, StageWork
from pptrace.analysis.whatif.measured_layers import measured_layers
from pptrace.analysis.whatif.split import layer_costs
from pptrace.analysis.whatif.stage_map import stage_map
from pptrace.schedule.registry import build


def compute(*of_stages: Mapping[str, Mapping[str, int]]) -> StageCompute:
    """Stages with parts by kind, ns of ten ops each."""
    ops = [
        StageOps(stage, kind, 10, sum(parts.values()), (), tuple(StageWork(name, ns) for name, ns in parts.items()))
        for stage, kinds in enumerate(of_stages)
        for kind, parts in kinds.items()
    ]
    return StageCompute(tuple(ops), ())


def measured(stages: StageCompute, layers: Sequence[int]):
    return measured_layers(stages, build("1f1b", len(layers), 8), layers)


def test_parts_of_one_end_alone_are_the_embedding_and_the_head() -> None:
    stages = compute(
        {"F": {"embedding": 10, "layers": 90}, "B": {"embedding": 20, "layers": 180}},
        {"F": {"layers": 90, "head": 60, "": 3}, "B": {"layers": 180, "head": 45, "": 9}},
    )
    found = measured(stages, (3, 3))
    assert found.ends.tolist() == [[0.1, 0.1, 0.1], [0.4, 0.2, 0.2]]
    assert found.weights is None


def test_of_two_stages_backwards_without_parts_have_the_share_of_forwards() -> None:
    repeats = {"before what repeats": 10, "repeat 1": 100, "repeat 2": 100}
    stages = compute({"F": {"layers": 100}, "B": repeats}, {"F": {"layers": 75, "head": 25}, "B": repeats})
    assert measured(stages, (2, 2)).ends.tolist() == [[0, 0, 0], [0.25, 0.25, 0.25]]


def test_of_more_stages_they_are_inferred_where_parts_do_not_tell() -> None:
    middle = {"F": {"layers": 100, "": 5}, "B": {"layers": 100, "": 30}}
    stages = compute(middle, middle, {"F": {"layers": 100, "head": 100}, "B": {"layers": 100, "head": 100, "": 50}})
    np.testing.assert_array_equal(measured(stages, (1, 1, 1)).ends, [[0, np.nan, np.nan], [0.5, np.nan, np.nan]])


@pytest.mark.parametrize(
    "stages",
    [
        compute({"F": {"repeat 1": 5}}, {"F": {"repeat 1": 5}}),
        compute({"F": {"embedding": 5}}, {"F": {"head": 5}}),
        compute({"F": {}}, {"F": {"layers": 5}}),
    ],
    ids=["order", "nothing in common", "one stage"],
)
def test_without_parts_that_stages_have_in_common_nothing_is_measured(stages: StageCompute) -> None:
    assert measured(stages, (1, 1)) is None


def test_layers_that_are_numbered_weigh_what_they_took_and_splits_follow_them() -> None:
    """Of layers of 10, 10, 40 and 20 beside an embedding of 20 the even split is 40 to 60, and the best one three to one."""
    stages = compute(
        {"F": {"embedding": 200, "Layer_1": 100, "Layer_0": 100}}, {"F": {"Layer_2": 400, "Layer_10": 200}}
    )
    found = measured(stages, (2, 2))
    assert found.weights.tolist() == [10, 10, 40, 20]
    typical = np.array([[40.0, 0, 0], [60.0, 0, 0]])
    each, ends = layer_costs(typical, (2, 2), found.ends, found.weights)
    assert (each.tolist(), ends) == ([10, 10, 40, 20], (20, 0))
    shares = stage_map((2, 2), (3, 1), found.ends, found.weights).shares[0]
    assert (shares @ typical[:, 0]).tolist() == pytest.approx([80, 20])
