"""The bias that balances experts without a loss (arXiv 2408.15664): after each step b_i += u·sign(mean c − c_i).

c_i are the routes that chose expert i in the whole global batch, before anything is dropped; a recomputation counts nothing. The
bias is added to the scores for the choice alone, and has no gradient. Source of the sum: Megatron-LM ``get_updated_expert_bias``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from instrument.collectives import AxisGroup
from instrument.expert.router import Router


def biased_routers(stages: Iterable[nn.Module]) -> list[Router]:
    """The routers of stages that have a bias, in the order of the modules."""
    modules = (module for stage in stages for module in stage.modules())
    return [module for module in modules if isinstance(module, Router) and module.bias_rate]


@torch.no_grad()
def update_biases(routers: Sequence[Router], groups: Sequence[AxisGroup]) -> None:
    """Update the biases from what routers counted since the last time.

    Args:
        routers: with a bias, in an order that all ranks of ``groups`` share.
        groups: over which the counts are summed, one after another: the ranks that route different tokens.
    """
    if not routers:
        return
    counts = torch.cat([router.counts for router in routers])
    for group in groups:
        counts = group.all_reduce(counts)
    by_router: Sequence[Tensor] = counts.split([len(router.counts) for router in routers])  # type: ignore[no-untyped-call]
    for router, of_router in zip(routers, by_router, strict=True):
        router.expert_bias += router.bias_rate * torch.sign(of_router.sum() - len(of_router) * of_router)
    forget_counts(routers)


def forget_counts(routers: Sequence[Router]) -> None:
    """Count anew, where forwards are run again."""
    for router in routers:
        router.counts.zero_()
