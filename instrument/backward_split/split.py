"""The backward of a stage in two parts: input gradients now (I), weight gradients later (W).

Layers that can be split (:class:`Linear`, :class:`Embedding`) have most of the weights. While a stage's
:class:`WeightQueue` collects, their backward computes the input gradient alone and queues what the weight gradient
needs: the layer's input and its output's gradient. Everything else of the graph is freed with I, and what was queued
is freed by W. Other layers (norms: their weights cost next to nothing) do all of their backward in I.

Source: sail-sg zero-bubble's ``WeightGradStore`` (arXiv 2401.10241), with a queue per stage in place of a global one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from instrument.backward_split.gradients_of import add_gradient
from pptrace.errors import PptraceError


class WeightWork(Protocol):
    """A weight gradient that has yet to be computed."""

    def run(self) -> None:
        """Add it to what ``.grad`` holds. Called once."""
        ...


class WeightQueue:
    """The deferred weight gradients of one stage's running backward."""

    def __init__(self) -> None:
        self._collected: list[WeightWork] | None = None

    @property
    def collects(self) -> bool:
        """Return whether the backward that runs now is an I; otherwise a layer computes everything at once."""
        return self._collected is not None

    def put(self, work: WeightWork) -> None:
        if self._collected is None:
            raise PptraceError("a weight gradient was deferred outside of an input-gradient backward")
        self._collected.append(work)

    @contextmanager
    def collecting(self) -> Iterator[list[WeightWork]]:
        """Collect the deferred weight gradients of the backward inside this context, for its W to run."""
        collected: list[WeightWork] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None


class Splittable:
    """A module whose backward can be split: its weight gradients may be deferred to the queue of its stage."""

    queue: WeightQueue | None = None


class Linear(Splittable, nn.Linear):
    """``nn.Linear``, whose weight and bias gradients may be deferred. Without a queue it is ``nn.Linear`` itself."""

    def forward(self, input: Tensor) -> Tensor:
        if self.queue is None:
            return super().forward(input)
        output: Tensor = _Linear.apply(input, self.weight, self.bias, self.queue)  # type: ignore[no-untyped-call]
        return output


class Embedding(Splittable, nn.Embedding):
    """``nn.Embedding``, whose weight gradient may be deferred. Without a queue it is ``nn.Embedding`` itself."""

    def forward(self, input: Tensor) -> Tensor:
        if self.queue is None:
            return super().forward(input)
        output: Tensor = _Embedding.apply(input, self.weight, self.queue)  # type: ignore[no-untyped-call]
        return output


def attach(stage: nn.Module) -> WeightQueue:
    """Attach one queue to every layer of a stage that can be split."""
    queue = WeightQueue()
    for module in stage.modules():
        if isinstance(module, Splittable):
            module.queue = queue
    return queue


@dataclass(frozen=True, slots=True, eq=False)
class LinearWork:
    """Adds (output gradient)ᵀ · input, in place where a gradient is there already."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    input: Tensor  # (rows, in)
    gradient: Tensor  # (rows, out)

    def run(self) -> None:
        if self.weight.grad is None or self.weight.grad.dtype != self.input.dtype:
            add_gradient(self.weight, self.gradient.t().mm(self.input))
        else:
            self.weight.grad.addmm_(self.gradient.t(), self.input)
        if self.bias is not None:
            add_gradient(self.bias, self.gradient.sum(0))


@dataclass(frozen=True, slots=True, eq=False)
class BiasWork:
    """Adds the sum of the output gradients."""

    bias: nn.Parameter
    gradient: Tensor  # (rows, out)

    def run(self) -> None:
        add_gradient(self.bias, self.gradient.sum(0))


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingWork:
    """Adds each output gradient to the row that was looked up."""

    weight: nn.Parameter
    indices: Tensor
    gradient: Tensor

    def run(self) -> None:
        add_gradient(self.weight, embedding_gradient(self.indices, self.gradient, self.weight))


class _Linear(torch.autograd.Function):
    """Forward as ``F.linear``; backward in one part or, while the queue collects, in two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(x)
        # Not saved as tensors: hooks on those (activation checkpointing) would return copies instead of parameters.
        ctx.weight, ctx.bias, ctx.queue = weight, bias, queue
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        (gradient,) = gradients
        to_input = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        rows_out = gradient.reshape(-1, gradient.shape[-1])
        rows_in = x.detach().reshape(-1, x.shape[-1])  # detached: a view of x itself would keep the graph before it
        if ctx.queue.collects:
            ctx.queue.put(LinearWork(weight, bias, rows_in, rows_out))
            return to_input, None, None, None
        return to_input, rows_out.t().mm(rows_in), None if bias is None else rows_out.sum(0), None


class _Embedding(torch.autograd.Function):
    """Forward as ``F.embedding``; indices have no gradient, so while the queue collects nothing is left for backward."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: nn.Parameter, queue: WeightQueue) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.weight, ctx.queue = weight, queue
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None]:
        (indices,), weight = ctx.saved_tensors, ctx.weight
        (gradient,) = gradients
        if ctx.queue.collects:
            ctx.queue.put(EmbeddingWork(weight, indices, gradient))
            return None, None, None
        return None, embedding_gradient(indices, gradient, weight), None


def embedding_gradient(indices: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """The weight gradient of an embedding: each output gradient (…, hidden) added to the row that ``indices`` (…) looked up."""
    return torch.ops.aten.embedding_dense_backward(gradient, indices, weight.shape[0], -1, False)  # type: ignore[no-any-return]
