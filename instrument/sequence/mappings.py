"""Conversions between whole sequences and sequence shards, at the ends of a sequence-parallel region.

Source: Megatron-LM ``tensor_parallel/mappings.py``; here the sequence is the last dimension but one, (…, sequence, hidden).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from instrument.collectives import AxisGroup
from instrument.sequence.overlap import SEQUENCE_DIM
from pptrace.errors import UsageError


def require_divisible(sequence: int, group: AxisGroup) -> None:
    """Refuse a sequence that cannot be cut into equal shards.

    Raises:
        UsageError: the ranks do not divide it.
    """
    if sequence % group.size:
        raise UsageError(
            f"sequence parallelism cuts a sequence of {sequence} into {group.size} shards, one for each rank of "
            f"{group.axis}; choose a multiple of {group.size}"
        )


def local_part(x: Tensor, dim: int, group: AxisGroup) -> Tensor:
    """This rank's part of ``x`` along ``dim``."""
    return x.chunk(group.size, dim)[group.rank].contiguous()


def scatter_to_sequence(x: Tensor, group: AxisGroup) -> Tensor:
    """Split in forward (…, s, h) → (…, s/n, h), all-gather in backward. All ranks have the same ``x``.

    Raises:
        UsageError: the ranks do not divide the sequence.
    """
    require_divisible(x.shape[SEQUENCE_DIM], group)
    shard: Tensor = _Scatter.apply(x, group)  # type: ignore[no-untyped-call]
    return shard


def gather_from_sequence(x: Tensor, group: AxisGroup) -> Tensor:
    """All-gather in forward (…, s/n, h) → (…, s, h), split in backward: what follows is the same on all ranks."""
    whole: Tensor = _Gather.apply(x, group, False)  # type: ignore[no-untyped-call]
    return whole


def gather_for_tensor_parallel(x: Tensor, group: AxisGroup) -> Tensor:
    """All-gather in forward (…, s/n, h) → (…, s, h), reduce-scatter in backward: what follows differs by rank."""
    whole: Tensor = _Gather.apply(x, group, True)  # type: ignore[no-untyped-call]
    return whole


def reduce_scatter_to_sequence(x: Tensor, group: AxisGroup) -> Tensor:
    """Reduce-scatter in forward (…, s, h) → (…, s/n, h), all-gather in backward.

    Raises:
        UsageError: the ranks do not divide the sequence.
    """
    require_divisible(x.shape[SEQUENCE_DIM], group)
    shard: Tensor = _ReduceScatter.apply(x, group)  # type: ignore[no-untyped-call]
    return shard


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return local_part(x, SEQUENCE_DIM, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(gradients[0], SEQUENCE_DIM), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, partial: bool) -> Tensor:
        ctx.group, ctx.partial = group, partial
        return group.all_gather(x, SEQUENCE_DIM)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if ctx.partial:
            return ctx.group.reduce_scatter(gradient, SEQUENCE_DIM), None, None
        return local_part(gradient, SEQUENCE_DIM, ctx.group), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return group.reduce_scatter(x, SEQUENCE_DIM)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(gradients[0], SEQUENCE_DIM), None
