"""Ulysses: an all-to-all turns (local positions, all heads) into (all positions, local heads), and back.

DeepSpeed-Ulysses, arXiv 2309.14509, section 3.2. Each of P ranks attends over the whole sequence with 1/P of the heads. With
grouped queries that have fewer KV heads than P, each KV head is repeated until there are P: its gradient is the sum
over the ranks that used it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from instrument.collectives import AxisGroup
from instrument.linear_map import LinearMap
from pptrace.errors import UsageError


def ulysses_kv_heads(heads: int, kv_heads: int, size: int) -> int:
    """KV heads that travel, a multiple of ``size``: ``kv_heads``, or as many copies as make one for each rank.

    Raises:
        UsageError: heads do not divide among the ranks; KV heads neither divide among them nor can be repeated.
    """
    if heads % size:
        raise UsageError(
            f"{heads} heads do not divide among {size} Ulysses ranks; choose a number of ranks that divides the heads"
        )
    if kv_heads % size == 0:
        return kv_heads
    if size % kv_heads == 0:
        return size
    raise UsageError(
        f"{kv_heads} KV heads neither divide among {size} Ulysses ranks nor can each be repeated on an equal number of "
        f"them; choose a number of ranks that divides {kv_heads} or is a multiple of it"
    )


class Ulysses:
    """The all-to-alls of one group, whose ranks hold consecutive pieces of the positions in the group's order."""

    def __init__(self, group: AxisGroup) -> None:
        self.group = group

    def scatter_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(microbatch, heads, positions / P, head dim) → (microbatch, heads / P, positions, head dim), in one all-to-all.

        All-to-all in forward, the reverse all-to-all in backward.

        Raises:
            UsageError: as :func:`ulysses_kv_heads`.
        """
        size = self.group.size
        copies = ulysses_kv_heads(q.shape[1], k.shape[1], size) // k.shape[1]
        if copies > 1:
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        # Ordered by receiving rank, so that one message carries all three.
        parts = [tensor.view(tensor.shape[0], size, -1, *tensor.shape[2:]) for tensor in (q, k, v)]
        joined = torch.cat(parts, 2).flatten(1, 2)
        swapped = _HeadsForPositions.of(joined, self.heads_for_positions, self.positions_for_heads)
        q, k, v = torch.split(swapped, [part.shape[2] for part in parts], 1)
        return q, k, v

    def gather_heads(self, out: Tensor) -> Tensor:
        """(microbatch, heads / P, positions, head dim) → (microbatch, heads, positions / P, head dim).

        All-to-all in forward, the reverse all-to-all in backward.
        """
        return _PositionsForHeads.of(out, self.positions_for_heads, self.heads_for_positions)

    def heads_for_positions(self, x: Tensor) -> Tensor:
        """Exchange heads for positions; ``x`` (b, P · h, n, d) → (b, h, P · n, d)."""
        microbatch, heads, positions, head_dim = x.shape
        size = self.group.size
        pieces = x.reshape(microbatch, size, heads // size, positions, head_dim).transpose(0, 1)
        return self.group.all_to_all(pieces).movedim(0, 2).flatten(2, 3)

    def positions_for_heads(self, x: Tensor) -> Tensor:
        """Exchange positions for heads; ``x`` (b, h, P · n, d) → (b, P · h, n, d)."""
        microbatch, heads, positions, head_dim = x.shape
        size = self.group.size
        pieces = x.reshape(microbatch, heads, size, positions // size, head_dim).movedim(2, 0)
        return self.group.all_to_all(pieces).movedim(0, 1).flatten(1, 2)


class _HeadsForPositions(LinearMap):
    """All positions of some heads, and back."""


class _PositionsForHeads(LinearMap):
    """All heads of some positions, and back."""
