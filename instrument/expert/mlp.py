"""The MLP of each of a rank's experts: what they make of their rows, and the gradients of their weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function

from instrument.backward_split.gradients_of import add_gradient
from instrument.expert.grouped import RowGroups
from instrument.expert.linear import ExpertLinear


class LayerWork(ABC):
    """The weight gradients of one layer of a rank's experts: each one's (output gradient)ᵀ · input."""

    layer: ExpertLinear

    @abstractmethod
    def gradient(self) -> tuple[Tensor, Tensor | None]:
        """The gradients of the weight (experts, out, in) and of the bias: zeros for an expert without rows."""

    def run(self) -> None:
        """Add them to what ``.grad`` holds."""
        weight, bias = self.gradient()
        add_gradient(self.layer.weight, weight)
        if self.layer.bias is not None and bias is not None:
            add_gradient(self.layer.bias, bias)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWork(LayerWork):
    """Weight gradients of one expert after another, by the inputs and the output gradients of each."""

    layer: ExpertLinear
    parts: Sequence[Tensor]
    gradients: Sequence[Tensor]

    def gradient(self) -> tuple[Tensor, Tensor | None]:
        parts, gradients = self.parts, self.gradients
        total = parts[0].new_empty(len(parts), gradients[0].shape[1], parts[0].shape[1])
        for expert, (gradient, part) in enumerate(zip(gradients, parts, strict=True)):
            torch.mm(gradient.t(), part, out=total[expert])
        return total, None if self.layer.bias is None else torch.stack([gradient.sum(0) for gradient in gradients])


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWork(LayerWork):
    """Weight gradients of all experts at once, by the inputs and the output gradients of all rows."""

    layer: ExpertLinear
    rows: Tensor
    to_output: Tensor
    groups: RowGroups

    def gradient(self) -> tuple[Tensor, Tensor | None]:
        weight = self.groups.outer(self.to_output, self.rows)
        return weight, None if self.layer.bias is None else self.groups.sum(self.to_output)


class LateWeights:
    """Weight gradients that are computed while the gradients of tokens travel.

    In a forward :meth:`aliases` stand for the parameters. They are made before the tokens arrive, so that backward comes to them
    when it has sent their gradients on; the gradients of the aliases are nothing until then.
    """

    __slots__ = ("work",)

    def __init__(self) -> None:
        self.work: tuple[LayerWork, LayerWork] | None = None

    def aliases(self, inner: ExpertLinear, outer: ExpertLinear) -> tuple[Tensor | None, ...]:
        """Aliases of the weight and the bias of both layers."""
        made: tuple[Tensor | None, ...] = _Alias.apply(self, *_parameters(inner, outer))  # type: ignore[no-untyped-call]
        return made


def run_experts(
    rows: Tensor,
    rows_of_expert: Sequence[int],
    inner: ExpertLinear,
    outer: ExpertLinear,
    grouped: bool = False,
    late: LateWeights | None = None,
    aliases: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """gelu(x·W1_eᵀ + b1_e)·W2_eᵀ + b2_e of rows (…, h), one expert after another, so many of each.

    Args:
        grouped: multiplies the rows of all experts at once (:mod:`instrument.expert.grouped`).
        late: computes the weight gradients, where ``aliases``, which it made, stand for the parameters.
    """
    run = _Run(inner, outer, list(rows_of_expert), late)
    kind = _GroupedExperts if grouped else _Experts
    output: Tensor = kind.apply(rows, run, *(aliases or _parameters(inner, outer)))  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """One forward of both layers of a rank's experts; ``late`` has weight gradients computed while gradients of tokens travel."""

    inner: ExpertLinear
    outer: ExpertLinear
    rows_of_expert: list[int]
    late: LateWeights | None

    @property
    def is_split(self) -> bool:
        """Return whether weight gradients are deferred to the queue of the stage."""
        return self.inner.queue is not None and self.inner.queue.collects

    @property
    def defers(self) -> bool:
        """Return whether weight gradients come later."""
        return self.is_split or self.late is not None

    def defer(self, work: tuple[LayerWork, LayerWork]) -> tuple[Tensor | None, ...]:
        """Keep the work of both layers for later; what the parameters, or their aliases, get until then."""
        if self.is_split and self.inner.queue is not None:
            for each in reversed(work):
                self.inner.queue.put(each)
            return (None,) * 4
        assert self.late is not None
        self.late.work = work
        parameters = _parameters(self.inner, self.outer)
        return tuple(None if each is None else each.new_zeros(()).expand_as(each) for each in parameters)


def _parameters(inner: ExpertLinear, outer: ExpertLinear) -> tuple[nn.Parameter | None, ...]:
    return inner.weight, inner.bias, outer.weight, outer.bias


