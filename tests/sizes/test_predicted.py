"""Predictions as a trace has them: each step's bytes once for a range of equal steps, read back as they were written."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from instrument.expert_counts import ExpertCounts
from instrument.mesh import MeshShape
from pptrace.model.predicted import RankPrediction, read_prediction
from pptrace.schedule.registry import build
from pptrace.sizes.expert_options import ExpertOptions
from pptrace.sizes.expert_step import LayerRoutes
from pptrace.sizes.memory import MemoryPrediction
from pptrace.sizes.predicted import predicted_facts, routes_of
from pptrace.sizes.step import StepVolume
from tests.support.gpt_runs import facts


def read_back(volume: StepVolume, rank: int, steps: range) -> RankPrediction:
    return read_prediction(json.loads(json.dumps(predicted_facts(volume, rank, steps, on_device=False))))


@pytest.mark.parametrize("sync", ["synchronous", "post-validation"])
def test_what_is_read_back_is_what_was_predicted(sync: str) -> None:
    """With post-validation the first and the last step have other messages than those between."""
    model = facts(layers_per_stage=(2, 2), clip_grad=1.0, optimizer_sync=sync, steps=6)
    volume = StepVolume(model, MeshShape(2, dp=2, tp=2), build("1f1b", 2, 4))
    for rank in range(8):
        prediction = read_back(volume, rank, range(6))
        steps = [range(6)] if sync == "synchronous" else [range(1), range(1, 5), range(5, 6)]
        assert [each for each, _ in prediction.communication] == steps
        for step in range(6):
            expected = {key: calls.bytes for key, calls in volume.of_rank(rank, step).items()}
            assert prediction.of_step(step) == expected
        memory, parts = prediction.memory, MemoryPrediction(volume, on_device=False).of_rank(rank)
        assert (memory.weights, memory.gradients, memory.optimizer) == (parts.weights, parts.gradients, parts.optimizer)
        assert (memory.activations, memory.of_stage, memory.reason) == (
            parts.activations,
            parts.activations_of_stage,
            None,
        )


def test_without_counts_of_routes_what_depends_on_them_is_null() -> None:
    model = facts(layers_per_stage=(1,), experts=ExpertOptions(4))
    volume = StepVolume(model, MeshShape(1, dp=2, ep=2), build("1f1b", 1, 2))
    prediction = read_back(volume, 0, range(3, 4))
    of_step = prediction.of_step(3)
    assert of_step["ep", "all_to_all"] is None
    assert of_step["dp", "all_reduce"] is not None
    assert (prediction.memory.activations, prediction.memory.of_stage) == (None, {})
    assert "routes" in (prediction.memory.reason or "")
    jittered = StepVolume(replace(model, experts=ExpertOptions(4, jitter=0.1)), volume.mesh, volume.plan)
    assert "noise" in (read_back(jittered, 0, range(1)).memory.reason or "")


def test_counted_routes_are_those_of_each_step_and_layer() -> None:
    """Rows that came are those that the experts compute, unless ranks share experts and compute those of others too."""
    chosen, dropped = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0, 4], [1, 2]])
    counts = ExpertCounts()
    counts.add(3, 0, chosen, dropped, 4, (0, [2, 1]))
    counts.add(3, 1, chosen, chosen, 4, (0, [1, 0]))
    counts.add(3, 0, chosen, chosen, 4, (0, [5, 2]))
    expected = {(7, 3, 0): LayerRoutes([3, 4], [3, 7], [3, 7]), (7, 3, 1): LayerRoutes([4], [1], [1])}
    assert routes_of(7, counts.facts()) == expected
    counts.add(4, 0, chosen, chosen, 4, (0, [5, 2]), 6)
    assert routes_of(7, counts.facts()) == expected | {(7, 4, 0): LayerRoutes([4], [6], [7])}
    assert routes_of(7, None) == {}
