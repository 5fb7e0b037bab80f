"""The papers' FLOP formula counts what torch's own counter sees of our model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from instrument.backward_split.split import attach
from instrument.examples.progress import Work
from instrument.mesh import Mesh, fit_shape, make_mesh
from instrument.models.flops import StepFlops, count_full
from instrument.models.flops import step_flops as flops_of_facts
from instrument.models.gpt import GptStage, cross_entropy
from instrument.models.gpt_config import GptConfig, Recompute, RecomputeModule
from instrument.models.parallel import Parallel, ParallelOptions, make_parallel
from instrument.models.peaks import Peak
from instrument.pipeline.partition import partition
from instrument.recorder import Recorder
from instrument.sequence.dropout import MicrobatchKey
from pptrace.errors import UsageError
from pptrace.schedule.registry import build
from pptrace.sizes.expert_options import ExpertOptions, Shared
from pptrace.sizes.flops import op_flops
from tests.instrument.models.cases.mixes import MICROBATCH_SIZE, Mix, facts_of
from tests.support.gpt_runs import facts_of_model
from tests.support.pool import Pool

LAYERS, HIDDEN, SEQUENCE, BATCH = 3, 8, 20, 2
LAST_OF_LAYER = 8 * BATCH * SEQUENCE * HIDDEN**2
LAST_OF_ATTENTION = 2 * BATCH * SEQUENCE**2 * HIDDEN


def config(recompute: Recompute) -> GptConfig:
    return GptConfig(LAYERS, HIDDEN, 2, SEQUENCE, recompute=recompute)


def step_flops(model: GptConfig, num_sequences: int, num_full: int = 0, tp: int = 1) -> StepFlops:
    facts = facts_of_model(model, 1, layers_per_stage=(model.layers,))
    return flops_of_facts(facts, num_sequences, num_full, tp)


def counted(config: GptConfig, splits: bool = False, is_recomputed: bool = False, **read: object) -> int:
    """FLOPs of a forward and backward by torch, which counts an attention made of matrix products."""
    model = GptStage(config, range(LAYERS))
    if splits:
        attach(model)
    tokens = torch.randint(config.vocabulary, (BATCH, SEQUENCE))
    source = torch.randint(config.vocabulary, (BATCH, config.source_length)) if config.encoder_layers else tokens
    read |= {"decoder_tokens": tokens} if config.encoder_layers else {}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(source, recompute=is_recomputed, **read)
        cross_entropy(logits, tokens, vocabulary=config.vocabulary).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE])
def test_flops_of_an_encoder_and_its_decoder_are_those_of_both_lengths(recompute: Recompute) -> None:
    model = replace(config(recompute), encoder_layers=1, encoder_sequence=12)
    flops = step_flops(model, BATCH)
    assert flops.model == counted(replace(model, recompute=Recompute.NONE))
    again = BATCH * 4 * HIDDEN * (12**2 + 2 * (SEQUENCE**2 + SEQUENCE * 12)) if recompute is Recompute.SELECTIVE else 0
    assert flops.hardware == flops.model + again
    mix = Mix(encoder=(1, 12), tied=False, recompute=recompute)
    facts = replace(facts_of(mix, 1), layers_per_stage=(1, 1))
    of_ops = [op_flops(facts, stage, 1, 1)[kind] for stage in range(2) for kind in "FB"]
    assert sum(sum(parts.values()) for parts in of_ops) == step_flops(mix.config, MICROBATCH_SIZE).hardware


def test_flops_of_packed_documents_are_those_of_so_many_sequences() -> None:
    documents = (3, 16, 1)
    each = [step_flops(replace(config(Recompute.NONE), sequence=length), BATCH).model for length in documents]
    assert sum(each) == counted(config(Recompute.NONE), microbatch_key=MicrobatchKey(documents=documents))


@pytest.mark.parametrize("splits", [False, True])
def test_model_flops_are_the_matrix_products_of_forward_and_backward(splits: bool) -> None:
    flops = step_flops(config(Recompute.NONE), BATCH)
    assert flops.model == flops.hardware == counted(config(Recompute.NONE), splits)


def test_model_flops_of_a_padded_vocabulary_are_those_of_all_rows() -> None:
    whole = replace(config(Recompute.NONE), vocabulary=300, vocabulary_multiple=16)
    assert counted(whole) == step_flops(whole, BATCH).model == step_flops(whole, BATCH, tp=1).hardware
    head = 3 * 2 * BATCH * SEQUENCE * HIDDEN
    assert step_flops(whole, BATCH, tp=3).model - step_flops(whole, BATCH).model == head * (336 - 304)


def test_model_flops_of_experts_are_their_matrix_products() -> None:
    """Beside the formula's, the sum of each token's experts is a product of their weights and outputs: 3 · 2·B·s·k·h."""
    for every, num_with_experts, shared in ((1, 3, Shared.ADDED), (2, 2, Shared.GATED), (2, 2, Shared.RESIDUAL)):
        experts = ExpertOptions(4, 2, every, width=12, shared_width=20, aux_loss=0.1, z_loss=0.1, shared=shared)
        experts = experts if every == 1 else replace(experts, num=6, pyramid=(4, 6))
        whole = GptConfig(LAYERS, HIDDEN, 2, SEQUENCE, experts=experts)
        summed = 3 * 2 * BATCH * SEQUENCE * 2 * HIDDEN * num_with_experts
        assert counted(whole) - summed == step_flops(whole, BATCH).model


def test_model_flops_are_the_papers_formula() -> None:
    s, h, layers, v = 2048, 1536, 24, 256
    paper = 72 * 8 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    for recompute in Recompute:
        assert step_flops(GptConfig(layers, h, 16, s, recompute=recompute), 8).model == pytest.approx(paper, rel=1e-12)


def test_full_recompute_is_a_third_more_of_the_layers_as_in_the_first_papers_equation() -> None:
    s, h, layers, v = 2048, 1536, 24, 256
    # Equation 3 has the head's 6·B·s·h·V as V/(16·l·h) of the 96.
    paper = 96 * 8 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    flops = step_flops(GptConfig(layers, h, 16, s, recompute=Recompute.FULL), 8)
    assert flops.hardware == pytest.approx(paper, rel=1e-12)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_full_recompute_runs_what_is_counted_but_for_the_last_product_where_the_backward_is_whole(
    is_recomputed: bool,
) -> None:
    recompute = Recompute.NONE if is_recomputed else Recompute.FULL
    flops = step_flops(config(recompute), BATCH, LAYERS * BATCH if is_recomputed else 0)
    assert flops.hardware == counted(config(recompute), splits=True, is_recomputed=is_recomputed)
    assert flops.hardware - LAYERS * LAST_OF_LAYER == counted(
        config(recompute), splits=False, is_recomputed=is_recomputed
    )


def test_selective_recompute_runs_the_attention_again_but_for_its_last_product() -> None:
    flops = step_flops(config(Recompute.SELECTIVE), BATCH)
    assert flops.hardware == flops.model + LAYERS * 4 * BATCH * SEQUENCE**2 * HIDDEN
    assert flops.hardware - LAYERS * LAST_OF_ATTENTION == counted(config(Recompute.SELECTIVE))


def test_selective_recompute_is_a_third_more_of_the_attention_where_the_paper_writes_twice_as_much() -> None:
    """Appendix A of arXiv 2205.05198 has s/(3h) for the s/(6h) of the attention: all of it again, where a third runs again."""
    s, h, layers, v = 2048, 1536, 24, 256
    paper = 72 * 8 * s * layers * h**2 * (1 + s / (3 * h) + v / (12 * layers * h))
    flops = step_flops(GptConfig(layers, h, 16, s, recompute=Recompute.SELECTIVE), 8)
    attention = 12 * 8 * s**2 * h * layers
    assert flops.hardware - flops.model == attention // 3
    assert paper - flops.model == pytest.approx(attention, rel=1e-9)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_have_a_smaller_projection(kv_heads: int) -> None:
    model = GptConfig(LAYERS, HIDDEN, 4, SEQUENCE, kv_heads=kv_heads)
    assert step_flops(model, BATCH).model == counted(model)


def shares_of(sizes: dict[str, int], options: ParallelOptions) -> dict[Recompute, int]:
    """FLOPs of this rank's forward and backward by torch, with an attention made of matrix products."""
    mesh = make_mesh(fit_shape(4, **sizes), "cpu", "gloo")
    parallel = make_parallel(mesh, options, Recorder())
    return {recompute: _share_of(mesh, parallel, recompute) for recompute in (Recompute.NONE, Recompute.FULL)}


