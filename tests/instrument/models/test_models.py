"""The model, its cut into stages, and its data."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from instrument.backward_split.split import attach
from instrument.data.text import TextData
from instrument.models.gpt import GptStage, cross_entropy, make_stages
from instrument.models.gpt_config import GptConfig
from instrument.models.sleeping import SleepingStage
from instrument.pipeline.partition import Layout, partition
from instrument.sequence.dropout import MicrobatchKey
from pptrace.errors import UsageError
from pptrace.sizes.gpt_facts import GptFacts, stage_parameters

CONFIG = GptConfig(layers=4, hidden=8, heads=2, sequence=6, dtype=torch.float64)


@pytest.mark.parametrize(
    ("layers", "stages", "split", "message"),
    [
        (3, 4, None, "4 stages need at least 4 layers and the model has 3"),
        (4, 2, (4,), "split 4 names 1 stages; the pipeline has 2"),
        (4, 2, (3, 2), "split 3,2 has 5 layers; expected 4 in all"),
        (4, 3, (2, 0, 2), "split 2,0,2 has 4 layers; expected 4 in all, and at least 1 in each stage but the first"),
        (4, 3, (-1, 4, 1), "split -1,4,1 has 4 layers; expected 4 in all, and at least 1 in each stage but the first"),
    ],
)
def test_a_cut_that_does_not_fit_is_one_line(
    layers: int, stages: int, split: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        partition(layers, stages, split)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("layout", "layers", "stages", "counts"),
    [
        (Layout(), 7, 3, (3, 2, 2)),
        (Layout(counts_embedding=True), 7, 4, (1, 2, 2, 2)),
        (Layout(counts_loss=True), 7, 4, (2, 2, 2, 1)),
        (Layout(counts_embedding=True, counts_loss=True), 6, 4, (1, 2, 2, 1)),
        (Layout(counts_embedding=True, counts_loss=True), 6, 1, (6,)),
        (Layout(first=1), 7, 4, (1, 2, 2, 2)),
        (Layout(first=1, last=2), 9, 4, (1, 3, 3, 2)),
        (Layout(first=3, last=1), 4, 2, (3, 1)),
        (Layout(last=1, counts_embedding=True), 6, 3, (2, 3, 1)),
        (Layout(split=(4, 1, 2)), 7, 3, (4, 1, 2)),
        (Layout(split=(0, 4, 3, 0)), 7, 4, (0, 4, 3, 0)),
        (Layout(counts_embedding=True, counts_loss=True), 2, 4, (0, 1, 1, 0)),
        (Layout(first=0), 4, 3, (0, 2, 2)),
    ],
)
def test_layouts_share_out_all_layers(layout: Layout, layers: int, stages: int, counts: tuple[int, ...]) -> None:
    assert layout.layers(layers, stages) == counts
    assert [len(part) for part in partition(layers, stages, layout.layers(layers, stages))] == list(counts)


def test_layouts_that_do_not_fit_are_one_line() -> None:
    with pytest.raises(UsageError, match="4 layers on 4 stages with 2 in the first rank leave 2 for 3 stages"):
        Layout(first=2).layers(4, 4)
    with pytest.raises(
        UsageError, match="5 layers on 2 stages with 3 in the first rank, 1 in the last rank leave 1 for 0 stages"
    ):
        Layout(first=3, last=1).layers(5, 2)
    with pytest.raises(UsageError, match="give the split alone"):
        Layout(split=(1, 2), counts_loss=True)
    with pytest.raises(UsageError, match="give one of the two"):
        Layout(first=1, counts_embedding=True)
    with pytest.raises(
        UsageError, match="rank 0 has 3 layers, which do not divide among its 2 stages; choose a multiple of 2"
    ):
        Layout(first=3).layers(8, 4, (0, 1, 0, 1))


def layers_in_megatron(
    layers: int, pp: int, vpp: int, first: int | None, last: int | None, embedding: bool, loss: bool
) -> tuple[int, ...]:
    """Layers of each stage by the rules of Megatron-LM's ``get_num_layers_to_build``: N on a rank, equally in all its chunks."""
    left = layers + embedding + loss - (first or 0) - (last or 0)
    middle = [rank for rank in range(pp) if not (rank == 0 and first) and not (rank == pp - 1 and last)]
    of_rank = {rank: left // len(middle) for rank in middle} | ({0: first} if first else {})
    of_rank |= {pp - 1: last} if last else {}
    stages = [of_rank[stage % pp] // vpp for stage in range(pp * vpp)]
    stages[0] -= embedding
    stages[-1] -= loss
    return tuple(stages)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "first", "last", "embedding", "loss"),
    [
        *((8, 2, 2, first, None, False, False) for first in (2, 4, 6)),
        *((16, 4, 2, first, last, False, False) for first, last in ((4, 4), (2, 6), (6, 2))),
        *((16, 4, vpp, 4, None, False, False) for vpp in (1, 2, 4)),
        *((14, 4, vpp, None, None, True, True) for vpp in (1, 2, 4)),
        *((7, 4, vpp, None, None, embedding, not embedding) for vpp in (1, 2) for embedding in (True, False)),
    ],
)
def test_megatrons_options_mean_what_they_mean_there(
    layers: int, pp: int, vpp: int, first: int | None, last: int | None, embedding: bool, loss: bool
) -> None:
    layout = Layout(None, embedding, loss, first, last)
    placement = [stage % pp for stage in range(pp * vpp)]
    expected = layers_in_megatron(layers, pp, vpp, first, last, embedding, loss)
    assert layout.layers(layers, pp * vpp, placement) == expected
    assert [len(part) for part in partition(layers, pp * vpp, expected)] == list(expected)


