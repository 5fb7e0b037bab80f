"""The papers' FLOP formula counts what torch's own counter sees of our model."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from instrument.examples.progress import Work
from instrument.models.flops import StepFlops, count_full, step_flops
from instrument.models.gpt import GptConfig, GptStage, Recompute, cross_entropy
from instrument.models.peaks import Peak
from instrument.pipeline.partition import partition
from instrument.pipeline.split import attach
from pptrace.errors import UsageError
from pptrace.schedule.registry import build

LAYERS, HIDDEN, SEQUENCE, BATCH = 3, 8, 20, 2
LAST_OF_LAYER = 8 * BATCH * SEQUENCE * HIDDEN**2
LAST_OF_ATTENTION = 2 * BATCH * SEQUENCE**2 * HIDDEN


def config(recompute: Recompute) -> GptConfig:
    return GptConfig(LAYERS, HIDDEN, 2, SEQUENCE, recompute=recompute)


def counted(recompute: Recompute, splits: bool, told: bool = False) -> int:
    """FLOPs of a forward and backward by torch, which counts an attention made of matrix products."""
    model = GptStage(config(recompute), range(LAYERS))
    if splits:
        attach(model)
    tokens = torch.randint(256, (BATCH, SEQUENCE))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        cross_entropy(model(tokens, recompute=told), tokens).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("splits", [False, True])
def test_model_flops_are_the_matrix_products_of_forward_and_backward(splits: bool) -> None:
    flops = step_flops(config(Recompute.NONE), BATCH)
    assert flops.model == flops.hardware == counted(Recompute.NONE, splits)


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


@pytest.mark.parametrize("told", [False, True])
def test_full_recompute_runs_what_is_counted_but_for_the_last_product_where_the_backward_is_whole(told: bool) -> None:
    recompute = Recompute.NONE if told else Recompute.FULL
    flops = step_flops(config(recompute), BATCH, LAYERS * BATCH if told else 0)
    assert flops.hardware == counted(recompute, splits=True, told=told)
    assert flops.hardware - LAYERS * LAST_OF_LAYER == counted(recompute, splits=False, told=told)


def test_selective_recompute_runs_the_attention_again_but_for_its_last_product() -> None:
    flops = step_flops(config(Recompute.SELECTIVE), BATCH)
    assert flops.hardware == flops.model + LAYERS * 4 * BATCH * SEQUENCE**2 * HIDDEN
    assert flops.hardware - LAYERS * LAST_OF_ATTENTION == counted(Recompute.SELECTIVE, splits=False)


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


def test_more_full_recomputes_than_there_are_layers_is_one_line() -> None:
    with pytest.raises(UsageError, match="7 full recomputes of 6 passes through a layer"):
        step_flops(config(Recompute.NONE), BATCH, 7)


def test_utilisation_is_over_all_ranks_and_names_hardware_only_where_it_differs() -> None:
    peak = Peak(100e12, "the table")
    plain = Work(1000, StepFlops(40 * 10**12, 40 * 10**12).times(2), world=4, peak=peak)
    assert plain.rates(0.5) == "     2,000 tokens/s   160.0 TFLOP/s   MFU 40.0 %"
    again = Work(1000, StepFlops(40 * 10**12, 50 * 10**12).times(2), world=4, peak=peak)
    assert again.rates(0.5).endswith("MFU 40.0 %   HFU 50.0 %")
    assert plain.heading() == "MFU: of 100.0 TFLOP/s per rank (the table)"
    unknown = Work(1000, StepFlops(4 * 10**9, 4 * 10**9), world=1, peak=None)
    assert unknown.rates(2.0).endswith("2.00 GFLOP/s   MFU –")
    assert "--peak-tflops" in unknown.heading()