def _share_of(mesh: Mesh, parallel: Parallel, recompute: Recompute) -> int:
    model = GptConfig(LAYERS, HIDDEN, 4, SEQUENCE, recompute=recompute, kv_heads=2)
    stage = GptStage(model, range(LAYERS), parallel)
    attach(stage)  # so that a recomputed layer runs whole
    tokens = torch.randint(256, (BATCH, SEQUENCE // mesh.shape.cp))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        cross_entropy(stage(tokens), tokens, parallel.region.group).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"pp": 1, "tp": 2}, ParallelOptions()),
        ({"pp": 1, "tp": 2, "cp": 2}, ParallelOptions(sequence=True, overlap=True, ulysses=2)),
    ],
)
def test_the_ranks_of_a_mesh_share_out_the_flops_of_a_step(
    pool: Pool, sizes: dict[str, int], options: ParallelOptions
) -> None:
    by_rank = pool.run(shares_of, sizes, options, timeout_s=300)
    shape = fit_shape(4, **sizes)
    for recompute in by_rank[0]:
        ranks = [shares[recompute] for shares in by_rank]
        model = GptConfig(LAYERS, HIDDEN, 4, SEQUENCE, recompute=recompute, kv_heads=2)
        # What all ranks do is what MFU divides by the time, the world and a rank's peak.
        assert sum(ranks) == step_flops(model, BATCH * shape.dp).hardware
        assert len(set(ranks)) == 1


