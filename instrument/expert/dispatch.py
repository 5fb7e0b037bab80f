"""Routes of tokens to experts on other ranks, and back.

A route is one (token, choice). Routes are sorted by expert, of one expert in the order of the tokens, so that those to one rank
lie together. Ranks tell each other how many routes go to each of their experts; then the rows travel in an all-to-all with
uneven parts, are sorted by expert, and travel back after the experts in one with the parts swapped. Backward is the same two
mirrored. Nothing is padded, and routes that were dropped do not travel. Source: Megatron-LM ``MoEAlltoAllTokenDispatcher``.

The parts are needed on the host: on a GPU a layer waits for them once in each forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from instrument.collectives import AxisGroup

Compute = Callable[[Tensor, Sequence[int]], Tensor]
"""(rows, h) of this rank's experts, one expert after another, and how many of each → (rows, h)."""


class TokenDispatch(Protocol):
    """A way to bring tokens to experts and back, with the routes of one forward."""

    @property
    def rows_of_expert(self) -> Sequence[int]:
        """Rows that each expert of this rank computes; on the host."""
        ...

    def run(self, tokens: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """(n, h) tokens, (n, k) weights → (n, h): the weighted sum of what the experts make of each token."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch:
    """The places to which the rows of n tokens with k routes each go, and what this rank's experts receive.

    Args:
        group: the ranks that share the experts.
        order: (n · k,) routes sorted by expert, dropped ones last; route t · k + j is the j-th of token t.
        top_k: k.
        sent: rows to each rank.
        received: rows from each rank.
        by_expert: received rows sorted by expert, their order kept; None where they come so.
        rows_of_expert: of each expert of this rank.
    """

    group: AxisGroup
    order: Tensor
    top_k: int
    sent: Sequence[int]
    received: Sequence[int]
    by_expert: Tensor | None
    rows_of_expert: Sequence[int]

    def run(self, tokens: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """(n, h) tokens, (n, k) weights → (n, h): the weighted sum of what the experts make of each token."""
        returned = self._from_experts(compute(self._to_experts(tokens), self.rows_of_expert))
        return weights.to(returned.dtype).unsqueeze(1).bmm(returned).squeeze(1)

    def _to_experts(self, tokens: Tensor) -> Tensor:
        """(n, h) tokens → (rows, h) of this rank's experts, one expert after another."""
        rows: Tensor = _Spread.apply(tokens, self.order, self.top_k, sum(self.sent))  # type: ignore[no-untyped-call]
        rows = _travel(rows, self.group, self.sent, self.received)
        return rows if self.by_expert is None else _permute(rows, self.by_expert)

    def _from_experts(self, rows: Tensor) -> Tensor:
        """(rows, h) of this rank's experts → (n, k, h): what each route's expert makes of its token, 0 where it is dropped."""
        if self.by_expert is not None:
            rows = _permute(rows, _inverse(self.by_expert))
        rows = _travel(rows, self.group, self.received, self.sent)
        return _by_token(_permute(_with_dropped(rows, len(self.order)), _inverse(self.order)), self.top_k)


def make_dispatch(chosen: Tensor, num_experts: int, group: AxisGroup) -> Dispatch:
    """Sort the routes of tokens and tell the other ranks how many come; all ranks of ``group`` call it.

    Args:
        chosen: (n, k) expert ids; ``num_experts`` where the route is dropped.
        num_experts: of all ranks together, which their number divides; rank i has the i-th part of them.
        group: the ranks that share the experts.
    """
    routes = chosen.flatten()
    order = torch.argsort(routes, stable=True)
    counts = torch.bincount(routes, minlength=num_experts + 1)[:num_experts]
    if group.size == 1:
        rows_of_expert = counts.tolist()
        num_rows = [sum(rows_of_expert)]
        return Dispatch(group, order, chosen.shape[1], num_rows, num_rows, None, rows_of_expert)
    arriving = group.all_to_all(counts).view(group.size, -1)  # rank, expert of this rank
    sent, received, rows_of_expert = _on_host(counts.view(group.size, -1).sum(1), arriving.sum(1), arriving.sum(0))
    by_expert = None
    if arriving.shape[1] > 1:
        experts = torch.arange(arriving.shape[1], device=chosen.device).repeat(group.size)
        by_expert = torch.argsort(experts.repeat_interleave(arriving.flatten(), output_size=sum(received)), stable=True)
    return Dispatch(group, order, chosen.shape[1], sent, received, by_expert, rows_of_expert)


def _on_host(*counts: Tensor) -> list[list[int]]:
    """The numbers of several tensors on the host, in one copy."""
    numbers: list[int] = torch.cat(counts).tolist()
    lists, first = [], 0
    for part in counts:
        lists.append(numbers[first : first + len(part)])
        first += len(part)
    return lists


def _inverse(permutation: Tensor) -> Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse


def _with_dropped(rows: Tensor, num_routes: int) -> Tensor:
    """Rows with zeros behind them, one for each dropped route."""
    if len(rows) == num_routes:
        return rows
    return torch.cat((rows, rows.new_zeros(num_routes - len(rows), rows.shape[1])))


def _by_token(rows: Tensor, top_k: int) -> Tensor:
    """(n · k, h) → (n, k, h)."""
    return rows.view(len(rows) // top_k, top_k, rows.shape[1])


def _permute(rows: Tensor, order: Tensor) -> Tensor:
    """Rows in another order, which has each of them once."""
    permuted: Tensor = _Permute.apply(rows, order)  # type: ignore[no-untyped-call]
    return permuted


def _travel(rows: Tensor, group: AxisGroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """All-to-all of rows in forward, of their gradients with the parts swapped in backward."""
    if group.size == 1:
        return rows
    arrived: Tensor = _Travel.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return arrived


class _Spread(Function):
    """(n, h) tokens → (kept routes, h): the token of each; backward adds up the gradients of a token's routes."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, top_k: int, num_kept: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return tokens.index_select(0, order[:num_kept] // top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        of_routes = _with_dropped(gradients[0], len(order)).index_select(0, _inverse(order))
        return _by_token(of_routes, ctx.top_k).sum(1), None, None, None


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return gradients[0].index_select(0, _inverse(order)), None


class _Travel(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: AxisGroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return group.all_to_all_rows(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.all_to_all_rows(gradients[0], ctx.received, ctx.sent), None, None, None
