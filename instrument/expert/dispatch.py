"""Routes of tokens to experts on other ranks, and back.

A route is one (token, choice). Routes are sorted by expert, of one expert in the order of the tokens, so that those to one rank
lie together. Ranks tell each other how many routes go to each of their experts; then the rows travel in an all-to-all with
uneven parts, are sorted by expert, and travel back after the experts in one with the parts swapped. Backward is the same two
mirrored. Nothing is padded, and routes that were dropped do not travel. Source: Megatron-LM ``MoEAlltoAllTokenDispatcher``.

Where ranks share each expert (etp), every one gets the rows that came to any of them, and what they compute of a row is summed
where it came.

The parts are needed on the host: on a GPU a layer waits for them once in each forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from instrument.expert.exchange import Exchange, gather_rows, scatter_rows, travel
from instrument.expert.groups import ExpertGroups
from instrument.expert.places import Places, inverse, permutation, weighted_sum
from instrument.expert_counts import counts_of

Compute = Callable[[Tensor, Sequence[int]], Tensor]
"""(rows, h) of this rank's experts, one expert after another, and how many of each → (rows, h)."""


class TokenDispatch(Protocol):
    """A way to bring tokens to experts and back, with the routes of one forward."""

    @property
    def rows_of_expert(self) -> Sequence[int]:
        """Rows that each expert of this rank computes; on the host."""
        ...

    @property
    def counts(self) -> Tensor:
        """(E,) routes of this rank's tokens to each expert, without dropped ones; on the device."""
        ...

    def run(self, tokens: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """(n, h) tokens, (n, k) weights → (n, h): the weighted sum of what the experts make of each token."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RowDispatch(ABC):
    """A way by two exchanges of rows.

    Args:
        groups: the ranks that share the experts.
        exchange: between the ranks of ep, of :meth:`leave`'s rows; what the experts compute takes the mirrored way.
        leaving: this rank's rows, one expert's behind the other's.
        rows_of_expert: of each expert of this rank.
        counts: of this rank's tokens.
    """

    groups: ExpertGroups
    exchange: Exchange
    leaving: Places
    rows_of_expert: Sequence[int]
    counts: Tensor

    def run(self, tokens: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """:meth:`TokenDispatch.run`, one thing after another."""
        rows = self.compute(travel(self.leave(tokens), self.exchange), compute)
        return self.combine(travel(rows, self.exchange.mirrored), weights)

    def leave(self, tokens: Tensor) -> Tensor:
        """(n, h) tokens → rows that set out."""
        return self.leaving.spread(tokens)

    @abstractmethod
    def compute(self, rows: Tensor, compute: Compute) -> Tensor:
        """Rows that arrived → what this rank's experts make of them, in the same order."""

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Rows that came back, (n, k) weights → (n, h)."""
        return weighted_sum(self.leaving.to_routes(rows), weights)


@dataclass(frozen=True, slots=True, eq=False)
class Dispatch(RowDispatch):
    """The rows of routes that are kept, and what this rank's experts receive.

    Args:
        gathered: rows that came to each rank of etp.
        by_expert: all of these rows by expert, their order kept; None where they come so.
    """

    gathered: Sequence[int]
    by_expert: Places | None

    def compute(self, rows: Tensor, compute: Compute) -> Tensor:
        rows = gather_rows(rows, self.gathered, self.groups.etp)
        if self.by_expert is not None:
            rows = self.by_expert.to_rows(rows)
        rows = compute(rows, self.rows_of_expert)
        if self.by_expert is not None:
            rows = self.by_expert.to_routes(rows)
        return scatter_rows(rows, self.gathered, self.groups.etp)


def make_dispatch(chosen: Tensor, num_experts: int, groups: ExpertGroups) -> Dispatch:
    """Sort the routes of tokens and tell the other ranks how many come; all ranks of ``groups`` call it.

    Args:
        chosen: (n, k) expert ids; ``num_experts`` where the route is dropped.
        num_experts: of all ranks together, which their number divides; rank i has the i-th part of them.
        groups: the ranks that share the experts.
    """
    routes = chosen.flatten()
    order = torch.argsort(routes, stable=True)
    counts = counts_of(routes, num_experts + 1)[:num_experts]
    ep, etp = groups.ep, groups.etp
    arriving = ep.all_to_all(counts).view(1, ep.size, -1)  # etp rank, rank, expert of this rank
    everywhere = etp.all_gather(arriving)
    sent, received, gathered, rows_of_expert = _on_host(
        counts.view(ep.size, -1).sum(1), arriving.sum((0, 2)), everywhere.sum((1, 2)), everywhere.sum((0, 1))
    )
    by_expert = None
    if ep.size * etp.size > 1 and arriving.shape[2] > 1:
        experts = torch.arange(arriving.shape[2], device=chosen.device).repeat(ep.size * etp.size)
        experts = experts.repeat_interleave(everywhere.flatten(), output_size=sum(gathered))
        by_expert = permutation(torch.argsort(experts, stable=True))
    num_kept = sum(sent)
    leaving = Places(order[:num_kept], inverse(order), num_kept < len(order))
    return Dispatch(groups, Exchange(ep, sent, received), leaving, rows_of_expert, counts, gathered, by_expert)


def _on_host(*counts: Tensor) -> list[list[int]]:
    """The numbers of several tensors on the host, in one copy."""
    numbers: list[int] = torch.cat(counts).tolist()
    lists, first = [], 0
    for part in counts:
        lists.append(numbers[first : first + len(part)])
        first += len(part)
    return lists
