"""Experts by an all-gather of all tokens, and a reduce-scatter of what they add up to.

Every rank gets the tokens of all that share its experts (ep, and etp where these share each one), with their weights, computes
those that chose its experts, and what all ranks make of a token is summed where it came from. The bytes are the same whatever
the routes, and fewer than those of the all-to-all (:mod:`instrument.expert.dispatch`) where a token has as many experts as
there are ranks or more. Source: Megatron-LM ``MoEAllGatherTokenDispatcher``, and its ``SwitchMLP`` before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instrument.expert.dispatch import Compute
from instrument.expert.exchange import gather_rows, scatter_rows
from instrument.expert.groups import ExpertGroups
from instrument.expert_counts import counts_of


@dataclass(frozen=True, slots=True, eq=False)
class GatheredDispatch:
    """The routes of all ranks' tokens to this rank's experts.

    Args:
        groups: the ranks that share the experts.
        routes: indices of the routes to this rank's experts, one expert after another; route t · k + j is the j-th of token t of
            all tokens, rank after rank.
        top_k: k.
        rows_of_expert: of each expert of this rank.
        counts: routes of this rank's tokens to each expert.
    """

    groups: ExpertGroups
    routes: Tensor
    top_k: int
    rows_of_expert: Sequence[int]
    counts: Tensor

    def run(self, tokens: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """(n, h) tokens, (n, k) weights → (n, h): the weighted sum of what the experts make of each token."""
        ep, etp = self.groups.ep, self.groups.etp
        everywhere, all_weights = (gather_rows(gather_rows(x, None, ep), None, etp) for x in (tokens, weights))
        token = self.routes // self.top_k
        rows = compute(everywhere.index_select(0, token), self.rows_of_expert)
        weighted = rows * all_weights.flatten().index_select(0, self.routes).to(rows.dtype).unsqueeze(1)
        summed = torch.zeros_like(everywhere).index_add(0, token, weighted)
        return scatter_rows(scatter_rows(summed, None, etp), None, ep)


def make_gathered(chosen: Tensor, num_experts: int, groups: ExpertGroups) -> GatheredDispatch:
    """Tell all ranks the experts of all tokens; arguments as :func:`instrument.expert.dispatch.make_dispatch` has them."""
    everywhere = groups.etp.all_gather(groups.ep.all_gather(chosen)).flatten()
    num_held = num_experts // groups.ep.size
    experts = everywhere - groups.ep.rank * num_held
    is_foreign = (experts < 0) | (experts >= num_held)
    experts = experts.masked_fill(is_foreign, num_held)
    rows_of_expert: list[int] = counts_of(experts, num_held + 1).tolist()[:num_held]
    order = torch.argsort(experts, stable=True)[: sum(rows_of_expert)]
    counts = counts_of(chosen.flatten(), num_experts + 1)[:num_experts]
    return GatheredDispatch(groups, order, chosen.shape[1], rows_of_expert, counts)
