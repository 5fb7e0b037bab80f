"""Choice of experts, weights, and the router's losses against closed forms (float64)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from instrument.expert.bias import biased_routers, update_biases
from instrument.expert.losses import count_routes, load_balancing_loss, with_loss, z_loss
from instrument.expert.router import Router, choose, probabilities_of, weights_of
from pptrace.errors import UsageError
from pptrace.sizes.expert_options import ExpertOptions, Forced, Scoring, SecondChoice, Shared

OPTIONS = ExpertOptions(6, 3)


def drawn_logits(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


def test_equal_scores_go_to_the_lower_expert() -> None:
    equal = torch.zeros(3, 6)
    equal[1, 4] = equal[1, 2] = 1.0
    for scoring in Scoring:
        chosen = choose(equal, replace(OPTIONS, scoring=scoring))
        assert chosen.tolist() == [[0, 1, 2], [2, 4, 0], [0, 1, 2]]


@pytest.mark.parametrize("scoring", Scoring)
def test_weights_are_those_of_the_scoring(scoring: Scoring) -> None:
    options = replace(OPTIONS, scoring=scoring, scale=2.5)
    logits = drawn_logits(4, 6)
    chosen = choose(logits, options)
    weights = weights_of(logits, chosen, options)
    for token, row in enumerate(logits.detach()):
        best = sorted(range(6), key=lambda expert: (-float(row[expert]), expert))[:3]
        assert chosen[token].tolist() == best
        exponentials = [float(row[expert].exp()) for expert in best]
        sigmoids = [1 / (1 + float((-row[expert]).exp())) for expert in best]
        expected = {
            Scoring.SOFTMAX_AFTER: [value / sum(exponentials) for value in exponentials],
            Scoring.SOFTMAX_BEFORE: [value / float(row.exp().sum()) for value in exponentials],
            Scoring.RENORMALISED: [value / sum(exponentials) for value in exponentials],
            Scoring.SIGMOID: [value / sum(sigmoids) for value in sigmoids],
        }[scoring]
        assert weights[token].tolist() == pytest.approx([2.5 * value for value in expected], abs=1e-15)


def test_the_bias_changes_the_choice_and_no_weight() -> None:
    options = ExpertOptions(3, 1, scoring=Scoring.SIGMOID)
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    chosen = choose(logits, options, bias=torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64))
    assert chosen.tolist() == [[2]]
    assert weights_of(logits, chosen, options).tolist() == [[0.5]]


def test_the_bias_moves_towards_experts_with_fewer_routes() -> None:
    options = ExpertOptions(3, 1, scoring=Scoring.SIGMOID, bias_rate=0.5)
    router = Router(4, options, sees_part=False)
    for _ in range(2):
        router.choose(torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0], [1.0, 2.0, 0.0]]), options)
    assert router.counts.tolist() == [4, 2, 0]
    update_biases(biased_routers([router]), ())
    assert router.expert_bias.tolist() == [-0.5, 0.0, 0.5]
    assert router.counts.tolist() == [0, 0, 0]
    assert router.choose(torch.zeros(1, 3), options).tolist() == [[2]]


def test_the_gate_learns_from_what_its_chosen_experts_add() -> None:
    """Softmax over the chosen: dL/dz_j = w_j·(a_j − Σ w_i·a_i) where a is the gradient of the weights, 0 for all others."""
    logits = drawn_logits(5, 6)
    chosen = choose(logits, OPTIONS)
    weights = weights_of(logits, chosen, OPTIONS)
    upstream = drawn_logits(5, 3).detach()
    weights.backward(upstream)
    w = weights.detach()
    expected = torch.zeros(5, 6, dtype=torch.float64)
    expected.scatter_(1, chosen, w * (upstream - (w * upstream).sum(1, keepdim=True)))
    assert torch.allclose(logits.grad, expected, rtol=0, atol=1e-15)


def test_the_gate_keeps_32_bits_in_a_model_of_16() -> None:
    router = Router(8, OPTIONS, sees_part=False, dtype=torch.bfloat16)
    assert router.weight.dtype == torch.float32
    assert router(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.float32


def test_the_balancing_loss_is_alpha_in_balance_and_alpha_times_experts_in_collapse() -> None:
    options = ExpertOptions(4, 1, scoring=Scoring.SOFTMAX_BEFORE, aux_loss=0.5)
    even = torch.full((1, 8, 4), 0.25, dtype=torch.float64)
    balanced = count_routes(torch.arange(8).remainder(4).view(1, 8, 1), 4)
    assert float(load_balancing_loss(even, balanced, 8, options)) == pytest.approx(0.5)
    certain = torch.zeros(1, 8, 4, dtype=torch.float64)
    certain[..., 2] = 1
    collapsed = count_routes(torch.full((1, 8, 1), 2), 4)
    assert float(load_balancing_loss(certain, collapsed, 8, options)) == pytest.approx(2.0)


@pytest.mark.parametrize("scoring", [Scoring.SOFTMAX_AFTER, Scoring.SIGMOID])
def test_parts_of_a_sequence_add_up_to_its_losses(scoring: Scoring) -> None:
    options = replace(OPTIONS, scoring=scoring, aux_loss=0.3, z_loss=0.2)
    logits = drawn_logits(2, 8, 6)
    counts = count_routes(choose(logits, options), 6)
    assert counts.sum(1).tolist() == [24, 24]

    def both(part: Tensor) -> Tensor:
        return load_balancing_loss(probabilities_of(part, options), counts, 8, options) + z_loss(part, 8, options)

    parts = sum(float(both(part).detach()) for part in logits.chunk(4, 1))
    assert parts == pytest.approx(float(both(logits).detach()), abs=1e-15)


def test_gradients_of_the_losses_are_the_closed_forms() -> None:
    options = replace(OPTIONS, aux_loss=0.3, z_loss=0.2)
    logits = drawn_logits(2, 8, 6)
    p = logits.detach().softmax(-1)
    counts = count_routes(choose(logits, options), 6)
    shares = counts[:, None].double() / (3 * 8)
    of_balance = 0.3 * 6 / 8 * p * (shares - (shares * p).sum(-1, keepdim=True)) / 2
    of_size = 2 * 0.2 / 16 * logits.detach().logsumexp(-1, keepdim=True) * p
    for loss, expected in (
        (load_balancing_loss(probabilities_of(logits, options), counts, 8, options), of_balance),
        (z_loss(logits, 8, options), of_size),
    ):
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.allclose(gradient, expected, rtol=0, atol=1e-15)


def test_a_loss_that_is_tied_to_a_tensor_gets_its_weight_as_gradient() -> None:
    x, logits = drawn_logits(3), drawn_logits(4)
    tied = with_loss(x, logits.square().sum(), 0.25)
    assert torch.equal(tied, x)
    tied.backward(torch.full((3,), 7.0, dtype=torch.float64))
    assert x.grad.tolist() == [7.0] * 3
    assert torch.allclose(logits.grad, 0.5 * logits.detach(), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num": 4, "top_k": 5}, "routed to 5 experts and a layer has 4"),
        ({"num": 4, "top_k": 1}, "use softmax-before or sigmoid"),
        ({"num": 4, "top_k": 1, "scoring": Scoring.RENORMALISED}, "is always 1"),
        ({"num": 0}, "number of experts in a layer is 0"),
        ({"num": 4, "every": 0}, "distance of layers with experts is 0"),
        ({"num": 4, "num_groups": 0}, "number of groups of experts is 0"),
        ({"num": 4, "groups_per_token": 0}, "number of groups of a token is 0"),
        ({"num": 4, "aux_loss": -1.0}, "losses are -1.0 and 0.0"),
        ({"num": 4, "z_loss": math.nan}, "losses are 0.0 and nan"),
        ({"num": 4, "scale": math.inf}, "scale of its weights is inf"),
        ({"num": 4, "scoring": Scoring.SIGMOID, "bias_rate": math.nan}, "found sigmoid, nan"),
        ({"num": 4, "bias_rate": 0.1}, "scores of sigmoid alone"),
        ({"num": 4, "capacity_factor": 0.0}, "capacity factor of the experts is 0.0"),
        ({"num": 4, "jitter": 1.0}, "jitter of what the router sees is 1.0"),
        ({"num": 4, "top_k": 3, "second": SecondChoice.SAMPLED}, "second choice that is sampled is one of two experts"),
        ({"num": 4, "num_groups": 3}, "4 experts do not go into 3 groups"),
        ({"num": 4, "num_groups": 2, "groups_per_token": 3}, "of which a token has 3"),
        (
            {"num": 8, "top_k": 3, "num_groups": 4, "groups_per_token": 2},
            "3 experts of a token do not go into 2 groups of 2",
        ),
        ({"num": 8, "top_k": 3, "num_groups": 4}, "3 experts of a token do not go into 1 groups of 2"),
        ({"num": 4, "shared": Shared.RESIDUAL}, "shared MLP that is residual needs a width"),
        ({"num": 4, "forced": Forced.REPLAYED}, "replayed from a file"),
        ({"num": 8, "top_k": 5, "pyramid": (4, 8)}, "routed to 5 experts and a layer has 4"),
    ],
)
def test_routers_that_cannot_be_are_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ExpertOptions(**options)
