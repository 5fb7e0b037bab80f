"""The linear layers of several experts, each with rows of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function

from instrument.backward_split.gradients_of import gradient_dtype
from instrument.backward_split.split import Splittable, WeightQueue


class OfExperts(nn.Module):
    """A module whose direct parameters are those of this rank's experts: their gradients are summed over edp alone."""


class ExpertLinear(Splittable, OfExperts):
    """y = x·W_eᵀ + b_e, where e is the expert of a row.

    The weights of all experts are one parameter, so that an expert without rows has a gradient, of zeros, and ranks report the
    same parameters ready.

    Args:
        experts: ids of this rank's experts in the layer.
        features_in: of each.
        features_out: of each.
    """

    def __init__(
        self, experts: range, features_in: int, features_out: int, bias: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(len(experts), features_out, features_in, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(len(experts), features_out, dtype=dtype)) if bias else None

    def forward(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The rows (…, in) of each expert → (…, out)."""
        outputs: Sequence[Tensor] = _Linear.apply(self.weight, self.bias, self.queue, *parts)  # type: ignore[no-untyped-call]
        return outputs

    @torch.no_grad()
    def take(self, whole: ExpertLinear) -> None:
        """Copy this rank's experts of a layer that has all of them."""
        held = slice(self.experts.start, self.experts.stop)
        self.weight.copy_(whole.weight[held])
        if self.bias is not None and whole.bias is not None:
            self.bias.copy_(whole.bias[held])


def expert_parameters(stage: nn.Module) -> list[nn.Parameter]:
    """The parameters of the experts of a stage, in the order of its modules."""
    modules = [module for module in stage.modules() if isinstance(module, OfExperts)]
    return [parameter for module in modules for parameter in module.parameters(recurse=False)]


@dataclass(frozen=True, slots=True, eq=False)
class _ExpertWork:
    """Adds each expert's (output gradient)ᵀ · input."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    parts: Sequence[Tensor]
    gradients: Sequence[Tensor]

    def run(self) -> None:
        _add(self.weight, _weight_gradient(self.parts, self.gradients))
        if self.bias is not None:
            _add(self.bias, _bias_gradient(self.gradients))


class _Linear(Function):
    """One expert after another, each with a tensor of its own, which caches hold better than one of all rows."""

    @staticmethod
    def forward(
        ctx: Any, weight: nn.Parameter, bias: nn.Parameter | None, queue: WeightQueue | None, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*parts)
        # Not saved as tensors: hooks on those (activation checkpointing) would return copies instead of parameters.
        ctx.weight, ctx.bias, ctx.queue = weight, bias, queue
        biases = [None] * len(parts) if bias is None else bias
        return tuple(F.linear(part, weight[expert], biases[expert]) for expert, part in enumerate(parts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts, weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        to_parts: list[Tensor | None] = [
            gradient.mm(weight[expert]) if needed else None
            for expert, (gradient, needed) in enumerate(zip(gradients, ctx.needs_input_grad[3:], strict=True))
        ]
        if ctx.queue is not None and ctx.queue.collects:
            ctx.queue.put(_ExpertWork(weight, bias, [part.detach() for part in parts], gradients))
            return None, None, None, *to_parts
        to_bias = None if bias is None else _bias_gradient(gradients)
        return _weight_gradient(parts, gradients), to_bias, None, *to_parts


def _weight_gradient(parts: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """(experts, out, in): zeros for an expert without rows."""
    total = parts[0].new_empty(len(parts), gradients[0].shape[1], parts[0].shape[1])
    for expert, (gradient, part) in enumerate(zip(gradients, parts, strict=True)):
        torch.mm(gradient.t(), part, out=total[expert])
    return total


def _bias_gradient(gradients: Sequence[Tensor]) -> Tensor:
    """(experts, out): zeros for an expert without rows."""
    return torch.stack([gradient.sum(0) for gradient in gradients])


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        parameter.grad += gradient
