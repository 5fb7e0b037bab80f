"""Estimates against published numbers of models, closed forms, a log of Megatron-LM and the runtime's own predictions."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from instrument.mesh import MeshShape
from pptrace.errors import UsageError
from pptrace.schedule.registry import build
from pptrace.sizes.estimate import Estimate, ParameterBytes
from pptrace.sizes.expert_options import ExpertOptions
from pptrace.sizes.form import Family, LayerNumbers, ModelForm
from pptrace.sizes.gpt_facts import GptFacts
from pptrace.sizes.memory import MemoryPrediction
from pptrace.sizes.mesh import MeshSizes
from pptrace.sizes.step import StepVolume
from pptrace.sizes.transformer import Calls
from tests.support.gpt_runs import facts

MIB = 2**20
MIXED = ParameterBytes.of_adam(2)
GPT2 = facts(
    hidden=768,
    heads=12,
    kv_heads=12,
    sequence=1024,
    vocabulary=50257,
    dtype="bfloat16",
    tied=True,
    layers_per_stage=(12,),
)
LLAMA3 = replace(
    GPT2, hidden=4096, heads=32, kv_heads=8, vocabulary=128256, tied=False, form=ModelForm(Family.LLAMA, 14336)
)
# 24 layers, h 1024, 16 heads, s 2048, b 2, V 50257 padded to 50304, fp16, dropout 0.1, p 4, m 8: a log of Megatron-LM
LOGGED = facts(
    hidden=1024,
    heads=16,
    kv_heads=16,
    sequence=2048,
    microbatch_size=2,
    vocabulary=50304,
    dtype="bfloat16",
    tied=True,
    layers_per_stage=(6,) * 4,
    dropout=0.1,
)


def estimated(
    model: GptFacts, mesh: MeshSizes, schedule: str = "1f1b", microbatches: int = 8, each: ParameterBytes = MIXED
) -> Estimate:
    chunks = len(model.layers_per_stage) // mesh.pp
    return Estimate(model, mesh, build(schedule, mesh.pp, microbatches, chunks), each)


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (GPT2, 124_439_808),
        (replace(LLAMA3, layers_per_stage=(32,)), 8_030_261_248),
        (
            replace(LLAMA3, layers_per_stage=(32,), vocabulary=32000, experts=ExpertOptions(8, width=14336)),
            46_702_792_704,
        ),
    ],
    ids=["GPT-2", "Llama 3 8B", "Mixtral 8x7B"],
)
def test_parameters_of_models_are_the_published_numbers(model: GptFacts, published: int) -> None:
    assert estimated(model, MeshSizes(1)).num_parameters == published


def test_parameters_and_peaks_of_the_ranks_are_those_of_megatrons_log() -> None:
    """Ranks of the log have 20 B of a parameter between steps: gradients of 16 bits, and copies of 32 bits of them."""
    ranks = estimated(LOGGED, MeshSizes(4), each=ParameterBytes(2, 2, 16)).ranks
    assert [rank.num_parameters for rank in ranks] == [129_185_792, 75_577_344, 75_577_344, 127_090_688]
    assert [rank.in_flight for rank in ranks] == [4, 3, 2, 1]
    allocated, peaks = (2468.03, 1461.53, 1461.53, 2460.32), (5587.00, 3894.87, 3028.99, 4044.67)
    for rank, between, peak in zip(ranks, allocated, peaks, strict=True):
        assert 0.98 < rank.state_bytes / MIB / between < 1
        assert rank.total_bytes / MIB == pytest.approx(peak, rel=0.03)
    usual = estimated(LOGGED, MeshSizes(4)).ranks
    errors = [rank.total_bytes / MIB / peak - 1 for rank, peak in zip(usual, peaks, strict=True)]
    assert errors == pytest.approx([-0.015, -0.037, -0.032, -0.060], abs=5e-4)


def test_megatrons_footprint_is_the_fullest_rank_without_positions_and_biases() -> None:
    rank = estimated(LOGGED, MeshSizes(4)).ranks[0]
    biases, positions, share_of_last_norm = 6 * 9 * 1024, 2048 * 1024, 2 * 1024 // 4
    numbers = rank.num_parameters - biases - positions + share_of_last_norm
    assert round(numbers / 1e9, 4) == 0.1270
    assert round(18 * numbers / MIB, 2) == 2180.68
    assert rank.state_bytes == 18 * rank.num_parameters


@pytest.mark.parametrize("mesh", [MeshSizes(4), MeshSizes(2, tp=2, cp=2, dp=3)])
def test_flops_of_all_ranks_are_those_of_the_papers(mesh: MeshSizes) -> None:
    layers, h, s, v, sequences = 24, 1024, 2048, 50304, 16 * mesh.dp
    model = replace(LOGGED, layers_per_stage=(layers // mesh.pp,) * mesh.pp)
    formula = 72 * sequences * s * layers * h**2 * (1 + Fraction(s, 6 * h) + Fraction(v, 12 * layers * h))
    for recompute, extra in (("none", 0), ("selective", 4 * s**2 * h), ("full", 24 * s * h**2 + 4 * s**2 * h)):
        ranks = estimated(replace(model, recompute=recompute), mesh).ranks
        assert sum(rank.model_flops for rank in ranks) * mesh.of_stage == formula
        assert sum(rank.hardware_flops for rank in ranks) * mesh.of_stage == formula + sequences * layers * extra


def test_a_layer_that_stores_scores_keeps_what_the_paper_says() -> None:
    model = replace(LOGGED, form=ModelForm(scores_stored=True))
    one, s, b, h, a = 6, 2048, 2, 1024, 16

    def of_layers(recompute: str, tp: int = 1, sp: bool = False) -> int:
        sizes = replace(model, recompute=recompute, sequence_parallel=sp)
        rank = estimated(sizes, MeshSizes(4, tp=tp)).ranks[1]
        return rank.activations_bytes // rank.in_flight

    assert of_layers("none") == one * s * b * h * (34 + 5 * a * s // h)
    assert of_layers("none", 2) == one * s * b * h * (10 + 24 // 2 + 5 * a * s // h // 2)
    assert of_layers("none", 2, True) == one * s * b * h // 2 * (34 + 5 * a * s // h)
    assert of_layers("selective", 2, True) == one * s * b * h // 2 * 34
    assert of_layers("full") == one * s * b * h * 2


@pytest.mark.parametrize(("zero", "of_replicas"), [(0, 0), (1, 12), (2, 16), (3, 18)])
def test_zero_shares_what_its_paper_says(zero: int, of_replicas: int) -> None:
    """Figure 1 of arXiv 1910.02054: (2 + 4 + 12) bytes, of which replicas share 0, 12, 16 or all."""
    numbers, replicas = LayerNumbers(1200, 100), 4
    model = replace(facts(layers_per_stage=(1,), form=ModelForm(numbers=numbers)), zero=zero)
    (rank,) = estimated(model, MeshSizes(1, dp=replicas)).ranks
    assert rank.state_bytes == 1200 * (18 - of_replicas) + 1200 * of_replicas // replicas


@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 2), ("interleaved-1f1b", 4), ("zb-h1", 2), ("dualpipe-v", 4)]
)
@pytest.mark.parametrize("zero", [0, 1])
def test_the_runtimes_own_prediction_is_the_same(schedule: str, stages: int, zero: int) -> None:
    shape = MeshShape(2, dp=2, tp=2)
    run = facts(
        dtype="bfloat16",
        layers_per_stage=(4 // stages,) * stages,
        zero=zero,
        tied=True,
        sequence_parallel=True,
        attention_kernel="flash",
    )
    estimate = estimated(run, MeshSizes(2, dp=2, tp=2), schedule)
    of_run = StepVolume(run, shape, build(schedule, 2, 8, stages // 2))
    for rank in range(shape.world):
        own, parts = estimate.ranks[of_run.pp_rank(rank)], MemoryPrediction(of_run, on_device=True).of_rank(rank)
        assert (own.weights_bytes, own.gradients_bytes) == (parts.weights, parts.gradients)
        assert own.activations_bytes == parts.activations
        assert own.optimizer_bytes == pytest.approx(parts.optimizer, abs=100)  # ZeRO-1 pads buckets, not parameters
        assert own.volume == of_run.of_rank(rank, 1)


@pytest.mark.parametrize(("dtype", "number"), [("float32", 4), ("float64", 8)])
def test_with_zero_1_the_runtime_has_a_copy_of_its_part_of_wide_parameters(dtype: str, number: int) -> None:
    """Of replicas that share 8 or 16 bytes of a parameter, each has 12 or 24 of its part; buckets are padded, or parameters."""
    replicas, pp = 3, 2
    run = facts(dtype=dtype, layers_per_stage=(2, 2), zero=1)
    plan, mesh = build("1f1b", pp, 8), MeshSizes(pp, dp=replicas)
    usual, as_runtime = (
        Estimate(run, mesh, plan, each)
        for each in (ParameterBytes.of_adam(number), ParameterBytes(number, number, 3 * number))
    )
    prediction = MemoryPrediction(StepVolume(run, MeshShape(pp, dp=replicas), plan), on_device=True)
    for rank in range(pp):
        of_run, gradients = prediction.of_rank(rank * replicas), usual.volume.gradients_of(usual.first_rank(rank))
        assert usual.ranks[rank].optimizer_bytes * 3 == as_runtime.ranks[rank].optimizer_bytes * 2
        most = 3 * number * len(list(gradients.parameters()))
        assert 0 <= as_runtime.ranks[rank].optimizer_bytes - of_run.optimizer + 3 * number <= most


def test_experts_get_as_many_tokens_each() -> None:
    model = replace(LLAMA3, layers_per_stage=(2, 2), vocabulary=32000, experts=ExpertOptions(8, 2, width=14336))
    rank = estimated(model, MeshSizes(2, dp=4, ep=4)).ranks[1]
    rows = 2 * 1024 * 2 * 4096 * 2  # tokens of a microbatch · routes of a token · hidden · bytes
    counts = 8 * 2 * 8 * 8  # microbatches · layers · experts · bytes
    assert rank.volume["ep", "all_to_all"].bytes - counts == 8 * 2 * 4 * rows  # there and back, forward and backward
    attention, experts = 2 * 4096**2 + 2 * 4096 * 1024, 2 * 3 * 4096 * 14336
    assert rank.num_parameters == 2 * (attention + experts + (8 + 2) * 4096) + (1 + 32000) * 4096


def test_layers_known_by_numbers_take_them_as_they_are() -> None:
    numbers = LayerNumbers(
        parameters=1000, activations=4096, embedding_parameters=500, head_parameters=300, head_activations=800
    )
    model = facts(
        hidden=8,
        sequence=16,
        microbatch_size=2,
        dtype="bfloat16",
        layers_per_stage=(3, 3),
        form=ModelForm(numbers=numbers),
    )
    first, last = estimated(model, MeshSizes(2, tp=2)).ranks
    assert (first.num_parameters, last.num_parameters) == (3 * 500 + 250, 3 * 500 + 150)
    assert (first.activations_bytes, last.activations_bytes) == (2 * 3 * 4096, 3 * 4096 + 800)
    assert last.model_flops == 8 * 2 * 3 * 2 * 16 * (3 * 1000 + 300) // 2
    assert first.volume["pp", "send"].bytes == 8 * 2 * 16 * 8 * 2


def test_experts_that_the_ranks_of_a_stage_do_not_share_are_refused() -> None:
    with pytest.raises(UsageError, match=r"ep 3 does not divide the 4 ranks of a stage"):
        MeshSizes(2, dp=4, ep=3)


def test_bytes_on_the_wire_are_those_of_rings() -> None:
    """An all-reduce moves 2 (n − 1) / n of its bytes, gathers and scatters (n − 1) / n, a message all of its own."""
    made = estimated(LOGGED, MeshSizes(4, tp=2, dp=8))
    for axis, kind, part in (
        ("tp", "all_reduce", Fraction(2, 2)),
        ("dp", "all_reduce", Fraction(14, 8)),
        ("dp", "reduce_scatter", Fraction(7, 8)),
        ("pp", "send", Fraction(1)),
    ):
        calls = Calls(3, 1600)
        assert made.wire_bytes(axis, kind, calls) == part * 1600, (axis, kind)
