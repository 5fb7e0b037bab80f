"""Experts by an all-gather of all tokens, and a reduce-scatter of what they add up to.

Every rank of ep gets all tokens with their weights, computes those that chose its experts, and what all ranks make of a token is
summed where it came from. The bytes are the same whatever the routes, and fewer than those of the all-to-all
(:mod:`instrument.expert.dispatch`) where a token has as many experts as there are ranks or more. Source: Megatron-LM
``MoEAllGatherTokenDispatcher``, and its ``SwitchMLP`` before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from instrument.collectives import AxisGroup
from instrument.expert.dispatch import Compute


@dataclass(frozen=True, slots=True, eq=False)
class GatheredDispatch:
    """The routes of all ranks' tokens to this rank's experts.

    Args:
        group: the ranks that share the experts.
        routes: indices of the routes to this rank's experts, one expert after another; route t · k + j is the j-th of token t of
            all tokens, rank after rank.
        top_k: k.
        rows_of_expert: of each expert of this rank.
    """

    group: AxisGroup
    routes: Tensor
    top_k: int
    rows_of_expert: Sequence[int]

    def run(self, tokens: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """(n, h) tokens, (n, k) weights → (n, h): the weighted sum of what the experts make of each token."""
        everywhere, all_weights = _gather(tokens, self.group), _gather(weights, self.group)
        token = self.routes // self.top_k
        rows = compute(everywhere.index_select(0, token), self.rows_of_expert)
        weighted = rows * all_weights.flatten().index_select(0, self.routes).to(rows.dtype).unsqueeze(1)
        return _scatter(torch.zeros_like(everywhere).index_add(0, token, weighted), self.group)


def make_gathered(chosen: Tensor, num_experts: int, group: AxisGroup) -> GatheredDispatch:
    """Tell all ranks the experts of all tokens; arguments as :func:`instrument.expert.dispatch.make_dispatch` has them."""
    everywhere = group.all_gather(chosen).flatten()
    num_held = num_experts // group.size
    experts = everywhere - group.rank * num_held
    is_foreign = (experts < 0) | (experts >= num_held)
    experts = experts.masked_fill(is_foreign, num_held)
    rows_of_expert: list[int] = torch.bincount(experts, minlength=num_held + 1).tolist()[:num_held]
    order = torch.argsort(experts, stable=True)[: sum(rows_of_expert)]
    return GatheredDispatch(group, order, chosen.shape[1], rows_of_expert)


def _gather(x: Tensor, group: AxisGroup) -> Tensor:
    """All ranks' rows; a reduce-scatter of the gradients in backward."""
    gathered: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return gathered


def _scatter(x: Tensor, group: AxisGroup) -> Tensor:
    """This rank's rows of the sum over all ranks; an all-gather of the gradients in backward."""
    scattered: Tensor = _Scatter.apply(x, group)  # type: ignore[no-untyped-call]
    return scattered


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(x) if group.size > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.reduce_scatter(gradients[0]), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return group.reduce_scatter(x) if group.size > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(gradients[0].contiguous()), None
