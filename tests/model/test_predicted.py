"""Predictions among the facts of ranks: what is damaged is none, and those of another plan are left out with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pptrace.model.predicted import (
    PREDICTED,
    ExpertSizes,
    GptSizes,
    MemoryParts,
    RankPrediction,
    gpt_of_run,
    predictions_of,
    read_gpt_sizes,
    read_prediction,
    why_unpredicted,
)
from pptrace.model.schedule_info import PlanSource, ScheduleInfo
from pptrace.schedule.registry import build

PLAN = build("1f1b", 2, 4)
FOLLOWED = ScheduleInfo(PLAN, PLAN.name, PlanSource.METADATA)
OTHERS = (
    replace(FOLLOWED, source=PlanSource.OPTION),
    replace(FOLLOWED, mismatches=("rank 0: …",)),
    replace(FOLLOWED, plan=None),
)
MODEL: dict[str, Any] = {"name": "gpt", "hidden": 8, "sequence": 4, "microbatch_size": 2}
MODEL |= {"dtype": "bfloat16", "layers_per_stage": [1, 2]}
EXPERTS: dict[str, Any] = {"experts": 4, "experts_dispatcher": "padded", "experts_width": None}
MEMORY: dict[str, Any] = {"weights_bytes": 1, "gradients_bytes": 2, "optimizer_bytes": 3, "activations_bytes": None}
MEMORY |= {"stages": {"2": 4}, "reason": "why"}
FACT: dict[str, Any] = {
    "communication": [
        {"steps": [2, 4], "bytes": {"pp": {"send": 5}}},
        {"steps": [4, 5], "bytes": {"ep": {"all_to_all": None}}},
    ],
    "memory": MEMORY,
}


def test_a_prediction_has_bytes_of_its_steps_and_of_no_other() -> None:
    prediction = read_prediction(FACT)
    sent, routed = {("pp", "send"): 5}, {("ep", "all_to_all"): None}
    assert [prediction.of_step(step) for step in (1, 2, 3, 4, 5)] == [None, sent, sent, routed, None]
    assert prediction.memory == MemoryParts(1, 2, 3, None, {2: 4}, "why")


@pytest.mark.parametrize(
    "damaged",
    [
        *(None, [], {"communication": []}, {**FACT, "communication": [{"steps": [2], "bytes": {}}]}),
        {**FACT, "communication": [{"steps": [2, 3], "bytes": {"pp": {"send": -1}}}]},
        {**FACT, "communication": [{"steps": [2, 3], "bytes": {"pp": {"send": True}}}]},
        {**FACT, "communication": [{"steps": [2, 3], "bytes": ["pp"]}]},
        {**FACT, "memory": {**MEMORY, "weights_bytes": None}},
        {**FACT, "memory": {**MEMORY, "stages": {"first": 1}}},
    ],
)
def test_a_damaged_prediction_is_none(damaged: object) -> None:
    assert read_prediction(damaged) is None


def test_ranks_have_their_own_predictions_of_the_plan_that_they_recorded() -> None:
    facts = {0: {PREDICTED: FACT, "model": MODEL}, 1: {"model": MODEL}, 2: {PREDICTED: {}}}
    predictions = predictions_of(facts, FOLLOWED)
    assert predictions.keys() == {0}
    assert isinstance(predictions[0], RankPrediction)
    assert all(predictions_of(facts, other) == {} for other in OTHERS)


def test_why_there_is_no_prediction_is_said_in_words() -> None:
    assert "not among the facts" in why_unpredicted({0: {}, 1: {"model": {"name": "other"}}}, FOLLOWED)
    assert "record the run anew" in why_unpredicted({0: {"model": MODEL}}, FOLLOWED)
    assert all("do not follow the plan" in why_unpredicted({0: {"model": MODEL}}, other) for other in OTHERS)


def test_sizes_are_those_of_the_first_rank_that_trains_our_model() -> None:
    sizes = GptSizes(8, 4, 2, 2, (1, 2), None)
    assert gpt_of_run([{}, {"model": {"name": "other"}}, {"model": MODEL}], FOLLOWED) == sizes
    assert all(gpt_of_run([{"model": MODEL}], other) is None for other in OTHERS)
    of_one_stage = {**MODEL, "layers_per_stage": [3]}  # and the plan has two
    assert gpt_of_run([{"model": of_one_stage}], FOLLOWED) is None
    assert read_gpt_sizes({**MODEL, "shortest_sequence": 2}) == replace(sizes, varies=True)
    assert read_gpt_sizes({**MODEL, **EXPERTS}) == replace(sizes, experts=ExpertSizes("padded", 32))
    assert read_gpt_sizes({**MODEL, **EXPERTS, "experts_width": 6}) == replace(sizes, experts=ExpertSizes("padded", 6))


@pytest.mark.parametrize("name", ["hidden", "sequence", "microbatch_size"])
def test_every_size_is_a_positive_integer(name: str) -> None:
    for wrong in (0, -1, 1.5, True, "4", None):
        assert read_gpt_sizes({**MODEL, name: wrong}) is None


@pytest.mark.parametrize(
    "changes",
    [
        *({"name": "other"}, {"dtype": "int8"}, {"layers_per_stage": 4}, {"layers_per_stage": [None]}),
        *({**EXPERTS, "experts_dispatcher": None}, {**EXPERTS, "experts_width": 0}),
    ],
)
def test_a_model_whose_facts_make_no_sense_has_no_sizes(changes: dict[str, object]) -> None:
    assert read_gpt_sizes({**MODEL, **changes}) is None
    assert read_gpt_sizes(None) is None
