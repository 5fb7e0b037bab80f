"""Gradients of parameters that every rank of the axis tp holds, while each sees only a part of what they act on.

With sequence parallelism these are norms, biases of row-parallel layers and positions; where there are fewer KV heads than
ranks, the KV rows of a replicated head, whatever the sequence. Their gradients are summed over tp once per step.

Source: Megatron-LM ``finalize_model_grads`` (``_allreduce_non_tensor_model_parallel_grads``), which flattens as here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from instrument.backward_split import split
from instrument.backward_split.gradients_of import gradient_of
from instrument.collectives import AxisGroup


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """A parameter whose gradient is a part of a sum over the ranks.

    Row i of this rank's gradient, from ``first`` on, is a part of row ``total_rows[i − first]`` of a sum of
    ``num_total_rows`` rows; None: the whole gradient is a part of a sum of the same shape.
    """

    parameter: Tensor
    first: int = 0
    total_rows: range | None = None
    num_total_rows: int = 0

    def spread(self) -> Tensor:
        """The gradient's rows at their indices in the sum, zeros elsewhere."""
        gradient = gradient_of(self.parameter)
        if self.total_rows is None:
            return gradient
        spread = gradient.new_zeros((self.num_total_rows, *gradient.shape[1:]))
        spread[self.total_rows.start : self.total_rows.stop] = gradient[self.first : self.first + len(self.total_rows)]
        return spread

    def take(self, total: Tensor) -> None:
        """Replace the part by the sum."""
        if self.total_rows is None:
            gradient_of(self.parameter).copy_(total)
        else:
            rows = total[self.total_rows.start : self.total_rows.stop]
            gradient_of(self.parameter)[self.first : self.first + len(self.total_rows)] = rows


class HasPartial(nn.Module):
    """A module some of whose gradients are parts: where ``is_partial`` says so, those of all its direct parameters."""

    is_partial = False

    def partial_gradients(self) -> Iterable[Partial]:
        """Partial gradients of this module's direct parameters, not of its children's; in an order that all ranks share."""
        return map(Partial, self.parameters(recurse=False)) if self.is_partial else ()


class LayerNorm(HasPartial, nn.LayerNorm):
    """``nn.LayerNorm``; with ``sequence_parallel`` it acts on a sequence shard."""

    def __init__(self, hidden: int, sequence_parallel: bool, dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden, dtype=dtype)
        self.is_partial = sequence_parallel


class PositionEmbedding(HasPartial, split.Embedding):
    """:class:`instrument.backward_split.split.Embedding`; with ``sequence_parallel`` it looks up a shard's positions."""

    def __init__(self, positions: int, hidden: int, sequence_parallel: bool, dtype: torch.dtype | None = None) -> None:
        super().__init__(positions, hidden, dtype=dtype)
        self.is_partial = sequence_parallel


def partial_gradients(module: nn.Module) -> list[Partial]:
    """The partial gradients of a stage, in the order of its modules, which is the same on every rank."""
    modules = [part for part in module.modules() if isinstance(part, HasPartial)]
    return [partial for part in modules for partial in part.partial_gradients()]


def sum_partial_gradients(partials: Sequence[Partial], group: AxisGroup) -> None:
    """Replace each part by the sum over the ranks: one all-reduce for each dtype. Once per step, after all microbatches."""
    if group.size == 1:
        return
    spread = [(partial, partial.spread()) for partial in partials]
    for dtype in dict.fromkeys(tensor.dtype for _, tensor in spread):
        bucket = [(partial, tensor) for partial, tensor in spread if tensor.dtype == dtype]
        total = group.all_reduce(torch.cat([tensor.flatten() for _, tensor in bucket]))
        sums = total.split([tensor.numel() for _, tensor in bucket])  # type: ignore[no-untyped-call]
        for (partial, tensor), part in zip(bucket, sums, strict=True):
            partial.take(part.view_as(tensor))