class _Alias(Function):
    @staticmethod
    def forward(ctx: Any, late: LateWeights, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.late = late
        ctx.set_materialize_grads(False)
        return tuple(None if parameter is None else parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        work, ctx.late.work = ctx.late.work, None
        return (None, None, None, None, None) if work is None else (None, *work[0].gradient(), *work[1].gradient())


class _Experts(Function):
    """One expert after another, each with tensors of its own, which caches hold better than one of all rows; what the experts
    return is written side by side.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, run: _Run, *parameters: Tensor | None) -> Tensor:
        inner, inner_bias, outer, outer_bias = parameters
        assert inner is not None
        assert outer is not None
        # Backward reads the parameters: hooks on saved tensors (activation checkpointing) would return copies of them.
        ctx.run = run
        output = rows.new_empty(len(rows), outer.shape[1])
        parts: Sequence[Tensor] = torch.split(rows, run.rows_of_expert)
        hidden, active = [], []
        for expert, (part, result) in enumerate(zip(parts, torch.split(output, run.rows_of_expert), strict=True)):
            hidden.append(F.linear(part, inner[expert], None if inner_bias is None else inner_bias[expert]))
            active.append(F.gelu(hidden[-1]))
            if outer_bias is None or not run.outer.adds_bias:
                torch.mm(active[-1], outer[expert].t(), out=result)
            else:
                torch.addmm(outer_bias[expert], active[-1], outer[expert].t(), out=result)
        ctx.save_for_backward(rows, *hidden, *active)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *kept = ctx.saved_tensors
        run: _Run = ctx.run
        num = len(run.rows_of_expert)
        hidden, active = kept[:num], kept[num:]
        to_rows = torch.empty_like(rows)
        parts: Sequence[Tensor] = torch.split(rows.detach(), run.rows_of_expert)
        outputs: Sequence[Tensor] = torch.split(gradients[0], run.rows_of_expert)
        whole = None if run.defers else _Gradients.of(run)
        to_hidden = []
        for expert, to_part in enumerate(torch.split(to_rows, run.rows_of_expert)):
            gradient = outputs[expert].mm(run.outer.weight[expert])
            torch.ops.aten.gelu_backward(gradient, hidden[expert], grad_input=gradient)
            torch.mm(gradient, run.inner.weight[expert], out=to_part)
            if whole is None:
                to_hidden.append(gradient)
            else:  # while caches have it
                whole.add(expert, (parts[expert], gradient), (active[expert], outputs[expert]))
        if whole is not None:
            return to_rows, None, *whole.all
        work = (ExpertWork(run.inner, parts, to_hidden), ExpertWork(run.outer, active, outputs))
        return to_rows, None, *run.defer(work)


class _GroupedExperts(Function):
    """All experts at once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, run: _Run, *parameters: Tensor | None) -> Tensor:
        inner, inner_bias, outer, outer_bias = parameters
        assert inner is not None
        assert outer is not None
        ctx.run = run  # as in _Experts
        groups = RowGroups.of(run.rows_of_expert, rows, inner, outer)
        hidden = groups.multiply(rows, inner.transpose(1, 2), inner_bias)
        active = F.gelu(hidden)
        ctx.save_for_backward(rows, hidden, active)
        return groups.multiply(active, outer.transpose(1, 2), outer_bias if run.outer.adds_bias else None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden, active = ctx.saved_tensors
        run: _Run = ctx.run
        gradient = gradients[0].contiguous()
        groups = RowGroups.of(run.rows_of_expert, gradient, rows, run.inner.weight, run.outer.weight)
        to_hidden = groups.multiply(gradient, run.outer.weight)
        torch.ops.aten.gelu_backward(to_hidden, hidden, grad_input=to_hidden)
        to_rows = groups.multiply(to_hidden, run.inner.weight)
        work = (
            GroupedWork(run.inner, rows.detach(), to_hidden, groups),
            GroupedWork(run.outer, active, gradient, groups),
        )
        if run.defers:
            return to_rows, None, *run.defer(work)
        return to_rows, None, *work[0].gradient(), *work[1].gradient()


@dataclass(frozen=True, slots=True, eq=False)
class _Gradients:
    """The gradients of the parameters of both layers, expert by expert."""

    all: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, run: _Run) -> _Gradients:
        parameters = _parameters(run.inner, run.outer)
        return cls(tuple(None if parameter is None else torch.empty_like(parameter) for parameter in parameters))

    def add(self, expert: int, *layers: tuple[Tensor, Tensor]) -> None:
        """Compute those of one expert, from the inputs and the output gradients of its two layers."""
        for (rows, gradient), weight, bias in zip(layers, self.all[::2], self.all[1::2], strict=True):
            assert weight is not None
            torch.mm(gradient.t(), rows, out=weight[expert])
            if bias is not None:
                torch.sum(gradient, 0, out=bias[expert])
