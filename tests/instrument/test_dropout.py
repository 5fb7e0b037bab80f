"""Dropout masks depend on their place alone: the same again, whatever ran between, and in a recomputed forward."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from instrument.sequence.dropout import DropoutSeeds, Moment, dropout
from pptrace.errors import UsageError

SEEDS = DropoutSeeds(seed=3, position=(0, 0), tp_rank=0)


def ones() -> Tensor:
    return torch.ones(50, 200, dtype=torch.float64)


def test_a_mask_is_the_same_again_and_another_seed_gives_another() -> None:
    first = dropout(ones(), 0.3, 11)
    torch.rand(7)
    assert torch.equal(first, dropout(ones(), 0.3, 11))
    assert not torch.equal(first, dropout(ones(), 0.3, 12))


def test_it_leaves_the_default_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    dropout(ones(), 0.3, 11)
    assert torch.equal(torch.rand(3), expected)


def test_the_share_of_zeros_and_the_scale_are_those_of_the_probability() -> None:
    dropped = dropout(ones(), 0.3, 11)
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.7}
    assert float((dropped == 0).double().mean()) == pytest.approx(0.3, abs=0.02)


def test_backward_has_the_mask_of_forward() -> None:
    x = ones().requires_grad_()
    dropped = dropout(x, 0.3, 11)
    dropped.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, dropped.detach())


def test_a_recomputed_forward_draws_the_first_ones_mask_though_another_microbatch_ran_between() -> None:
    inputs = [ones().requires_grad_() for _ in range(2)]
    seeds = [SEEDS.of(Moment(0, microbatch), 1, 0, sharded=False) for microbatch in range(2)]

    def layer(x: Tensor, seed: int) -> Tensor:
        return dropout(x * x, 0.3, seed)

    outputs = [
        checkpoint(layer, x, seed, use_reentrant=False, preserve_rng_state=False)
        for x, seed in zip(inputs, seeds, strict=True)
    ]
    for x, output in zip(inputs, outputs, strict=True):
        output.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * output.detach())


def test_every_place_has_a_seed_of_its_own() -> None:
    ranks = [DropoutSeeds(0, (dp, cp), tp) for dp, cp, tp in product(range(3), range(2), range(4))]
    places = list(product(range(3), range(4), range(4), range(2)))
    seeds = {rank.of(Moment(*place[:2]), *place[2:], sharded=True) for rank in ranks for place in places}
    assert len(seeds) == len(ranks) * len(places)


def test_ranks_of_tp_share_masks_of_what_they_all_hold_and_others_do_not() -> None:
    ranks = [DropoutSeeds(0, (dp,), tp) for dp in range(2) for tp in range(2)]
    seeds = [rank.of(Moment(1, 2), 3, 0, sharded=False) for rank in ranks]
    assert seeds[0] == seeds[1]
    assert seeds[2] == seeds[3]
    assert seeds[0] != seeds[2]
    assert not set(seeds) & {rank.of(Moment(1, 2), 3, 0, sharded=True) for rank in ranks}


def test_without_dropout_nothing_is_done() -> None:
    x = ones()
    assert dropout(x, 0.0, 1) is x


@pytest.mark.parametrize("probability", [-0.1, 1.0, float("nan")])
def test_a_probability_out_of_range_is_refused(probability: float) -> None:
    with pytest.raises(UsageError, match=rf"dropout probability {probability} is not in \[0, 1\)"):
        dropout(ones(), probability, 1)
