"""Estimates against published numbers of models, closed forms, a log of Megatron-LM and the runtime's own predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from instrument.mesh import MeshShape
from pptrace.api.estimate import estimate
from pptrace.api.model_file import model_of
from pptrace.errors import UsageError
from pptrace.schedule.registry import build
from pptrace.sizes.activations import ActivationSizes
from pptrace.sizes.estimate import Estimate, ParameterBytes
from pptrace.sizes.expert_options import ExpertOptions
from pptrace.sizes.form import LayerNumbers, ModelForm, Window
from pptrace.sizes.gpt_facts import GptFacts
from pptrace.sizes.memory import MemoryPrediction
from pptrace.sizes.mesh import MeshSizes
from pptrace.sizes.step import StepVolume
from pptrace.sizes.transformer import Calls
from tests.support.gpt_runs import facts
from tests.support.public_models import PUBLIC, config_file

MIB = 2**20
OF_LLAMA = model_of("llama").form(1)
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
    GPT2, hidden=4096, heads=32, kv_heads=8, vocabulary=128256, tied=False, form=replace(OF_LLAMA, width=14336)
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


def of_config(config: Mapping[str, Any], folder: Path, **options: Any) -> Estimate:
    return estimate("1f1b", model=config_file(folder, config), microbatches=1, **{"sequence": 1024} | options).estimate


def estimated(
    model: GptFacts, mesh: MeshSizes, schedule: str = "1f1b", microbatches: int = 8, each: ParameterBytes = MIXED
) -> Estimate:
    chunks = len(model.layers_per_stage) // mesh.pp
    return Estimate(model, mesh, build(schedule, mesh.pp, microbatches, chunks), each)


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_of_models_are_the_published_numbers(name: str, tmp_path: Path) -> None:
    config, parameters, active = PUBLIC[name]
    estimate = of_config(config, tmp_path)
    assert estimate.num_parameters == parameters
    assert estimate.num_active_parameters == (pytest.approx(active * 1e9, rel=0.004) if active else parameters)
    stages = of_config(config, tmp_path, pp=3)
    ends = [rank.num_parameters for rank in stages.ranks]
    tied = 0 if not estimate.facts.tied else estimate.facts.vocabulary * estimate.facts.hidden
    assert sum(ends) == parameters + tied


def test_flops_of_a_token_are_those_of_what_it_is_multiplied_with_and_of_the_scores_that_a_layer_has(
    tmp_path: Path,
) -> None:
    """6 FLOPs of each active parameter but embeddings, norms, biases and sinks, and of each score 6 · (key + value) a head."""
    s = 16384

    def of_token(name: str, unmultiplied: int, of_scores: int) -> None:
        estimate = of_config(PUBLIC[name].config, tmp_path, sequence=s)
        (rank,) = estimate.ranks
        assert rank.model_flops == s * 6 * (estimate.num_active_parameters - unmultiplied) + 6 * of_scores

    of_token("Llama 3 8B", 128256 * 4096 + 65 * 4096, 32 * 32 * s**2 * 256)
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    of_token("DeepSeek-V3", 129280 * 7168 + norms, 61 * 128 * s**2 * (192 + 128))
    attention, experts = (64 + 2 * 8) * 64 + 2880 + 64, 32 + 4 * (2 * 2880 + 2880)
    windows = 12 * (s**2 + 2 * s * 128 - 128**2)
    of_token("gpt-oss-20b", 201088 * 2880 + 24 * (2 * 2880 + attention + experts) + 2880, windows * 64 * 128)
    chunks = 36 * s * 8192 + 12 * s**2
    of_token("Llama 4 Scout", 202048 * 5120 + 97 * 5120, chunks * 40 * 256)
    pattern = 52 * (2 * s * 1024 - 1024**2) + 10 * s**2
    sliding = {**PUBLIC["Gemma 3 27B"].config["text_config"], "sliding_window": 1024}
    of_gemma = of_config(sliding, tmp_path, sequence=s).ranks[0].model_flops
    of_all = of_config(PUBLIC["Gemma 3 27B"].config, tmp_path, sequence=s).ranks[0].model_flops
    assert of_all - of_gemma == 6 * 32 * 256 * (62 * s**2 - pattern)


def test_a_stage_has_the_layers_that_the_pattern_says(tmp_path: Path) -> None:
    attention = 187_107_328 + 2 * 7168  # as DeepSeek-V3's layers have it, and two norms
    dense, of_experts = 3 * 7168 * 18432, 256 * 7168 + 257 * 3 * 7168 * 2048
    ranks = of_config(PUBLIC["DeepSeek-V3"].config, tmp_path, pp=2, layers=6).ranks
    assert ranks[0].num_parameters - 129280 * 7168 == 3 * (attention + dense)
    assert ranks[1].num_parameters - 129281 * 7168 == 3 * (attention + of_experts)
    maverick = of_config(PUBLIC["Llama 4 Maverick"].config, tmp_path).facts
    assert [bool(maverick.experts_of(layer)) for layer in range(4)] == [False, True, False, True]
    for name, fields, layers in (
        ("Qwen3 30B-A3B", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1, 5, 7]),
        ("DeepSeek-V3", {"moe_layer_freq": [0, 0, 0, 1, 0, *[1] * 56]}, [3, 5, 6, 7]),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, [4, 6]),
        ("DeepSeek-V3", {"moe_layers": [2, 5]}, [5]),
    ):
        facts = of_config({**PUBLIC[name].config, **fields}, tmp_path).facts
        assert [layer for layer in range(8) if facts.experts_of(layer)] == layers, (name, fields)


def test_a_layer_sees_what_its_file_says(tmp_path: Path) -> None:
    def windows(name: str, **fields: Any) -> list[int]:
        config = PUBLIC[name].config
        seen = of_config({**config.get("text_config", config), **fields}, tmp_path, layers=4).facts.form.windows
        return [0 if window is None else window.size for window in seen]

    assert windows("Mistral 7B") == [4096] * 4
    assert windows("Mistral 7B", sliding_window=None) == windows("Qwen2.5 7B") == []
    assert windows("Qwen2.5 7B", use_sliding_window=True, max_window_layers=3, sliding_window=9) == [0, 0, 0, 9]
    assert windows("Gemma 2 9B") == [4096, 0, 4096, 0]
    assert windows("Llama 4 Scout") == [8192, 8192, 8192, 0]
    assert windows("Llama 4 Scout", no_rope_layers=[0, 1, 1, 1]) == [0, 8192, 8192, 8192]
    assert Window(4, is_chunk=True).num_scores(10) == 4**2 + 4**2 + 2**2
    assert Window(4).num_scores(10) == 10**2 - 6**2


@pytest.mark.parametrize("is_normed", [True, False])
def test_biases_and_norms_are_those_of_the_fields(is_normed: bool, tmp_path: Path) -> None:
    """Biases of q, k and v alone, and weights of each head's norm, as GLM-4.5 has them; or a bias everywhere."""
    h, heads, kv, width, v = 5120, 96, 8, 128, 151552
    moe = {"n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1536}
    config = {
        **{**PUBLIC["Llama 3 8B"].config, "model_type": "glm4_moe", "head_dim": width, "first_k_dense_replace": 3},
        **{"num_hidden_layers": 92, "hidden_size": h, "intermediate_size": 12288, "vocab_size": v, **moe},
        **{"num_attention_heads": heads, "num_key_value_heads": kv, "attention_bias": True, "use_qk_norm": is_normed},
    }
    attention = (2 * heads + 2 * kv) * width * h + (heads + 2 * kv) * width + 2 * width * is_normed + 2 * h
    experts = 160 * h + 161 * 3 * h * 1536
    glm = of_config(config, tmp_path)
    assert glm.num_parameters == 92 * attention + 3 * 3 * h * 12288 + 89 * experts + (2 * v + 1) * h
    no_field = {"norms": "before", "has_positions": True}
    assert of_config({**PUBLIC["Gemma 2 9B"].config, **no_field}, tmp_path).num_parameters == 9_241_705_984
    llama = {**PUBLIC["Llama 3 8B"].config, "attention_bias": True, "mlp_bias": True}
    biases = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert of_config(llama, tmp_path).num_parameters == 8_030_261_248 + biases


def test_latent_attention_sends_what_its_heads_read_and_its_projections_have_inputs_and_gradients(
    tmp_path: Path,
) -> None:
    s, h, rank, kv = 1024, 7168, 1536, 512 + 64
    mesh = {"sequence": s, "layers": 2, "tp": 2, "pp": 2, "sequence_parallel": True}
    of_two = of_config(PUBLIC["DeepSeek-V3"].config, tmp_path, **mesh)
    gathered = of_two.volume.forward(0)["tp", "all_gather"]
    assert (gathered.count, gathered.bytes) == (3, 2 * s * (rank + kv + h))
    plain = of_config(PUBLIC["DeepSeek-V3"].config, tmp_path, **mesh | {"sequence_parallel": False})
    assert plain.volume.backward(0, False)["tp", "all_reduce"].bytes == 2 * s * (rank + kv + h)
    ring = of_config(PUBLIC["DeepSeek-V3"].config, tmp_path, sequence=s, layers=2, cp=2)
    assert ring.volume.forward(0)["cp", "send"].bytes == 2 * 2 * s // 2 * 128 * (192 + 128)
    attention = 3 * h - h + 2 * (rank + kv) - 64 + 128 * (192 + 256 + 128)  # each input and each output once
    work = ActivationSizes(ring.facts, 1, 1, True).weight_work([None], False, False)
    assert work == 2 * s * (attention + 2 * h + 3 * 18432)
    of_rank = h // 2 + (rank + kv) // 2 + rank + 512 + 64 * (192 + 256 + 128) + h + h // 2  # of down-projections shards
    assert ActivationSizes(of_two.facts, 2, 1, True).weight_work([None], False, False) == 2 * s * (
        of_rank + h + 3 * 18432 // 2 + h + h // 2
    )
    exchanged = of_config(
        PUBLIC["DeepSeek-V3"].config, tmp_path, sequence=s, layers=2, cp=2, ulysses=2, recompute="selective"
    )
    made = 2 * s // 2 * 128 * (192 + 192 + 128)
    calls = exchanged.volume.backward(0, False)["cp", "all_to_all"]
    assert calls.bytes == 2 * (made + made + 2 * s // 2 * 128 * 128), "q, k and v again, and the gradients of all four"
    one = {**PUBLIC["DeepSeek-V3"].config, "num_key_value_heads": 1}
    assert of_config(one, tmp_path, sequence=s, layers=2).layer_bytes(0, "none") == ring.layer_bytes(0, "none") * 2


def test_weights_of_norms_of_heads_are_summed_over_tp_and_w_reads_three_tensors_of_a_gated_shared_mlp(
    tmp_path: Path,
) -> None:
    qwen = of_config(PUBLIC["Qwen3 8B"].config, tmp_path, layers=2, tp=2)
    summed = [each for each in qwen.volume.gradients_of(0).parameters() if each.summed]
    assert [(each.shape, each.summed) for each in summed] == [((128,), 128)] * 4
    work = []
    for number in (1, 2):
        config = {**PUBLIC["DeepSeek-V3"].config, "n_shared_experts": number}
        experts = of_config(config, tmp_path, sequence=64, layers=4).volume.experts
        work.append(experts.weight_work(0, 3))
    assert work[1] - work[0] == 64 * 3 * 2048 * 2


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