def test_parameters_of_gpt2_345m_are_those_that_megatron_prints() -> None:
    """A run of Megatron-LM: 24 layers, h = 1024, s = 2048, GPT-2's 50,257 tokens, tied, on four pipeline ranks."""
    config = GptConfig(24, 1024, 16, 2048, tied=True, vocabulary=50257, vocabulary_multiple=128)
    layer, embedding = 12 * 1024**2 + 13 * 1024, 50304 * 1024
    closed = (6 * layer + embedding + 2048 * 1024, 6 * layer, 6 * layer, 6 * layer + embedding + 2 * 1024)
    assert closed == (129_185_792, 75_577_344, 75_577_344, 127_090_688)
    facts = GptFacts(
        *(1024, 16, 16, 2048, 1, 50257, "float32", True, (6,) * 4, False, False, 1, "none", None, 0, 1, 0.0, "", 1),
        vocabulary_multiple=128,
    )
    assert tuple(sum(p.numel for p in stage_parameters(facts, stage, 1)) for stage in range(4)) == closed
    with torch.device("meta"):
        stages = make_stages(config, partition(24, 4), range(4))
    assert tuple(sum(p.numel() for p in stage.parameters()) for stage in stages.values()) == closed


@pytest.mark.parametrize(("tp", "rows"), [(1, 50304), (2, 50432), (3, 50304), (8, 51200)])
def test_a_vocabulary_is_padded_as_megatron_does(tp: int, rows: int) -> None:
    config = GptConfig(1, 8, 2, 4, vocabulary=50257, vocabulary_multiple=128)
    assert config.padded_vocabulary(tp) == rows
    assert rows % (128 * tp) == 0
    assert 0 <= rows - 50257 < 128 * tp


def test_rows_beyond_the_vocabulary_take_no_part_in_the_loss() -> None:
    padded = replace(CONFIG, vocabulary=300, vocabulary_multiple=128)
    exact = replace(padded, vocabulary_multiple=1)
    batch = TextData(1, 2, 6, seed=1).batch(0, 0)
    losses = []
    for config in (padded, exact):
        model = GptStage(config, range(4))
        loss = cross_entropy(model(batch.tokens[0]), batch.targets[0], vocabulary=300)
        loss.backward()
        losses.append(loss)
        gradient = model.head.projection.weight.grad
        assert not gradient[300:].any()
    assert torch.equal(*losses)


