"""Attention of a decoder's tokens over what its encoder has made of the source."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from instrument.models.parallel import Parallel
from instrument.sequence.partial import LayerNorm
from instrument.tensor.heads import HeadShare
from instrument.tensor.linear import ColumnParallelLinear, QkvParallelLinear, RowParallelLinear


class CrossAttention(nn.Module):
    """Queries of (microbatch, sequence, hidden) over keys and values of (microbatch, source, hidden); with SP of shards of both.

    Source: Megatron-LM ``CrossAttention`` in ``core/transformer/attention.py``, whose keys and values are one projection too.
    """

    def __init__(
        self, hidden: int, head_dim: int, share: HeadShare, parallel: Parallel, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        region = parallel.region
        self.parallel = parallel
        self.head_dim = head_dim
        self.norm = LayerNorm(hidden, region.shards_sequence, dtype)
        self.query = ColumnParallelLinear(hidden, hidden, region, dtype=dtype)
        without_query = replace(share, query=range(0), num_query=0)
        self.keys = QkvParallelLinear(hidden, head_dim, without_query, region, dtype=dtype)
        self.out = RowParallelLinear(hidden, hidden, region, dtype=dtype)

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q of this rank's heads (microbatch, heads, sequence, head dim), k and v of its KV heads over the source."""
        q = self.query(self.norm(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        _, k, v = self.keys.heads(self.keys(memory))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(microbatch, sequence, this rank's heads · head dim)."""
        return self.parallel.attend(q, k, v, causal=False).transpose(1, 2).flatten(2)

    def take(self, whole: CrossAttention) -> None:
        """Copy this rank's part of the whole layer's values."""
        self.norm.load_state_dict(whole.norm.state_dict())
        self.query.take(whole.query.weight, whole.query.bias)
        self.keys.take(whole.keys.weight, whole.keys.bias)
        self.out.take(whole.out.weight, whole.out.bias)
