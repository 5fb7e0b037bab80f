"""An embedding cut by its vocabulary.

Source: Megatron-LM ``VocabParallelEmbedding`` (arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function

from instrument.backward_split import split
from instrument.backward_split.split import EmbeddingWork, WeightQueue, embedding_gradient
from instrument.sequence.overlap import SEQUENCE_DIM
from instrument.sequence.shards import require_divisible
from instrument.tensor.region import Region, divide, shard
from instrument.tensor.shards import HasShares, Share


class VocabParallelEmbedding(HasShares, split.Embedding):
    """Embedding of which each rank looks up the tokens of its part of the vocabulary, with zeros for the others.

    All-reduce in forward, identity in backward; with sequence parallelism reduce-scatter in forward, all-gather in backward.
    Under a split backward the all-gather belongs to the I.

    Raises:
        UsageError: the ranks do not divide the vocabulary.
    """

    def __init__(self, vocabulary: int, hidden: int, region: Region, dtype: torch.dtype | None = None) -> None:
        rows = divide(vocabulary, region.group.size, "tokens of the vocabulary")
        super().__init__(rows, hidden, dtype=dtype)
        self.region = region
        self.first = region.group.rank * rows

    def forward(self, input: Tensor) -> Tensor:
        """(…, s) tokens, the same on all ranks → (…, s, hidden), or a shard (…, s/n, hidden) with sequence parallelism."""
        if self.region.group.size == 1:
            return super().forward(input)
        if self.region.sequence:
            require_divisible(input.shape[-1], self.region.group)
        output: Tensor = _Embedding.apply(input - self.first, self.weight, self.region, self.queue)  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Copy this rank's part of the whole embedding's values."""
        self.weight.copy_(shard(weight, 0, self.region.group.rank, self.region.group.size))

    def shares(self) -> Iterable[Share]:
        return [Share(self.weight)]


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: nn.Parameter, region: Region, queue: WeightQueue | None) -> Tensor:
        foreign = (indices < 0) | (indices >= weight.shape[0])
        indices = indices.masked_fill(foreign, 0)
        ctx.save_for_backward(indices, foreign)
        ctx.weight, ctx.region, ctx.queue = weight, region, queue
        looked_up = F.embedding(indices, weight).masked_fill_(foreign.unsqueeze(-1), 0)
        if region.sequence:
            return region.group.reduce_scatter(looked_up, SEQUENCE_DIM)
        return region.group.all_reduce(looked_up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None]:
        (indices, foreign), weight, region = ctx.saved_tensors, ctx.weight, ctx.region
        (gradient,) = gradients
        if region.sequence:
            gradient = region.group.all_gather(gradient, SEQUENCE_DIM)
        local_gradient = gradient.masked_fill(foreign.unsqueeze(-1), 0)
        if ctx.queue is not None and ctx.queue.collects:
            ctx.queue.put(EmbeddingWork(weight, indices, local_gradient))
            return None, None, None, None
        return None, embedding_gradient(indices, local_gradient, weight), None, None