def test_microbatches_beyond_those_that_are_kept_count_as_full() -> None:
    plan = build("1f1b", 2, 4)  # windows of 2 and 1: rank 0 recomputes every second, rank 1 none
    cut = partition(LAYERS, 2)
    assert count_full(plan, cut, BATCH, 1) == 2 * 2 * BATCH
    assert count_full(plan, cut, BATCH, 0) == 4 * LAYERS * BATCH
    assert count_full(plan, cut, BATCH, 2) == 0
    none = step_flops(config(Recompute.NONE), 4 * BATCH)
    half = step_flops(config(Recompute.SELECTIVE), 4 * BATCH, count_full(plan, cut, BATCH, 1))
    full = step_flops(config(Recompute.FULL), 4 * BATCH)
    assert none.hardware < half.hardware < full.hardware
    assert step_flops(config(Recompute.SELECTIVE), 4 * BATCH, count_full(plan, cut, BATCH, 0)) == full


def test_an_mlp_that_recomputes_runs_its_products_again_but_for_the_last() -> None:
    model = replace(config(Recompute.SELECTIVE), recompute_modules=(RecomputeModule.MLP,))
    flops, none = step_flops(model, BATCH), step_flops(config(Recompute.NONE), BATCH)
    assert flops.hardware - none.hardware == LAYERS * BATCH * 16 * SEQUENCE * HIDDEN**2
    assert counted(model) == flops.hardware - LAYERS * LAST_OF_LAYER
    of_some = replace(model, experts=ExpertOptions(4, 2, 2, width=12))  # in two of the three layers
    again = step_flops(of_some, BATCH).hardware - step_flops(of_some, BATCH).model
    assert again == BATCH * 16 * SEQUENCE * HIDDEN**2


def test_more_full_recomputes_than_there_are_layers_is_one_line() -> None:
    with pytest.raises(UsageError, match="7 full recomputes of 6 passes through a layer"):
        step_flops(config(Recompute.NONE), BATCH, 7)


def test_utilisation_is_over_all_ranks_and_names_hardware_only_where_it_differs() -> None:
    peak = Peak(100e12, "the table")
    plain = Work(1000, StepFlops(80 * 10**12, 80 * 10**12), world=4, peak=peak)
    assert plain.rates(0.5) == "     2,000 tokens/s   160.0 TFLOP/s   MFU 40.0 %"
    again = Work(1000, StepFlops(80 * 10**12, 100 * 10**12), world=4, peak=peak)
    assert again.rates(0.5).endswith("MFU 40.0 %   HFU 50.0 %")
    assert plain.heading() == "MFU: of 100.0 TFLOP/s per rank (the table)"
    unknown = Work(1000, StepFlops(4 * 10**9, 4 * 10**9), world=1, peak=None)
    assert unknown.rates(2.0).endswith("2.00 GFLOP/s   MFU –")
    assert "--peak-tflops" in unknown.heading()
