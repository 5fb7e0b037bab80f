"""Predicted memory in closed forms, and against what real ranks hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instrument.mesh import MeshShape
from instrument.models.gpt_config import Recompute
from instrument.optim.main_parameters import Zero
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.sizes.expert_options import Dispatcher, ExpertOptions
from pptrace.sizes.gpt_facts import GptFacts
from pptrace.sizes.memory import MemoryPrediction, PredictedParts
from pptrace.sizes.step import StepVolume
from tests.instrument.pipeline.cases.memory import predict
from tests.instrument.pipeline.cases.training import MICROBATCH_SIZE, Case
from tests.sizes.held_replicas import Held, Sharded, hold
from tests.support.extent import by_turns
from tests.support.gpt_runs import facts, facts_of_model
from tests.support.pool import Pool

HIDDEN, SEQUENCE, VOCABULARY = 32, 16, 256
LAYER = 12 * HIDDEN**2 + 13 * HIDDEN
"""Parameters of a layer with biases: qkv, attention output, two linear layers of the MLP, two norms."""
ENDS = 2 * VOCABULARY * HIDDEN + SEQUENCE * HIDDEN + 2 * HIDDEN


def parts(
    facts: GptFacts, mesh: MeshShape, schedule: str = "1f1b", microbatches: int = 4, rank: int = 0, chunks: int = 1
) -> PredictedParts:
    volume = StepVolume(facts, mesh, build(schedule, mesh.pp, microbatches, chunks))
    return MemoryPrediction(volume, on_device=False).of_rank(rank)


def test_parameters_gradients_and_moments_are_those_of_the_closed_form() -> None:
    numbers = 4 * LAYER + ENDS
    whole = parts(facts(), MeshShape(1))
    assert (whole.weights, whole.gradients, whole.optimizer) == (4 * numbers, 4 * numbers, 8 * numbers)
    mixed = parts(facts(dtype="bfloat16"), MeshShape(1))
    assert (mixed.weights, mixed.gradients, mixed.optimizer) == (2 * numbers, 4 * numbers, 12 * numbers)
    tied = parts(facts(tied=True), MeshShape(1))
    assert whole.weights - tied.weights == 4 * VOCABULARY * HIDDEN


def test_stages_that_sleep_keep_what_they_do_without() -> None:
    experts = ExpertOptions(4, dispatcher=Dispatcher.PADDED, capacity_factor=1.0, overlap=True)
    in_pairs = MeshShape(2, dp=2, ep=2)
    for run, on, schedule in (
        (facts(), MeshShape(1), "1f1b"),
        (facts(layers_per_stage=(2, 2)), MeshShape(2), "zb-h1"),
        (facts(layers_per_stage=(1, 1, 1, 1), experts=experts), in_pairs, "dualpipe-v"),
    ):
        chunks = len(run.layers_per_stage) // on.pp
        awake, asleep = (
            parts(replace(run, sleeps=sleeps), on, schedule, chunks=chunks).activations for sleeps in (False, True)
        )
        is_in_pieces = run.experts is not None  # whose halves run in turn where stages sleep
        assert 0 < asleep < awake if is_in_pieces else 0 < asleep == awake


def test_zero_shards_the_optimizer_over_the_replicas() -> None:
    """ZeRO, arXiv 1910.02054, figure 1: K = 12 with main parameters, divided by the replicas."""
    numbers = 4 * LAYER + ENDS
    replicas = MeshShape(1, dp=2)
    sharded = parts(facts(dtype="bfloat16", zero=1), replicas)
    assert (sharded.weights, sharded.optimizer) == (2 * numbers, 12 * numbers // 2)
    fully = parts(facts(dtype="bfloat16", zero=3), replicas)
    assert (fully.weights, fully.optimizer) == (4 * numbers // 2, 8 * numbers // 2)


@pytest.mark.parametrize(("recompute", "keep"), by_turns([Recompute.NONE, Recompute.FULL], [1, None]))
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zbv", "dualpipe-v", "dualpipe"])
def test_activations_along_a_plan_that_splits_backwards_are_those_that_stages_keep(
    schedule: str, recompute: Recompute, keep: int | None
) -> None:
    """The stages of a real model keep that after their forwards, and after their I."""
    case = Case(schedule, 2, 6, chunks=SCHEDULES[schedule].default_chunks, recompute=recompute, keep=keep)
    stages = tuple(map(len, case.cut))
    run = facts_of_model(case.config, MICROBATCH_SIZE, layers_per_stage=stages, recompute_microbatches_beyond=keep)
    for rank in range(2):
        memory = MemoryPrediction(StepVolume(run, MeshShape(pp=2), case.plan), on_device=False).of_rank(rank)
        assert memory.activations == predict(case, rank)


def test_what_is_not_known_is_not_predicted() -> None:
    two, halves = MeshShape(2), facts(layers_per_stage=(2, 2))
    assert parts(halves, two).activations is not None
    assert parts(replace(halves, attention_kernel="flash"), two).activations is not None
    for changes, word in (
        ({"attention_kernel": "math"}, "fused kernel"),
        ({"experts": ExpertOptions(4, jitter=0.1)}, "noise"),
    ):
        run = replace(halves, **changes)
        assert parts(run, two).activations is None
        assert parts(run, two).activations_of_stage == {}
        assert word in (MemoryPrediction(StepVolume(run, two, build("1f1b", 2, 4)), on_device=False).reason or "")


CASES = [
    Sharded(zero, dtype)
    for zero in (Zero.NONE, Zero.OPTIMIZER, Zero.GRADIENTS, Zero.PARAMETERS)
    for dtype in ("float32", "bfloat16")
] + [Sharded(zero, "bfloat16", ExpertOptions(4, width=6), ep) for zero in (Zero.NONE, Zero.OPTIMIZER) for ep in (1, 2)]


def test_two_replicas_hold_the_parameters_and_moments_that_are_predicted(pool: Pool) -> None:
    replicas = MeshShape(1, dp=2)
    for rank, held in enumerate(pool.run(hold, CASES, world=2, timeout_s=120)):
        for case, measured in zip(CASES, held, strict=True):
            run = facts(layers_per_stage=(2,), zero=int(case.zero), dtype=case.dtype, experts=case.experts)
            predicted = parts(run, replace(replicas, ep=case.ep, etp=1), rank=rank)
            assert measured == Held(predicted.weights, predicted.optimizer), (case, rank)
