"""The matrices of a rank's experts, and what the experts make of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function

from instrument.backward_split.gradients_of import gradient_dtype
from instrument.backward_split.split import Splittable
from pptrace.errors import UsageError


class OfExperts(nn.Module):
    """A module whose direct parameters are those of this rank's experts: their gradients are summed over edp alone."""


@dataclass(frozen=True, slots=True)
class Held:
    """The part of a layer's experts that a rank has: of each one, the ``rank``-th of ``size`` equal parts of its inner width."""

    experts: range
    rank: int = 0
    size: int = 1

    def part(self, width: int) -> slice:
        """Raise UsageError where the ranks do not divide the width."""
        if width % self.size:
            raise UsageError(
                f"experts of width {width} do not divide among etp={self.size} ranks; choose a multiple of {self.size}"
            )
        length = width // self.size
        return slice(self.rank * length, (self.rank + 1) * length)


class ExpertLinear(Splittable, OfExperts):
    """One of the two matrices W_e of each expert, and its bias b_e.

    The weights of all experts are one parameter, so that an expert without rows has a gradient, of zeros, and ranks report the
    same parameters ready. Where ranks share each expert, the inner layer's outputs and the outer's inputs are cut; the
    outer bias, which all of them have, is added by the first, and all see the gradients that it is the sum of.

    Args:
        held: this rank's part.
        features_in: of a whole expert.
        features_out: of a whole expert.
        is_inner: whether this is the inner layer.
    """

    def __init__(
        self,
        held: Held,
        features_in: int,
        features_out: int,
        is_inner: bool,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.held = held
        self._rows = held.part(features_out) if is_inner else slice(0, features_out)
        self._columns = slice(0, features_in) if is_inner else held.part(features_in)
        num, rows, columns = len(held.experts), *(part.stop - part.start for part in (self._rows, self._columns))
        self.weight = nn.Parameter(torch.empty(num, rows, columns, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num, rows, dtype=dtype)) if bias else None
        self._whole = (features_out, features_in)
        self.adds_bias = is_inner or held.rank == 0
        self.has_copies = not is_inner and held.size > 1

    @property
    def experts(self) -> range:
        """Ids of this rank's experts in the layer."""
        return self.held.experts

    @torch.no_grad()
    def take(self, whole: ExpertLinear) -> None:
        """Copy this rank's part of a layer that has all experts."""
        held = slice(self.experts.start, self.experts.stop)
        self.weight.copy_(whole.weight[held, self._rows, self._columns])
        if self.bias is not None and whole.bias is not None:
            self.bias.copy_(whole.bias[held, self._rows])

    @torch.no_grad()
    def draw(self, index: int, std: float, generator: torch.Generator) -> None:
        """Draw the whole matrix of one of this rank's experts, and keep this rank's part; its bias is 0."""
        whole = torch.empty(self._whole, dtype=self.weight.dtype).normal_(std=std, generator=generator)
        self.weight[index] = whole[self._rows, self._columns]
        if self.bias is not None:
            self.bias[index].zero_()


def expert_parameters(stage: nn.Module) -> list[nn.Parameter]:
    """The parameters of the experts of a stage, in the order of its modules."""
    modules = [module for module in stage.modules() if isinstance(module, OfExperts)]
    return [parameter for module in modules for parameter in module.parameters(recurse=False)]


def copied_biases(stage: nn.Module) -> list[nn.Parameter]:
    """The parameters of a stage's experts that every rank of etp has, where there are several."""
    modules = [module for module in stage.modules() if isinstance(module, ExpertLinear) and module.has_copies]
    return [module.bias for module in modules if module.bias is not None]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWork:
    """The weight gradients of one layer of a rank's experts: each one's (output gradient)ᵀ · input."""

    layer: ExpertLinear
    parts: Sequence[Tensor]
    gradients: Sequence[Tensor]

    def gradient(self) -> tuple[Tensor, Tensor | None]:
        """The gradients of the weight (experts, out, in) and of the bias: zeros for an expert without rows."""
        parts, gradients = self.parts, self.gradients
        total = parts[0].new_empty(len(parts), gradients[0].shape[1], parts[0].shape[1])
        for expert, (gradient, part) in enumerate(zip(gradients, parts, strict=True)):
            torch.mm(gradient.t(), part, out=total[expert])
        return total, None if self.layer.bias is None else torch.stack([gradient.sum(0) for gradient in gradients])

    def run(self) -> None:
        """Add them to what ``.grad`` holds."""
        weight, bias = self.gradient()
        _add(self.layer.weight, weight)
        if self.layer.bias is not None and bias is not None:
            _add(self.layer.bias, bias)


class LateWeights:
    """Weight gradients that are computed while the gradients of tokens travel.

    In a forward :meth:`aliases` stand for the parameters. They are made before the tokens arrive, so that backward comes to them
    when it has sent their gradients on; the gradients of the aliases are nothing until then.
    """

    __slots__ = ("work",)

    def __init__(self) -> None:
        self.work: tuple[ExpertWork, ExpertWork] | None = None

    def aliases(self, inner: ExpertLinear, outer: ExpertLinear) -> tuple[Tensor | None, ...]:
        """Aliases of the weight and the bias of both layers."""
        made: tuple[Tensor | None, ...] = _Alias.apply(self, *_parameters(inner, outer))  # type: ignore[no-untyped-call]
        return made


def run_experts(
    rows: Tensor,
    rows_of_expert: Sequence[int],
    inner: ExpertLinear,
    outer: ExpertLinear,
    late: LateWeights | None = None,
    aliases: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """gelu(x·W1_eᵀ + b1_e)·W2_eᵀ + b2_e of rows (…, h), one expert after another, so many of each.

    Args:
        late: computes the weight gradients, where ``aliases``, which it made, stand for the parameters.
    """
    run = _Run(inner, outer, list(rows_of_expert), late)
    output: Tensor = _Experts.apply(rows, run, *(aliases or _parameters(inner, outer)))  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    inner: ExpertLinear
    outer: ExpertLinear
    rows_of_expert: list[int]
    late: LateWeights | None


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
        queue = run.inner.queue
        is_split = queue is not None and queue.collects
        whole = None if is_split or run.late is not None else _Gradients.of(run)
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
        if queue is not None and is_split:
            for each in reversed(work):
                queue.put(each)
            return to_rows, None, None, None, None, None
        assert run.late is not None
        run.late.work = work
        nothing = (
            None if parameter is None else parameter.new_zeros(()).expand_as(parameter)
            for parameter in _parameters(run.inner, run.outer)
        )
        return to_rows, None, *nothing


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


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        parameter.grad += gradient
