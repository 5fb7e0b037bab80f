"""Attention of a block of queries over a block of keys and values, with the log-sum-exp that joins blocks together.

A backward over one block gets the output and the log-sum-exp of the whole row, and recomputes the block's scores from
them (FlashAttention-2, arXiv 2307.08691, algorithm 2): the gradients of the blocks of a row add up to those of the row.

Shapes: q, out and their gradients (microbatch, heads, queries, head dim); k, v and their gradients (microbatch,
KV heads, keys, head dim), where KV heads divides heads; lse (microbatch, heads, queries).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v."""

_FLASH_HEAD_DIMS = range(8, 257, 8)  # what the CUDA kernel takes without padding


class Kernel(Protocol):
    """One way to compute a block. Scores are scaled by 1/√head dim; ``masked`` lets query i see keys 0 … i."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over the block's keys."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, masked: bool
    ) -> Gradients:
        """The block's part of the gradients, from ``grad``, ``out`` and ``lse`` of the whole rows."""
        ...


def kernel_for(q: Tensor) -> Kernel:
    """The quickest kernel for the device, dtype and head dim of ``q``."""
    if q.device.type == "cpu":
        return CpuFlash()
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] in _FLASH_HEAD_DIMS:
        return CudaFlash()
    return Exact()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which blocks are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class CpuFlash:
    """torch's flash attention for CPUs: float64, float32, bfloat16 and float16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, masked)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, masked: bool
    ) -> Gradients:
        gradients: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, masked
        )
        return gradients


class CudaFlash:
    """FlashAttention-2 as torch ships it: float16 and bfloat16 on CUDA."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, masked)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, masked: bool
    ) -> Gradients:
        no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # the kernel asks for a state and reads none
        no_lengths = (None, None, q.shape[2], k.shape[2])
        # The kernel reads the log-sum-exp as if it were contiguous, which that of half of the queries is not.
        gradients: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *no_lengths, 0.0, masked, no_dropout, no_dropout
        )
        return gradients


class Exact:
    """The definition, with all scores of the block in memory: any dtype and device. Halves are computed in float32."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
        scores = _scores(q, k, masked)
        lse = scores.logsumexp(-1)
        out = torch.exp(scores - lse.unsqueeze(-1)) @ _up(v).unsqueeze(2)
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, masked: bool
    ) -> Gradients:
        grad, out = _grouped(grad, k), _grouped(out, k)
        probabilities = torch.exp(_scores(q, k, masked) - _grouped(lse, k).unsqueeze(-1))
        grad_v = (probabilities.mT @ grad).sum(2)
        row = (grad * out).sum(-1, keepdim=True)
        grad_scores = probabilities * (grad @ _up(v).unsqueeze(2).mT - row) / math.sqrt(q.shape[-1])
        grad_q = (grad_scores @ _up(k).unsqueeze(2)).flatten(1, 2)
        grad_k = (grad_scores.mT @ _grouped(q, k)).sum(2)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _up(tensor: Tensor) -> Tensor:
    return tensor.to(accumulation_dtype(tensor.dtype))


def _grouped(rows: Tensor, k: Tensor) -> Tensor:
    """(microbatch, heads, …) → (microbatch, KV heads, heads per KV head, …)."""
    return _up(rows).reshape(rows.shape[0], k.shape[1], -1, *rows.shape[2:])


def _scores(q: Tensor, k: Tensor, masked: bool) -> Tensor:
    """(microbatch, KV heads, query heads per KV head, queries, keys)."""
    scores = _grouped(q, k) @ _up(k).unsqueeze(2).mT / math.sqrt(q.shape[-1])
    if masked:
        future_keys = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future_keys, -math.inf)
    return scores
