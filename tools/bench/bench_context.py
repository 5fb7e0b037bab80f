"""Forward and backward of our ring attention against torch's experimental one: same shards, processes and backend.

    python tools/bench/bench_context.py [--cp 2] [--seq 1024 4096] [--heads 4] [--head-dim 32] [--launches 2] [--rounds 12]

``context_parallel`` itself knows the attention kernels of CUDA only. Its ring underneath takes the kernel as an argument
(``_templated_ring_attention`` and its backward), and so runs here with torch's flash attention for CPUs, which is our
kernel too; wrapped as an autograd function without the cost of DTensor's dispatch, which is to torch's favour. Both rings
take turns in changing order, and a round's ratio compares neighbours in time. Outputs and gradients are compared first.
Prints medians over all rounds, and that of their ratios ours/theirs (target ≤ 1.0).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _cp_options,
    _RotateMethod,
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

from instrument.context.attention import ContextAttention, make_context_groups
from instrument.context.shard import ContextShape, shard_sequence
from instrument.mesh import fit_shape, make_mesh
from instrument.recorder import Recorder
from pptrace.marks import Axis

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Seconds = dict[str, list[float]]
"""Side → seconds per forward and backward in every round."""


@dataclass(frozen=True, slots=True)
class Setting:
    cp: int
    sequence: int
    microbatch_size: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    rotation: str
    launches: int
    rounds: int
    steps: int


class TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        out, lse = _templated_ring_attention(group, 2, FLASH, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _templated_ring_attention_backward(
            ctx.group, 2, FLASH_BACKWARD, grad, "grad_out", *ctx.saved_tensors, is_causal=True, dropout_p=0.0
        )
        return (*gradients, None)


def measure(attention: Attention, inputs: list[Tensor], gradient: Tensor, steps: int) -> float:
    """Seconds per forward and backward, from a barrier to a barrier."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        attention(*inputs).backward(gradient)
        for tensor in inputs:
            tensor.grad = None
    dist.barrier()
    return (time.perf_counter() - start) / steps


def compare(sides: dict[str, Attention], inputs: list[Tensor], gradient: Tensor) -> None:
    """Fail unless both give the same output and gradients."""
    result = []
    for attention in sides.values():
        output = attention(*inputs)
        result.append((output.detach(), *torch.autograd.grad(output, inputs, gradient)))
    tolerance = 1e-4 if gradient.dtype is torch.float32 else 5e-2
    for ours, other in zip(*result, strict=True):
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)


def work(rank: int, port: int, setting: Setting, answers: SimpleQueue[Seconds]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.cp)
    _cp_options.rotate_method = _RotateMethod[setting.rotation]
    mesh = make_mesh(fit_shape(setting.cp, cp=setting.cp), "cpu", "gloo")
    shape = ContextShape(setting.cp)
    ours = ContextAttention(make_context_groups(mesh, shape, Recorder()))
    group = mesh.groups[Axis.CP]
    sides: dict[str, Attention] = {"ours": ours, "theirs": lambda q, k, v: TorchRing.apply(q, k, v, group)}
    torch.manual_seed(0)
    size = (setting.microbatch_size, setting.heads, setting.sequence, setting.head_dim)
    *inputs, gradient = (shard_sequence(torch.randn(size, dtype=setting.dtype), shape, rank, dim=2) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in inputs]
    compare(sides, inputs, gradient)
    seconds: Seconds = {name: [] for name in sides}
    for turn in range(setting.rounds + 1):
        for name in list(sides) if turn % 2 else list(sides)[::-1]:
            taken = measure(sides[name], inputs, gradient, setting.steps)
            if turn:  # the first round warms up
                seconds[name].append(taken)
    if rank == 0:
        answers.put(seconds)
    dist.destroy_process_group()


def launch(setting: Setting) -> Seconds:
    """One launch of all ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (store.port, setting, answers), nprocs=setting.cp)
    return answers.get()


def report(setting: Setting, ours: list[float], others: list[float]) -> None:
    ratios = sorted(a / b for a, b in zip(ours, others, strict=True))
    ratio = statistics.median(ratios)
    spread = f"{ratios[len(ratios) // 4]:.3f}–{ratios[-1 - len(ratios) // 4]:.3f}"
    print(
        f"cp={setting.cp} s={setting.sequence:6} {str(setting.dtype).removeprefix('torch.'):8} torch by "
        f"{setting.rotation.lower()}: ours {statistics.median(ours) * 1e3:8.2f} ms   torch "
        f"{statistics.median(others) * 1e3:8.2f} ms   ratio {ratio:.3f} (middle half {spread}; target ≤ 1.0): "
        f"{'met' if ratio <= 1 else 'MISSED'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="our ring attention against torch's")
    parser.add_argument("--cp", type=int, nargs="+", default=[2])
    parser.add_argument("--seq", type=int, nargs="+", default=[256, 1024, 4096], help="of the whole sequence")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--rotation", choices=["ALL_GATHER", "ALL_TO_ALL"], nargs="+", default=["ALL_GATHER", "ALL_TO_ALL"]
    )
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--launches", type=int, default=2, help="times to start the processes anew")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each side in a launch")
    parser.add_argument("--steps", type=int, default=5, help="in a row in each turn")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for cp, sequence, rotation in product(options.cp, options.seq, options.rotation):
        setting = Setting(
            cp,
            sequence,
            options.microbatch_size,
            options.heads,
            options.head_dim,
            getattr(torch, options.dtype),
            rotation,
            options.launches,
            options.rounds,
            options.steps,
        )
        rounds = [launch(setting) for _ in range(setting.launches)]
        report(setting, *([taken for seconds in rounds for taken in seconds[side]] for side in ("ours", "theirs")))


if __name__ == "__main__":
    main()
