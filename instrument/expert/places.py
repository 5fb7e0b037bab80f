"""Rows and the routes that they are of: sorted, or in slots of which some are empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The rows of routes, and the routes of rows; route t · k + j is the j-th of token t.

    Args:
        routes: (rows,) the index of each row's route; the number of routes for a row without one, which is zeros.
        rows: (routes,) the index of each route's row; the number of rows or more for a route without one, which is dropped.
        has_gaps: whether there are such rows or routes.
    """

    routes: Tensor
    rows: Tensor
    has_gaps: bool = False

    def spread(self, tokens: Tensor) -> Tensor:
        """(n, h) tokens → (rows, h): the token of each row's route; backward adds up the gradients of a token's routes."""
        rows: Tensor = _Spread.apply(tokens, self)  # type: ignore[no-untyped-call]
        return rows

    def to_rows(self, of_routes: Tensor) -> Tensor:
        """(routes, h) → (rows, h)."""
        rows: Tensor = _Take.apply(of_routes, self, False)  # type: ignore[no-untyped-call]
        return rows

    def to_routes(self, rows: Tensor) -> Tensor:
        """(rows, h) → (routes, h), the inverse of :meth:`to_rows`."""
        of_routes: Tensor = _Take.apply(rows, self, True)  # type: ignore[no-untyped-call]
        return of_routes


def permutation(routes: Tensor) -> Places:
    """Every route has a row."""
    return Places(routes, inverse(routes))


def inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def weighted_sum(of_routes: Tensor, weights: Tensor) -> Tensor:
    """(n · k, h), (n, k) weights → (n, h)."""
    by_token = of_routes.view(*weights.shape, of_routes.shape[1])
    return weights.to(of_routes.dtype).unsqueeze(1).bmm(by_token).squeeze(1)


def _select(rows: Tensor, index: Tensor, has_gaps: bool) -> Tensor:
    """``rows[index]``; with gaps, zeros where the index is beyond them."""
    if not has_gaps:
        return rows.index_select(0, index)
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    return padded.index_select(0, index.clamp(max=len(rows)))


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Places) -> Tensor:
        ctx.places = places
        ctx.top_k = top_k = len(places.rows) // max(1, len(tokens))
        return _select(tokens, places.routes // max(1, top_k), places.has_gaps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        of_routes = _select(gradients[0], ctx.places.rows, ctx.places.has_gaps)
        return of_routes.view(-1, max(1, ctx.top_k), of_routes.shape[1]).sum(1), None


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places, by_route: bool) -> Tensor:
        ctx.places, ctx.by_route = places, by_route
        return _select(x, places.rows if by_route else places.routes, places.has_gaps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        places = ctx.places
        return _select(gradients[0], places.routes if ctx.by_route else places.rows, places.has_gaps), None, None
