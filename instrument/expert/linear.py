"""The linear layers of several experts, each with rows of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
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

    def forward(self, rows: Tensor, rows_of_expert: Sequence[int]) -> Tensor:
        """(rows, in), one expert after another, ``rows_of_expert`` of each → (rows, out)."""
        output: Tensor = _Linear.apply(rows, self.weight, self.bias, rows_of_expert, self.queue)  # type: ignore[no-untyped-call]
        return output

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
    rows: Tensor
    gradient: Tensor
    rows_of_expert: Sequence[int]

    def run(self) -> None:
        _add(self.weight, _weight_gradient(self.rows, self.gradient, self.rows_of_expert))
        if self.bias is not None:
            _add(self.bias, _bias_gradient(self.gradient, self.rows_of_expert))


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        rows_of_expert: Sequence[int],
        queue: WeightQueue | None,
    ) -> Tensor:
        ctx.save_for_backward(rows)
        # Not saved as tensors: hooks on those (activation checkpointing) would return copies instead of parameters.
        ctx.weight, ctx.bias, ctx.rows_of_expert, ctx.queue = weight, bias, rows_of_expert, queue
        output = rows.new_empty(len(rows), weight.shape[1])
        parts = zip(_parts(rows, rows_of_expert), _parts(output, rows_of_expert), strict=True)
        for expert, (part, into) in enumerate(parts):
            if bias is None:
                torch.mm(part, weight[expert].t(), out=into)
            else:
                torch.addmm(bias[expert], part, weight[expert].t(), out=into)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (rows,), weight, splits = ctx.saved_tensors, ctx.weight, ctx.rows_of_expert
        gradient = gradients[0].contiguous()
        to_rows = None
        if ctx.needs_input_grad[0]:
            to_rows = gradient.new_empty(len(gradient), weight.shape[2])
            parts = zip(_parts(gradient, splits), _parts(to_rows, splits), strict=True)
            for expert, (part, into) in enumerate(parts):
                torch.mm(part, weight[expert], out=into)
        if ctx.queue is not None and ctx.queue.collects:
            ctx.queue.put(_ExpertWork(weight, ctx.bias, rows.detach(), gradient, splits))
            return to_rows, None, None, None, None
        to_bias = None if ctx.bias is None else _bias_gradient(gradient, splits)
        return to_rows, _weight_gradient(rows, gradient, splits), to_bias, None, None


def _weight_gradient(rows: Tensor, gradient: Tensor, rows_of_expert: Sequence[int]) -> Tensor:
    """(experts, out, in): zeros for an expert without rows."""
    total = rows.new_empty(len(rows_of_expert), gradient.shape[1], rows.shape[1])
    parts = zip(_parts(gradient, rows_of_expert), _parts(rows, rows_of_expert), strict=True)
    for expert, (out, into) in enumerate(parts):
        torch.mm(out.t(), into, out=total[expert])
    return total


def _bias_gradient(gradient: Tensor, rows_of_expert: Sequence[int]) -> Tensor:
    """(experts, out): zeros for an expert without rows."""
    return torch.stack([part.sum(0) for part in _parts(gradient, rows_of_expert)])


def _parts(rows: Tensor, rows_of_expert: Sequence[int]) -> Sequence[Tensor]:
    """The rows of each expert."""
    return torch.split(rows, list(rows_of_expert))


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        parameter.grad += gradient
