"""Distribution of attention heads over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from instrument.tensor.region import divide
from pptrace.errors import UsageError


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Query and KV heads of one rank, numbered as in the whole model, which has ``num_query`` and ``num_kv`` of them.

    Where there are fewer KV heads than ranks, each is held by ``copies`` ranks, and each of these computes the part of its
    gradient that comes from its query heads.
    """

    query: range
    kv: range
    num_query: int
    num_kv: int
    copies: int

    def rows(self, head_dim: int) -> tuple[range, range, range]:
        """Rows of the full fused weight [all query heads, all key heads, all value heads] that the rank holds."""
        parts = ((self.query, 0), (self.kv, self.num_query), (self.kv, self.num_query + self.num_kv))
        query, key, value = (
            range((before + heads.start) * head_dim, (before + heads.stop) * head_dim) for heads, before in parts
        )
        return query, key, value


def share_heads(heads: int, kv_heads: int, rank: int, size: int) -> HeadShare:
    """Consecutive query heads for each rank, with the KV heads that they attend to.

    Query head i attends to KV head i // (heads / kv_heads): multi-head attention where both are equal, grouped-query
    attention otherwise, multi-query attention with one KV head.

    Raises:
        UsageError: KV heads do not divide the heads, ranks do not divide the heads, or KV heads neither divide among the
            ranks nor the ranks among the KV heads.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise UsageError(
            f"{heads} attention heads do not divide among {kv_heads} KV heads; choose a divisor of {heads}"
        )
    per_rank = divide(heads, size, "attention heads")
    query = range(rank * per_rank, (rank + 1) * per_rank)
    if kv_heads % size == 0:
        per_rank = kv_heads // size
        return HeadShare(query, range(rank * per_rank, (rank + 1) * per_rank), heads, kv_heads, copies=1)
    if size % kv_heads:
        raise UsageError(
            f"{kv_heads} KV heads neither divide among {size} tensor-parallel ranks nor can each be copied to an equal "
            f"number of them; choose a multiple or a divisor of {size}"
        )
    copies = size // kv_heads
    return HeadShare(query, range(rank // copies, rank // copies + 1), heads, kv_heads, copies)
