"""The router's losses: load balancing, and the z loss, which keeps logits small.

The load-balancing loss is that of one sequence of T tokens: α·E·Σ_i f_i·P_i, where f_i = c_i/(k·T) is the share of the routes
that chose expert i, without gradient and before anything is dropped, and P_i the mean of the router's probability over
the sequence. It is α where all experts are chosen equally and α·E where all tokens are certain of one. With a sequence as unit a
model trains the same however sequences are shared out over microbatches and ranks; ranks that hold parts of it
exchange c, and each adds its own part of P. Sources: GShard (arXiv 2006.16668), Switch (arXiv 2101.03961); per sequence as
Megatron-LM's ``seq_aux_loss``.

The z loss is β·mean_t (log Σ_i exp z_ti)² (ST-MoE, arXiv 2202.08906).

Nothing of these losses travels along the pipeline: :func:`with_loss` ties one to a tensor of the forward, and backward
gives it the gradient that its weight in the step's loss says (Megatron-LM ``MoEAuxLossAutoScaler``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pptrace.sizes.expert_options import ExpertOptions


def count_routes(chosen: Tensor, num_experts: int) -> Tensor:
    """Count the routes of each sequence to each expert: (sequences, tokens, k) expert ids → (sequences, experts) int64."""
    counts = chosen.new_zeros((chosen.shape[0], num_experts))
    routes = chosen.flatten(1)
    return counts.scatter_add_(1, routes, torch.ones_like(routes))


def load_balancing_loss(probabilities: Tensor, counts: Tensor, length: int, options: ExpertOptions) -> Tensor:
    """Mean over sequences of α·E·Σ f·P, of this rank's part of each sequence; the parts of all its ranks add up to it.

    Args:
        probabilities: (sequences, tokens, experts) of this rank's tokens.
        counts: (sequences, experts) routes of the whole sequences.
        length: tokens of a whole sequence.
        options: coefficient, E and k.
    """
    shares = counts.to(probabilities.dtype) / (options.top_k * length)
    means = probabilities.sum(1) / length
    return options.aux_loss * options.num * (shares * means).sum(1).mean()


def z_loss(logits: Tensor, length: int, options: ExpertOptions) -> Tensor:
    """β·mean_t (log Σ exp z_t)² over the tokens of sequences of ``length``, of this rank's part (sequences, tokens, experts)."""
    return options.z_loss * logits.logsumexp(-1).square().sum() / (logits.shape[0] * length)


def with_loss(x: Tensor, loss: Tensor, weight: float) -> Tensor:
    """``x`` itself; where its backward runs, ``loss`` (scalar) gets the gradient ``weight``."""
    tied: Tensor = _WithLoss.apply(x, loss, weight)  # type: ignore[no-untyped-call]
    return tied


class _WithLoss(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], torch.full((), ctx.weight, dtype=ctx.dtype, device=ctx.device), None
