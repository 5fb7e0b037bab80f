"""The routes that an expert takes where it takes a limited number of each sequence; the others are dropped.

An expert takes C = ⌈factor · k·T/E⌉ routes of a sequence of T tokens. With the sequence as unit, the same routes are kept however
sequences are shared out over microbatches and ranks: ranks that hold parts of one tell each other their choices.

A dropped route adds nothing to its token, whose other weights stay as they are; a token without routes keeps what the residual
connection (and a shared MLP) gives it.
"""

from __future__ import annotations

import math
from enum import StrEnum
from fractions import Fraction

import torch
from torch import Tensor


class DropOrder(StrEnum):
    """The order in which routes are taken."""

    CHOICES = (
        "choices"  # all first choices in the order of the tokens, then all second ones, … (GShard, arXiv 2006.16668)
    )
    WEIGHTS = "weights"  # by falling weight; of equal ones the earlier token


def capacity_of(factor: float, length: int, top_k: int, num_experts: int) -> int:
    """Routes of a sequence of ``length`` tokens that an expert takes: ⌈factor · k·T/E⌉, at most T.

    The factor is the decimal number that it is written as: 1.1 · 100/10 is 11, where floats come to a little more.
    """
    return min(length, math.ceil(Fraction(str(factor)) * top_k * length / num_experts))


def keep_within(chosen: Tensor, capacity: int, num_experts: int, weights: Tensor | None = None) -> Tensor:
    """Return which routes are kept.

    Args:
        chosen: (sequences, tokens, k) expert ids of whole sequences, tokens in their order.
        capacity: routes of a sequence that each expert takes.
        num_experts: of the layer.
        weights: (sequences, tokens, k); None: in the order of choices (:class:`DropOrder`).

    Returns:
        (sequences, tokens, k) bool.
    """
    sequences, tokens, top_k = chosen.shape
    if weights is None:
        priority = torch.arange(tokens * top_k, device=chosen.device).view(tokens, top_k).t().flatten()
        priority = priority.expand(sequences, -1)
    else:
        priority = torch.sort(weights.flatten(1), dim=1, descending=True, stable=True).indices
    routes = chosen.flatten(1)
    by_expert = torch.sort(routes.gather(1, priority), dim=1, stable=True)
    counts = torch.zeros(sequences, num_experts, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(1, routes, torch.ones_like(routes))
    first = counts.cumsum(1) - counts
    slot = torch.arange(tokens * top_k, device=chosen.device) - first.gather(1, by_expert.values)
    kept = torch.empty_like(routes, dtype=torch.bool)
    kept.scatter_(1, priority.gather(1, by_expert.indices), slot < capacity)
    return kept.view_as(chosen)
