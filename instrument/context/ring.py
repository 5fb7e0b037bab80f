"""Ring attention: keys and values rotate through the ranks while attention runs on those received before.

Ring Attention (arXiv 2310.01889) with the balanced causal layout of :mod:`instrument.context.shard`. At each step a rank
first posts the exchange that brings the next keys, then computes with the present ones. The parts of a row are joined
by their log-sum-exp.

Backward recomputes the scores from q, k, v, the output and its log-sum-exp; nothing else is kept. Keys travel again,
and behind them the sums of their gradients: each rank adds its part and passes the sum on, until it arrives at the
rank that the keys belong to. A rank's part in the gradients of its local keys never travels, so that either way there
are ring − 1 steps. Part of the local step is held back to run while the last sums travel.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from instrument.collectives import AxisGroup, Pending
from instrument.context.kernels import Gradients, accumulation_dtype, kernel_for
from instrument.context.shard import Layout
from instrument.context.squares import RingPlan, Square
from pptrace.errors import UsageError


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Join another part of the same rows to ``out`` (…, queries, head dim) and ``lse`` (…, queries), in place.

    The softmax over both parts weighs them by exp(lse): out ← out + σ(part_lse − lse) · (part_out − out), which never
    overflows.
    """
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    out.lerp_(part_out.to(out.dtype), weight.to(out.dtype))
    torch.logaddexp(lse, part_lse, out=lse)


class TravellingKeys(Protocol):
    """Keys and values of other ranks, on their way."""

    def take(self, step: int) -> Tensor:
        """Wait for those of a step, from 1 on and in order; those that come next travel from then on."""
        ...


class _RotatingKeys:
    def __init__(self, group: AxisGroup, keys: Tensor, ring: int) -> None:
        self._group, self._last = group, ring - 1
        self._following = group.start_rotation(keys)

    def take(self, step: int) -> Tensor:
        keys = self._following.wait()
        if step < self._last:
            self._following = self._group.start_rotation(keys)
        return keys


class RingAttention:
    """Attention over the positions of all ranks of ``group``, of which each holds its shard under ``layout``."""

    def __init__(self, group: AxisGroup, layout: Layout, causal: bool) -> None:
        self.group = group
        self.layout = layout
        self.causal = causal

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(microbatch, heads, positions, head dim) of this rank, k and v with KV heads → the same shape as ``q``.

        Every rank of the group calls this with equal shapes. Differentiable once.
        """
        attended: Tensor = _Ring.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return attended

    def plan(self, length: int) -> RingPlan:
        """The squares that this rank computes when each rank holds ``length`` positions.

        Raises:
            UsageError: they cannot be halved, as the balanced layout needs.
        """
        if self.causal and self.layout is Layout.BALANCED and length % 2:
            raise UsageError(f"{length} positions on a rank; the balanced layout holds two chunks of equal length")
        return RingPlan(self.group.size, self.group.rank, length, self.causal, self.layout)

    def start_keys(self, keys: Tensor, plan: RingPlan) -> TravellingKeys:
        """Start what brings the keys of the other ranks, of each at its step."""
        return _RotatingKeys(self.group, keys, plan.ring)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over the positions of all ranks."""
        kernel, plan = kernel_for(q), self.plan(q.shape[2])
        keys = torch.stack((k, v)).contiguous()
        following = self.start_keys(keys, plan)
        out, lse = kernel.forward(q, keys[0], keys[1], plan.local.masked)
        out = out.to(accumulation_dtype(out.dtype))
        for step in range(1, plan.ring):
            keys = following.take(step)
            if square := plan.remote(step):
                k, v = _at(keys, square.keys)
                part = kernel.forward(_at(q, square.queries), k, v, square.masked)
                merge(_at(out, square.queries), lse[..., square.queries], *part)
        return out.to(q.dtype), lse

    def gradients(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Gradients of this rank's q, k and v, from ``grad`` of its output; in their dtypes."""
        plan, rows = self.plan(q.shape[2]), RowGradients(grad, q, out, lse)
        local_keys = torch.stack((k, v)).contiguous()
        following = self.start_keys(local_keys, plan)
        local_sum = zero_sum(local_keys)
        for square in plan.local_early:
            rows.add(square, local_keys, local_sum)
        travelling = self.send_gradients(following, plan, rows)
        for square in plan.local_late:
            rows.add(square, local_keys, local_sum)
        if travelling is not None:
            local_sum += travelling.wait()
        return rows.grad_q.to(q.dtype), local_sum[0].to(k.dtype), local_sum[1].to(v.dtype)

    def send_gradients(self, following: TravellingKeys, plan: RingPlan, rows: RowGradients) -> Pending[Tensor] | None:
        """Compute the gradients of the other ranks' keys and start to send them; what comes back are those of this rank's."""
        travelling: Pending[Tensor] | None = None
        for step in range(1, plan.ring):
            keys = following.take(step)
            remote = plan.remote(step)
            part = None if remote is None else rows.part(remote, keys)
            grad_sum = zero_sum(keys) if travelling is None else travelling.wait()
            if remote is not None and part is not None:
                add_part(grad_sum, remote.keys, part)
            travelling = self.group.start_rotation(grad_sum)
        return travelling


class RowGradients:
    """The backward of this rank's queries, block by block; ``grad_q`` is the sum so far."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self.grad_q = torch.zeros_like(q, dtype=accumulation_dtype(q.dtype))
        self._kernel = kernel_for(q)
        self._rows = (grad, q, out)
        self._lse = lse

    def part(self, square: Square, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Add a square's part to ``grad_q``; returns its parts in the gradients of its keys and values."""
        grad, q, out = (_at(tensor, square.queries) for tensor in self._rows)
        k, v = _at(keys, square.keys)
        grad_q, *rest = self._kernel.backward(grad, q, k, v, out, self._lse[..., square.queries], square.masked)
        _at(self.grad_q, square.queries).add_(grad_q)
        return rest[0], rest[1]

    def add(self, square: Square, keys: Tensor, grad_sum: Tensor) -> None:
        """Add a square's part to ``grad_q``, and its parts of keys and values to ``grad_sum``."""
        add_part(grad_sum, square.keys, self.part(square, keys))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingAttention) -> Tensor:
        q = _with_whole_rows(q)
        out, lse = ring.attend(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return (*ctx.ring.gradients(_with_whole_rows(grad), *ctx.saved_tensors), None)


def _with_whole_rows(tensor: Tensor) -> Tensor:
    """The flash kernels read each row (head dim) as contiguous, and give wrong results where it is not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _at(tensor: Tensor, positions: slice) -> Tensor:
    """Slice positions of (…, positions, head dim)."""
    return tensor[..., positions, :]


def zero_sum(keys: Tensor) -> Tensor:
    return torch.zeros_like(keys, dtype=accumulation_dtype(keys.dtype))


def add_part(grad_sum: Tensor, positions: slice, part: tuple[Tensor, Tensor]) -> None:
    for whole, addend in zip(_at(grad_sum, positions), part, strict=True):
        whole.add_(addend)
