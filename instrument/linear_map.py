"""Linear maps of tensors, such as communication, whose gradients take the transposed way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Map = Callable[[Tensor], Tensor]


class LinearMap(Function):
    """A map in forward, its transpose in backward; differentiable once. Its subclasses name nodes of autograd's graph."""

    @classmethod
    def of(cls, x: Tensor, forward: Map, backward: Map) -> Tensor:
        """``forward(x)``, the gradient of which goes through ``backward``."""
        mapped: Tensor = cls.apply(x, forward, backward)  # type: ignore[no-untyped-call]
        return mapped

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.transposed = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed(gradients[0]), None, None
