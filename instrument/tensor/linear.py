"""Linear layers cut by outputs (column) or by inputs (row).

A column-parallel layer followed by a row-parallel one needs one all-reduce of b·s·h in forward, after the second, and one in
backward, before the first; with sequence parallelism an all-gather before and a reduce-scatter after replace it.
Source: Megatron-LM ``tensor_parallel/layers.py`` (arXiv 1909.08053, 2205.05198).

Under a split backward (:mod:`instrument.backward_split.split`) every collective belongs to the I, so that no W waits for another
rank. What a column-parallel layer keeps from forward to I is its sequence shard; I gathers it again, as Megatron does, and
the whole input is kept from I to W only. A row-parallel layer keeps the whole gradient of its output from I to W.

Overlap: where a column-parallel layer without sequence parallelism runs its whole backward at once, the all-reduce of the
input's gradient overlaps with the weight gradient. With sequence parallelism, GEMMs of a forward and the row-parallel layer's
input gradient are cut into chunks, and the column-parallel layer's backward gathers its input during the input gradient
and scatters that during the weight gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd import Function

from instrument.backward_split import split
from instrument.backward_split.split import BiasWork, LinearWork, WeightQueue
from instrument.collectives import Pending, completed
from instrument.sequence.overlap import SEQUENCE_DIM, gather_matmul, matmul_scatter
from instrument.sequence.partial import HasPartial, Partial
from instrument.sequence.shards import require_divisible
from instrument.tensor.heads import HeadShare
from instrument.tensor.region import Region, divide, shard, take_rows
from instrument.tensor.shards import HasShares, Share


class ColumnParallelLinear(HasShares, split.Linear):
    """y = x·Wᵀ + b, of whose outputs this rank has some: W and b are cut by rows.

    Identity in forward, all-reduce of the input's gradient in backward; with sequence parallelism all-gather of the input
    in forward, and in backward all-gather of the input and reduce-scatter of its gradient.

    Args:
        features_in: of the whole layer.
        features_out: of the whole layer.
        region: how the ranks work together.
        rows: the outputs of this rank; left out, equal consecutive parts.

    Raises:
        UsageError: the ranks do not divide ``features_out``.
    """

    def __init__(
        self,
        features_in: int,
        features_out: int,
        region: Region,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        rows: Sequence[range] | None = None,
    ) -> None:
        if rows is None:
            length = divide(features_out, region.group.size, "outputs of a column-parallel layer")
            rows = (range(region.group.rank * length, (region.group.rank + 1) * length),)
        super().__init__(features_in, sum(map(len, rows)), bias, dtype=dtype)
        self.region = region
        self.rows = tuple(rows)

    def forward(self, input: Tensor) -> Tensor:
        """(…, s, in), or a shard (…, s/n, in) with sequence parallelism → (…, s, this rank's outputs)."""
        if self.region.group.size == 1:
            return super().forward(input)
        output: Tensor = _Column.apply(input, self.weight, self.bias, self.region, self.queue)  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def take(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy this rank's part of the whole layer's values."""
        self.weight.copy_(take_rows(weight, self.rows))
        if bias is not None:
            self.bias.copy_(take_rows(bias, self.rows))

    def shares(self) -> Iterable[Share]:
        return [Share(parameter) for parameter in self.parameters(recurse=False)]


class QkvParallelLinear(HasPartial, ColumnParallelLinear):
    """The fused projection to the queries, keys and values of this rank's heads, in this order.

    The whole weight has the rows [all query heads, all key heads, all value heads]. The gradient of a KV head that
    several ranks hold is the sum of theirs (:mod:`instrument.sequence.partial`).
    """

    def __init__(
        self,
        hidden: int,
        head_dim: int,
        share: HeadShare,
        region: Region,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        features_out = (share.num_query + 2 * share.num_kv) * head_dim
        super().__init__(hidden, features_out, region, bias, dtype, share.rows(head_dim))
        self.share = share
        self.head_dim = head_dim

    def heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This layer's output (b, s, …) as q (b, query heads, s, d), k and v (b, KV heads, s, d)."""
        sizes = [(len(rows) // self.head_dim, self.head_dim) for rows in self.rows]
        query, key, _ = map(len, self.rows)
        parts = projected.tensor_split((query, query + key), -1)
        q, k, v = (part.view(*part.shape[:-1], *size).transpose(1, 2) for part, size in zip(parts, sizes, strict=True))
        return q, k, v

    def partial_gradients(self) -> Iterable[Partial]:
        if self.share.copies == 1:
            return
        query, key, _ = map(len, self.rows)
        total_rows = range(self.share.kv.start * self.head_dim, self.share.kv.stop * self.head_dim)
        for parameter in self.parameters(recurse=False):
            for first in (query, query + key):
                yield Partial(parameter, first, total_rows, self.share.num_kv * self.head_dim)

    def shares(self) -> Iterable[Share]:
        """Shares of weight and bias: of the copies of a KV head the first rank counts its copy, the others only queries."""
        is_first = self.region.group.rank % self.share.copies == 0
        rows = None if is_first else len(self.rows[0])
        return [Share(parameter, rows) for parameter in self.parameters(recurse=False)]


class RowParallelLinear(HasPartial, HasShares, split.Linear):
    """y = x·Wᵀ + b, of whose inputs this rank has some: W is cut by columns, b is whole on every rank.

    All-reduce in forward, identity in backward; with sequence parallelism reduce-scatter in forward, all-gather in
    backward. The bias is added once, after the sum.

    Args:
        features_in: of the whole layer.
        features_out: of the whole layer.
        region: how the ranks work together.

    Raises:
        UsageError: the ranks do not divide ``features_in``.
    """

    def __init__(
        self,
        features_in: int,
        features_out: int,
        region: Region,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        length = divide(features_in, region.group.size, "inputs of a row-parallel layer")
        super().__init__(length, features_out, bias, dtype=dtype)
        self.region = region

    def forward(self, input: Tensor) -> Tensor:
        """(…, s, this rank's inputs) → (…, s, out), or a shard (…, s/n, out) with sequence parallelism."""
        if self.region.group.size == 1:
            return super().forward(input)
        if self.region.sequence:
            require_divisible(input.shape[SEQUENCE_DIM], self.region.group)
        output: Tensor = _Row.apply(input, self.weight, self.bias, self.region, self.queue)  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def take(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy this rank's part of the whole layer's values."""
        self.weight.copy_(shard(weight, 1, self.region.group.rank, self.region.group.size))
        if bias is not None:
            self.bias.copy_(bias)

    def partial_gradients(self) -> Iterable[Partial]:
        return [Partial(self.bias)] if self.bias is not None and self.region.shards_sequence else []

    def shares(self) -> Iterable[Share]:
        return [Share(self.weight)]


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None, None]


class _Column(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, region: Region, queue: WeightQueue | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        # Not saved as tensors: hooks on those (activation checkpointing) would return copies instead of parameters.
        ctx.weight, ctx.bias, ctx.region, ctx.queue = weight, bias, region, queue
        if not region.sequence:
            return F.linear(x, weight, bias)
        if not region.overlap:
            return F.linear(region.group.all_gather(x, SEQUENCE_DIM), weight, bias)
        product, _ = gather_matmul(x, weight.t(), region.group)
        return product if bias is None else product.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        (x,), weight, region = ctx.saved_tensors, ctx.weight, ctx.region
        (gradient,) = gradients
        whole = _whole_input(x.detach(), region)  # detached: a view of x itself would keep the graph before it
        summed = None
        if ctx.needs_input_grad[0]:
            summed = _sum_input_gradient(gradient.matmul(weight), region)
        to_weights = _weight_gradients(ctx.queue, weight, ctx.bias, whole.wait(), gradient)
        return None if summed is None else summed.wait(), *to_weights, None, None


def _whole_input(x: Tensor, region: Region) -> Pending[Tensor]:
    """Gather the whole input; with overlap, while the input gradient is computed, which does not need it (bulk overlap)."""
    if not region.sequence:
        return completed(x)
    if region.overlap:
        return region.group.start_all_gather(x, SEQUENCE_DIM)
    return completed(region.group.all_gather(x, SEQUENCE_DIM))


def _sum_input_gradient(part: Tensor, region: Region) -> Pending[Tensor]:
    """Sum the parts of the input gradient; with overlap, while the weight gradient is computed (bulk overlap)."""
    group = region.group
    if region.sequence:
        if region.overlap:
            return group.start_reduce_scatter(part, SEQUENCE_DIM)
        return completed(group.reduce_scatter(part, SEQUENCE_DIM))
    return group.start_all_reduce(part) if region.overlap else completed(group.all_reduce(part))


class _Row(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, region: Region, queue: WeightQueue | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.region, ctx.queue = weight, bias, region, queue
        if not region.sequence:
            output = region.group.all_reduce(F.linear(x, weight))
        elif region.overlap:
            output = matmul_scatter(x, weight.t(), region.group)
        else:
            output = region.group.reduce_scatter(F.linear(x, weight), SEQUENCE_DIM)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        (x,), weight, region = ctx.saved_tensors, ctx.weight, ctx.region
        (gradient,) = gradients
        if region.sequence and region.overlap:
            to_input, whole = gather_matmul(gradient, weight, region.group)
        else:
            whole = region.group.all_gather(gradient, SEQUENCE_DIM) if region.sequence else gradient
            to_input = whole.matmul(weight)
        to_weight, _ = _weight_gradients(ctx.queue, weight, None, x.detach(), whole)
        return to_input, to_weight, _bias_gradient(ctx.queue, ctx.bias, gradient), None, None


def _weight_gradients(
    queue: WeightQueue | None, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, gradient: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, or None where they are deferred to W."""
    rows, rows_in = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    if queue is not None and queue.collects:
        queue.put(LinearWork(weight, bias, rows_in, rows))
        return None, None
    return rows.t().mm(rows_in), None if bias is None else rows.sum(0)


def _bias_gradient(queue: WeightQueue | None, bias: nn.Parameter | None, gradient: Tensor) -> Tensor | None:
    """The bias gradient, from the rows that this rank has added the bias to."""
    if bias is None:
        return None
    rows = gradient.reshape(-1, gradient.shape[-1])
    if queue is not None and queue.collects:
        queue.put(BiasWork(bias, rows))
        return None
    return rows.sum(0)
