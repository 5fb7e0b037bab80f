"""The routes that an expert takes where it takes a limited number of each sequence; the others are dropped.

With the sequence as unit (:meth:`pptrace.sizes.expert_options.ExpertOptions.capacity`), the same routes are kept however
sequences are shared out over microbatches and ranks: ranks that hold parts of one tell each other their choices.

A dropped route adds nothing to its token, whose other weights stay as they are; a token without routes keeps what the residual
connection (and a shared MLP) gives it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from instrument.expert.losses import count_routes


def keep_within(chosen: Tensor, capacity: int, num_experts: int, weights: Tensor | None = None) -> Tensor:
    """Return which routes are kept.

    Args:
        chosen: (sequences, tokens, k) expert ids of whole sequences, tokens in their order.
        capacity: routes of a sequence that each expert takes.
        num_experts: of the layer.
        weights: (sequences, tokens, k); None: in the order of choices (:class:`~pptrace.sizes.expert_options.DropOrder`).

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
    counts = count_routes(chosen, num_experts)
    first = counts.cumsum(1) - counts
    slot = torch.arange(tokens * top_k, device=chosen.device) - first.gather(1, by_expert.values)
    kept = torch.empty_like(routes, dtype=torch.bool)
    kept.scatter_(1, priority.gather(1, by_expert.indices), slot < capacity)
    return kept.view_as(chosen)
