"""Dropout whose masks depend on layer, step, microbatch and rank, and on nothing that ran before.

Each mask has a separate seed, made of the dropout's layer and site, the step, the microbatch and the rank's coordinates. So
a run draws the same masks again, in whatever order a schedule runs its microbatches, and a recomputed forward those of the
first one, as long as the seed is among the recomputed function's arguments.

Which ranks share a mask (Megatron-LM ``tensor_parallel/random.py``): all of tp where all hold the same activations; none
where each holds different ones, be they heads, features or a sequence shard. Ranks of dp and cp never do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from instrument.seeds import mix
from pptrace.errors import UsageError


@dataclass(frozen=True, slots=True)
class MicrobatchKey:
    """Step and microbatch of a forward, and the tokens of the documents that its sequences are packed of; None: of one each."""

    step: int = 0
    microbatch: int = 0
    documents: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class DropoutSeeds:
    """The seeds of one rank; ``position`` is its coordinates on the axes along which masks differ (such as dp, cp)."""

    seed: int
    position: tuple[int, ...]
    tp_rank: int

    def of(self, microbatch_key: MicrobatchKey, layer: int, site: int, sharded: bool) -> int:
        """The seed of one mask.

        Args:
            microbatch_key: step and microbatch.
            layer: of the whole model.
            site: index of the dropout within the layer.
            sharded: whether each rank of tp holds a part of the activations, or all hold the same.
        """
        tp_rank = self.tp_rank + 1 if sharded else 0
        return mix(self.seed, *self.position, tp_rank, microbatch_key.step, microbatch_key.microbatch, layer, site)


def dropout(x: Tensor, probability: float, seed: int) -> Tensor:
    """Replace a share of ``x`` by zeros, the rest scaled by 1 / (1 − probability); keeps one byte an element.

    Args:
        x: of any shape.
        probability: of dropping an element, from 0 up to 1; at 0, ``x`` itself.
        seed: of :meth:`DropoutSeeds.of`.

    Raises:
        UsageError: a probability out of this range.
    """
    if not 0 <= probability < 1:
        raise UsageError(f"dropout probability {probability} is not in [0, 1)")
    if probability == 0:
        return x
    dropped: Tensor = _Dropout.apply(x, probability, seed)  # type: ignore[no-untyped-call]
    return dropped


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float, seed: int) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(seed)
        mask = torch.rand(x.shape, generator=generator, device=x.device) >= probability
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - probability)
        return (x * mask).mul_(1 / (1 - probability))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (gradients[0] * mask).mul_(ctx.scale), None, None
