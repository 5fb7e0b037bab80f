"""Conversions at the ends of a tensor-parallel region.

Source: Megatron-LM ``tensor_parallel/mappings.py``. The layers of :mod:`instrument.tensor.linear` do the same inside their
backward, where it can overlap with a GEMM; these are for models that put layers together in another way.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from instrument.collectives import AxisGroup
from instrument.sequence.mappings import local_part
from instrument.tensor.region import divide


def copy_to_region(x: Tensor, group: AxisGroup) -> Tensor:
    """Identity in forward, all-reduce in backward."""
    copied: Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return copied


def reduce_from_region(x: Tensor, group: AxisGroup) -> Tensor:
    """All-reduce in forward, identity in backward."""
    total: Tensor = _Reduce.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def scatter_to_region(x: Tensor, group: AxisGroup) -> Tensor:
    """Split the last dimension in forward, all-gather in backward. All ranks have the same ``x``.

    Raises:
        UsageError: the ranks do not divide the dimension.
    """
    divide(x.shape[-1], group.size, "features")
    part: Tensor = _Scatter.apply(x, group)  # type: ignore[no-untyped-call]
    return part


def gather_from_region(x: Tensor, group: AxisGroup) -> Tensor:
    """All-gather along the last dimension in forward, split in backward: what follows is the same on all ranks."""
    whole: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return whole


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(gradients[0].clone()), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:  # noqa: ARG004
        return group.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradients[0], None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return local_part(x, -1, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(gradients[0], -1), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(x, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return local_part(gradients[0], -1, ctx.group), None