def test_a_sleeping_stage_sleeps_its_weight_part_when_the_weights_are_due() -> None:
    stage = SleepingStage(nn.Identity(), 0.0, 0.05, 0.04)
    queue = attach(stage)

    def backward() -> float:
        output = stage(torch.ones(1, requires_grad=True))
        started = time.perf_counter()
        output.backward()
        return time.perf_counter() - started

    assert backward() >= 0.05
    with queue.collecting() as work:
        assert 0.01 <= backward() < 0.04
    started = time.perf_counter()
    work[0].run()
    assert time.perf_counter() - started >= 0.04


class _Same(nn.Identity):
    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        return x


@pytest.mark.parametrize(("tokens", "documents"), [(2, None), (8, (2, 2, 2, 2))])
def test_a_sleeping_stage_sleeps_a_part_for_shorter_inputs(tokens: int, documents: tuple[int, ...] | None) -> None:
    """A quarter of the tokens, or documents with a quarter of the scores."""
    stage, x = SleepingStage(_Same(), 0.2, 0.4, length=8), torch.ones(1, tokens, 3, requires_grad=True)
    started = time.perf_counter()
    output = stage(x, microbatch_key=MicrobatchKey(documents=documents))
    forward = time.perf_counter()
    output.sum().backward()
    ended = time.perf_counter()
    assert 0.05 <= forward - started < 0.15
    assert 0.1 <= ended - forward < 0.3


def test_layers_differ_from_each_other_and_seeds_from_seeds() -> None:
    whole = GptStage(CONFIG, range(4))
    weights = [dict(whole.named_parameters())[f"blocks.{layer}.qkv.weight"] for layer in range(4)]
    assert not torch.equal(weights[0], weights[1])
    other = GptStage(GptConfig(4, 8, 2, 6, dtype=torch.float64, seed=1), [0])
    assert not torch.equal(dict(other.named_parameters())["blocks.0.qkv.weight"], weights[0])


def test_a_later_token_does_not_change_an_earlier_prediction() -> None:
    model = GptStage(CONFIG, range(4))
    tokens = torch.arange(6).view(1, 6)
    changed = tokens.clone()
    changed[0, 5] = 77
    assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(tokens)[:, 5], model(changed)[:, 5])


def test_untrained_loss_is_that_of_a_guess() -> None:
    batch = TextData(1, 8, 6).batch(0, 0)
    loss = cross_entropy(GptStage(CONFIG, range(4))(batch.tokens[0]), batch.targets[0])
    assert float(loss.detach()) == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.1)


def test_batches_are_text_and_the_same_for_the_same_step_and_rank() -> None:
    data = TextData(num_microbatches=3, microbatch_size=2, sequence=50)
    batch = data.batch(5, 1)
    assert batch.tokens.shape == batch.targets.shape == (3, 2, 50)
    assert torch.equal(batch.tokens[..., 1:], batch.targets[..., :-1])
    assert torch.equal(batch.tokens, data.batch(5, 1).tokens)
    assert not torch.equal(batch.tokens, data.batch(5, 0).tokens)
    assert not torch.equal(batch.tokens, data.batch(6, 1).tokens)
    whole = TextData(num_microbatches=6, microbatch_size=2, sequence=50).batch(5, 0)
    assert torch.equal(torch.cat((data.batch(5, 0).tokens, batch.tokens)), whole.tokens)
    assert not torch.equal(TextData(3, 2, 50, seed=2**63 + 5).batch(5, 1).tokens, batch.tokens)
    letters = bytes(batch.tokens.flatten().tolist()).decode("utf-8", errors="ignore")
    assert sum(letter.isalpha() for letter in letters) > len(letters) / 2


def test_a_batch_that_no_text_can_give_is_one_line() -> None:
    with pytest.raises(UsageError, match="0 microbatches of 1 × 4 bytes"):
        TextData(0, 1, 4)


def test_layers_are_shared_out_evenly_the_first_stages_taking_more() -> None:
    assert partition(8, 4) == (range(0, 2), range(2, 4), range(4, 6), range(6, 8))
    assert [len(layers) for layers in partition(7, 3)] == [3, 2, 2]
    assert partition(4, 2, (3, 1)) == (range(0, 3), range(3, 4))
