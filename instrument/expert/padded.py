"""Routes of tokens to experts in buffers of equal parts: C slots for each expert and rank, those that no route takes are zeros.

So the sizes of all messages and products are known before any route is, and a GPU's host waits for nothing; the price are
E·C rows sent instead of the routes. C is the most that a rank can route to an expert where experts have a capacity:
that of each of its sequences, at most its tokens of one; without capacity it is the largest number of routes that an expert
has of any rank, of which all ranks tell each other (the host waits for that one). Sources: GShard (arXiv 2006.16668),
DeepSpeed ``sharded_moe.py``, Tutel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from instrument.collectives import Reduction
from instrument.expert.dispatch import Compute, RowDispatch
from instrument.expert.exchange import Exchange, gather_rows, scatter_rows
from instrument.expert.groups import ExpertGroups
from instrument.expert.places import Places
from instrument.expert_counts import counts_of


@dataclass(frozen=True, slots=True, eq=False)
class PaddedDispatch(RowDispatch):
    """Slots of the experts, C of each for each rank, taken or not."""

    slots: int

    def compute(self, rows: Tensor, compute: Compute) -> Tensor:
        etp, width = self.groups.etp, rows.shape[1]
        num_sources, num_held = self.groups.ep.size * etp.size, len(self.rows_of_expert)
        by_source = gather_rows(rows, None, etp).view(num_sources, num_held, self.slots, width)
        computed = compute(by_source.transpose(0, 1).reshape(-1, width), self.rows_of_expert)
        by_expert = computed.view(num_held, num_sources, self.slots, width)
        return scatter_rows(by_expert.transpose(0, 1).reshape(-1, width), None, etp)


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
    leaving = Places(of_rows[:-1], rows, has_gaps=True)
    rows_of_expert = [groups.ep.size * groups.etp.size * slots] * (num_experts // groups.ep.size)
    return PaddedDispatch(groups, Exchange(groups.ep), leaving, rows_of_expert, counts[:num_experts], slots)
