"""Routes of tokens to experts in buffers of equal parts: C slots for each expert and rank, those that no route takes are zeros.

So the sizes of all messages and products are known before any route is, and a GPU's host waits for nothing; the price are
E·C rows sent instead of the routes. C is the most that a rank can route to an expert where experts have a capacity:
that of each of its sequences, at most its tokens of one; without capacity it is the largest number of routes that an expert
has of any rank, of which all ranks tell each other (the host waits for that one). Sources: GShard (arXiv 2006.16668),
DeepSpeed ``sharded_moe.py``, Tutel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instrument.collectives import Reduction
from instrument.expert.dispatch import Compute, run_rows
from instrument.expert.exchange import Exchange, gather_rows, scatter_rows
from instrument.expert.groups import ExpertGroups
from instrument.expert.places import Places, weighted_sum
from instrument.expert_counts import counts_of


@dataclass(frozen=True, slots=True, eq=False)
class PaddedDispatch:
    """Slots of the experts, E·C of each rank, and the routes that have taken them.

    Args:
        groups: the ranks that share the experts.
        leaving: this rank's slots, one expert behind the other.
        slots: C.
        counts: routes of this rank's tokens to each expert.
    """

    groups: ExpertGroups
    leaving: Places
    slots: int
    counts: Tensor

    @property
    def exchange(self) -> Exchange:
        return Exchange(self.groups.ep)

    @property
    def rows_of_expert(self) -> Sequence[int]:
        """Slots, taken or not."""
        return [self._sources * self.slots] * self._num_held

    @property
    def _sources(self) -> int:
        return self.groups.ep.size * self.groups.etp.size

    @property
    def _num_held(self) -> int:
        return len(self.counts) // self.groups.ep.size

    def run(self, tokens: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        return run_rows(self, tokens, weights, compute)

    def leave(self, tokens: Tensor) -> Tensor:
        return self.leaving.spread(tokens)

    def compute(self, rows: Tensor, compute: Compute) -> Tensor:
        etp, slots, width = self.groups.etp, self.slots, rows.shape[1]
        by_source = gather_rows(rows, None, etp).view(self._sources, self._num_held, slots, width)
        computed = compute(by_source.transpose(0, 1).reshape(-1, width), self.rows_of_expert)
        by_expert = computed.view(self._num_held, self._sources, slots, width)
        return scatter_rows(by_expert.transpose(0, 1).reshape(-1, width), None, etp)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        return weighted_sum(self.leaving.to_routes(rows), weights)


def make_padded(chosen: Tensor, num_experts: int, groups: ExpertGroups, slots: int | None = None) -> PaddedDispatch:
    """Give routes their slots; all ranks of ``groups`` call it.

    Args:
        chosen: (n, k) expert ids; ``num_experts`` where the route is dropped.
        num_experts: of all ranks together, which their number divides; rank i has the i-th part of them.
        groups: the ranks that share the experts.
        slots: C, which no expert has more routes of a rank than; None: as many as are needed.
    """
    routes = chosen.flatten()
    counts = counts_of(routes, num_experts + 1)
    if slots is None:
        most = groups.etp.all_reduce(counts[:num_experts].max(), Reduction.MAX)
        slots = int(groups.ep.all_reduce(most, Reduction.MAX))
    order = torch.argsort(routes, stable=True)
    experts = routes[order]
    place = torch.arange(len(routes), device=routes.device) - (counts.cumsum(0) - counts)[experts]
    row = torch.where(experts < num_experts, experts * slots + place, num_experts * slots)
    rows = torch.empty_like(routes).scatter_(0, order, row)
    of_rows = torch.full((num_experts * slots + 1,), len(routes), device=routes.device).scatter_(0, row, order)
    return PaddedDispatch(groups, Places(of_rows[:-1], rows, has_gaps=True), slots, counts[:num_experts])
