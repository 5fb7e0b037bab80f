"""Percentiles of layers' figures over the model, and how evenly experts of one layer are chosen."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pptrace.analysis.experts.exchanges import no_exchanges
from pptrace.analysis.experts.loads import layer_loads, spread_over_layers
from pptrace.analysis.experts.turns import with_model_stages
from pptrace.analysis.experts.types import LayerLoad, LayerSpread
from tests.analysis.experts.on_paper import counted

LAYER = LayerLoad(0, 0, 0, *(None,) * 9)


def test_routes_of_a_layer_have_their_fewest_and_their_deviation_over_the_mean() -> None:
    even, uneven, none = layer_loads(
        with_model_stages(no_exchanges(), None), {0: counted([[4, 4, 4, 4], [1, 3, 5, 7], [0, 0, 0, 0]])}
    )
    assert (even.least_ratio, even.deviation_ratio) == (1.0, 0.0)
    assert uneven.least_ratio == 0.25
    assert uneven.deviation_ratio == pytest.approx(5**0.5 / 4)  # of 1, 3, 5 and 7
    assert (none.least_ratio, none.deviation_ratio) == (None, None)


def test_percentiles_over_many_layers_are_those_of_layers() -> None:
    ratios = [1 + index / 64 for index in range(61)]
    layers = [replace(LAYER, layer=index, expert_ratio=ratio) for index, ratio in enumerate(reversed(ratios))]
    (spread,) = spread_over_layers(layers)
    assert spread == LayerSpread("expert_ratio", 61, *(1 + index / 64 for index in (0, 30, 45, 54, 57, 60)))


def test_percentiles_between_two_layers_are_the_nearest_ones() -> None:
    (spread,) = spread_over_layers([replace(LAYER, idle_experts=idle) for idle in (0, 10, 20)])
    assert spread.p50 == 10.0
    assert {spread.p75, spread.p90, spread.p95} <= {10.0, 20.0}


def test_a_figure_that_fewer_than_two_layers_have_is_left_out() -> None:
    known = replace(LAYER, idle_experts=1, rank_ratio=1.25)
    layers = [known, replace(known, rank_ratio=None), replace(known, idle_experts=3), LAYER]
    found = {spread.figure: (spread.num_layers, spread.min, spread.max) for spread in spread_over_layers(layers)}
    assert found == {"idle_experts": (3, 1.0, 3.0), "rank_ratio": (2, 1.25, 1.25)}
    assert spread_over_layers([known]) == ()
