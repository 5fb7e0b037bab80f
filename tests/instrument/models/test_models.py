"""The model, its cut into stages, and its data."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from instrument.backward_split.split import attach
from instrument.data.text import TextData
from instrument.models.gpt import GptConfig, GptStage, cross_entropy, make_stages, tied_weight
from instrument.models.sleeping import SleepingStage
from instrument.pipeline.partition import Layout, partition
from pptrace.errors import UsageError

CONFIG = GptConfig(layers=4, hidden=8, heads=2, sequence=6, dtype=torch.float64)


def test_layers_are_shared_out_evenly_the_first_stages_taking_more() -> None:
    assert partition(8, 4) == (range(0, 2), range(2, 4), range(4, 6), range(6, 8))
    assert [len(layers) for layers in partition(7, 3)] == [3, 2, 2]
    assert partition(4, 2, (3, 1)) == (range(0, 3), range(3, 4))


@pytest.mark.parametrize(
    ("layers", "stages", "split", "message"),
    [
        (3, 4, None, "4 stages need at least 4 layers and the model has 3"),
        (4, 2, (4,), "split 4 names 1 stages; the pipeline has 2"),
        (4, 2, (3, 2), "split 3,2 has 5 layers; expected at least 1 per stage and 4 in all"),
        (4, 2, (4, 0), "split 4,0 has 4 layers; expected at least 1 per stage"),
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
    ],
)
def test_layouts_share_out_all_layers(layout: Layout, layers: int, stages: int, counts: tuple[int, ...]) -> None:
    assert layout.layers(layers, stages) == counts
    assert [len(part) for part in partition(layers, stages, layout.layers(layers, stages))] == list(counts)


def test_layouts_that_do_not_fit_are_one_line() -> None:
    with pytest.raises(UsageError, match="4 layers on 4 stages with 2 in the first leave 2 for 3 stages"):
        Layout(first=2).layers(4, 4)
    with pytest.raises(
        UsageError, match="5 layers on 2 stages with 3 in the first, 1 in the last leave 1 for 0 stages"
    ):
        Layout(first=3, last=1).layers(5, 2)
    with pytest.raises(UsageError, match="give the split alone"):
        Layout(split=(1, 2), counts_loss=True)
    with pytest.raises(UsageError, match="give one of the two"):
        Layout(first=1, counts_embedding=True)
    with pytest.raises(UsageError, match="split 1,2,0 has 3 layers; expected at least 1 per stage"):
        partition(3, 3, Layout(counts_embedding=True, counts_loss=True).layers(3, 3))


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


@pytest.mark.parametrize("split", [(4,), (2, 2), (1, 3), (1, 1, 1, 1)])
def test_every_cut_has_the_same_parameters_and_computes_the_same(split: tuple[int, ...]) -> None:
    whole = dict(GptStage(CONFIG, range(4)).named_parameters())
    cut = partition(4, len(split), split)
    stages = make_stages(CONFIG, cut, range(len(split)))
    parts = {name: weight for stage in stages.values() for name, weight in stage.named_parameters()}
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    tokens = torch.arange(12).view(2, 6)
    x = tokens
    for stage in stages.values():
        x = stage(x)
    assert torch.equal(x, GptStage(CONFIG, range(4))(tokens))


def test_layers_differ_from_each_other_and_seeds_from_seeds() -> None:
    whole = GptStage(CONFIG, range(4))
    weights = [dict(whole.named_parameters())[f"blocks.{layer}.qkv.weight"] for layer in range(4)]
    assert not torch.equal(weights[0], weights[1])
    other = GptStage(GptConfig(4, 8, 2, 6, dtype=torch.float64, seed=1), [0])
    assert not torch.equal(dict(other.named_parameters())["blocks.0.qkv.weight"], weights[0])


def test_a_tied_weight_is_one_parameter_on_one_rank_and_two_copies_on_two() -> None:
    config = GptConfig(2, 8, 2, 6, tied=True)
    cut = partition(2, 2)
    together = make_stages(config, cut, (0, 1))
    assert together[1].head is not None
    assert together[0].embedding is not None
    assert together[1].head.projection.weight is together[0].embedding.tokens.weight
    assert tied_weight(together) is None
    first, last = make_stages(config, cut, (0,)), make_stages(config, cut, (1,))
    ends = tied_weight(first), tied_weight(last)
    assert ends[0] is not None
    assert ends[1] is not None
    assert torch.equal(ends[0], ends[1])


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


def test_heads_that_do_not_divide_are_one_line() -> None:
    with pytest.raises(UsageError, match="hidden size 10 does not divide into 4 heads"):
        GptConfig(layers=1, hidden=10, heads=4, sequence=4)
    with pytest.raises(UsageError, match="layers is 0"):
        GptConfig(layers=0, hidden=8, heads=4, sequence=4)


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
