"""Averages of gradients over the ranks that hold equal parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from instrument.collectives import AxisGroup
from instrument.optim.buckets import Bucket, Mean, OverlappedMean, WholeMean, make_buckets
from instrument.optim.main_parameters import Shards


class Averages:
    """The buckets of parameters that the same ranks hold, and how these average them.

    Args:
        early: parameters whose gradients may leave during the backward, in the order in which it completes them.
        late: those whose parts are summed first.
        replicas: the ranks that hold them.
        divisor: of the sums over these. A mean over replicas where each has its own tokens; experts' gradients are sums over
            the tokens of more ranks already, and their divisor is that of all others.
        bucket_bytes: how much is averaged by one call.
        is_sharded: each replica updates a part (ZeRO-1).
    """

    def __init__(
        self,
        early: Sequence[nn.Parameter],
        late: Sequence[nn.Parameter],
        replicas: AxisGroup,
        divisor: int,
        bucket_bytes: int,
        is_sharded: bool,
    ) -> None:
        multiple = replicas.size if is_sharded else 1
        early_buckets = list(make_buckets(early, bucket_bytes, multiple))
        self.late_buckets: list[Bucket] = list(make_buckets(late, bucket_bytes, multiple))
        self.shards = Shards([*early_buckets, *self.late_buckets], replicas, divisor) if is_sharded else None
        self.mean: Mean = self.shards or WholeMean(replicas, divisor)
        changes = is_sharded or max(replicas.size, divisor) > 1
        self.overlapped = OverlappedMean(early_buckets, self.mean) if changes else None
