"""Layers of the model that exchanges are of, where stages stand in another order than their layers."""

from __future__ import annotations

import numpy as np

from pptrace.analysis.experts.counts import RankCounts
from pptrace.analysis.experts.exchanges import no_exchanges
from pptrace.analysis.experts.loads import layer_loads
from pptrace.analysis.experts.turns import Place, layers_of_places, with_model_stages
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.slices import Slice
from tests.analysis.experts.on_paper import counted


def of_layers(*layers: int) -> RankCounts:
    return counted(np.ones((len(layers), 2)), layers)


def layers_of(plan: Plan | None) -> dict[Place, int]:
    """The layers of two stages of each rank, of two layers with experts each."""
    places = [(0, 0), (0, 3), (1, 1), (1, 2)]
    rank, stage = np.repeat(places, 2, axis=0).T
    exchanges = Slice({"rank": rank, "stage": stage, "layer": np.tile([0, 1], 4)})
    counts = dict.fromkeys((0, 1), of_layers(0, 2, 4, 6))
    return layers_of_places(with_model_stages(exchanges, plan), counts)


def test_copies_of_a_stage_have_its_layers() -> None:
    """DualPipe on two ranks: stages 0 and 2 are copies of the model's first one, 1 and 3 of its second one."""
    first, second = {0: 0, 1: 2}, {0: 4, 1: 6}
    expected = {Place(stage, nth): layer for stage in range(4) for nth, layer in (first, second)[stage % 2].items()}
    assert layers_of(build("dualpipe", 2, 4)) == expected


def test_without_a_plan_layers_are_in_order_of_the_stages() -> None:
    found = layers_of(None)
    assert [found[Place(0, 0)], found[Place(0, 1)], found[Place(3, 0)], found[Place(3, 1)]] == [0, 2, 4, 6]


def test_layers_without_exchanges_are_in_the_stages_that_the_model_has() -> None:
    """Each rank has all experts of its own stage; where the sizes do not fit the layers, stages are not known."""
    counts = {0: of_layers(0, 2), 1: of_layers(3, 4)}

    def places_of(layers_per_stage: tuple[int, ...]) -> list[tuple[int | None, int | None, int | None]]:
        loads = layer_loads(with_model_stages(no_exchanges(), None), counts, (), layers_per_stage)
        return [(load.layer, load.stage, load.nth) for load in loads]

    assert places_of((3, 1, 2)) == [(0, 0, 0), (2, 0, 1), (3, 1, 0), (4, 2, 0)]
    for unknown in ((), (3, 1)):
        assert places_of(unknown) == [(0, None, 0), (2, None, 1), (3, None, 2), (4, None, 3)]
