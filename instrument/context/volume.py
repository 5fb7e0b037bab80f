"""How many bytes context parallelism moves, and in what units the field says so.

All figures are one rank's, for one layer and one microbatch, as communication marks count them: of an all-to-all the
whole message of the rank (as nccl-tests does, its own share included), of an exchange what it sends. Recomputing the
attention in backward adds its forward once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from instrument.context.shard import ContextShape
from instrument.context.ulysses import ulysses_kv_heads


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """One layer's attention over whole sequences. ``sum_bytes`` is the width of what gradients are summed in."""

    microbatch: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    item_bytes: int

    @property
    def sum_bytes(self) -> int:
        return max(4, self.item_bytes)


@dataclass(frozen=True, slots=True)
class Volume:
    """What one rank moves in one layer's forward and backward."""

    forward_bytes: int
    backward_bytes: int

    @property
    def bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes


def ulysses_elements(sequence: int, hidden: int, size: int, kv_hidden: int | None = None) -> int:
    """Elements per layer and sequence, forward and backward: 8 · N · d / P.

    q, k, v and the output, N · d / P elements each, in either direction (DeepSpeed-Ulysses, arXiv 2309.14509, section
    3.2, counts the forward: 4 · N · h / P). ``kv_hidden`` is the width of k and v where it differs: KV heads that
    travel times head dim.
    """
    kv_hidden = hidden if kv_hidden is None else kv_hidden
    return 4 * (hidden + kv_hidden) * sequence // size


def ring_step_bytes(chunk: int, hidden: int, item_bytes: int = 2) -> int:
    """Bytes of one step and sequence: 4 · c · d with 16-bit items.

    k and v of the c positions that a rank holds (Ring Attention, arXiv 2310.01889, section 3). ``hidden`` is the width
    of k: KV heads times head dim.
    """
    return 2 * chunk * hidden * item_bytes


def ulysses_volume(sizes: AttentionSizes, shape: ContextShape) -> Volume:
    """The all-to-alls: q, k and v in one, the output in another; the same bytes in backward."""
    if shape.ulysses == 1:
        return Volume(0, 0)
    kv_heads = ulysses_kv_heads(sizes.heads, sizes.kv_heads, shape.ulysses)
    held = sizes.sequence // shape.ring
    both = ulysses_elements(held, sizes.heads * sizes.head_dim, shape.ulysses, kv_heads * sizes.head_dim)
    each_way = sizes.microbatch * both // 2 * sizes.item_bytes
    return Volume(each_way, each_way)


def ring_volume(sizes: AttentionSizes, shape: ContextShape) -> Volume:
    """The exchanges: ring − 1 steps with k and v, and in backward as many again with their gradients' sums."""
    kv_heads = ulysses_kv_heads(sizes.heads, sizes.kv_heads, shape.ulysses) // shape.ulysses
    held = sizes.microbatch * sizes.sequence // shape.ring
    keys = ring_step_bytes(held, kv_heads * sizes.head_dim, sizes.item_bytes)
    sums = ring_step_bytes(held, kv_heads * sizes.head_dim, sizes.sum_bytes)
    steps = shape.ring - 1
    return Volume(steps * keys, steps * (keys + sums))
