"""Forward and backward of our layer with experts against a plain one of torch's parts, on gloo.

    python tools/bench/bench_experts.py [--ep 2] [--tokens 512] [--hidden 256] [--experts 8] [--top-k 2] [--rounds 10] [--grouped]

Theirs is what one writes with torch's own parts, as torchtitan's ``TokenDispatcher`` does: ``topk``, a sort by expert,
``all_to_all_single_autograd``, an ``nn.Linear`` for each matrix of an expert, and a weighted sum. Same values, sizes, processes,
threads and backend; outputs and gradients are compared first. Both sides take turns in changing order, and a ratio compares
neighbours in time; that of processor time varies less where the machine does other work. Freed memory is kept by both (glibc),
as the allocators of GPUs do: else a ratio counts which side's blocks the C library happens to give back, whose pages the system
clears anew. Prints medians over all rounds, and that of their ratios ours/theirs (target ≤ 1.0).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from instrument.collectives import AxisGroup
from instrument.expert.groups import ExpertGroups
from instrument.expert.layer import ExpertLayer
from instrument.models.parallel import alone
from instrument.recorder import Recorder
from pptrace.marks import Axis
from pptrace.memory import keep_freed_memory
from pptrace.sizes.expert_options import ExpertOptions

TOLERANCE = 1e-5
"""Of a float32 output or gradient, relative to its largest entry: sums are added in other orders."""
Seconds = tuple[list[float], list[float]]
"""Wall time and processor time of the process, by round."""


@dataclass(frozen=True, slots=True)
class Setting:
    ep: int
    tokens: int
    hidden: int
    experts: int
    top_k: int
    rounds: int
    steps: int
    grouped: bool


class PlainLayer(nn.Module):
    """Of torch's parts; this rank has ``held`` of the experts."""

    def __init__(self, layer: ExpertLayer, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.num_experts = layer.options.num
        hidden, width = layer.outer.weight.shape[1], layer.inner.weight.shape[1]
        self.gate = nn.Linear(hidden, self.num_experts, bias=False)
        self.inner = nn.ModuleList(nn.Linear(hidden, width) for _ in layer.inner.experts)
        self.outer = nn.ModuleList(nn.Linear(width, hidden) for _ in layer.inner.experts)
        with torch.no_grad():
            self.gate.weight.copy_(layer.router.weight)
            for ours, theirs in ((layer.inner, self.inner), (layer.outer, self.outer)):
                for index, linear in enumerate(theirs):
                    linear.weight.copy_(ours.weight[index])
                    linear.bias.copy_(ours.bias[index])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        logits, chosen = self.gate(tokens).topk(self.top_k, -1)
        weights = logits.softmax(-1)
        order = chosen.flatten().argsort(stable=True)
        rows = tokens[order // self.top_k]
        size, held = dist.get_world_size(), len(self.inner)
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received = (each.view(size, held).sum(1).tolist() for each in (counts, arriving))
        rows = all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)
        experts = torch.arange(held).repeat(size).repeat_interleave(arriving)
        by_expert = experts.argsort(stable=True)
        parts = rows[by_expert].split(torch.bincount(experts, minlength=held).tolist())
        computed = [
            outer(F.gelu(inner(part))) for part, inner, outer in zip(parts, self.inner, self.outer, strict=True)
        ]
        rows = torch.cat(computed)[by_expert.argsort()]
        rows = all_to_all_single_autograd(rows, sent, received, dist.group.WORLD)
        weighted = rows * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, weighted).view_as(x)


def step(layer: nn.Module, x: Tensor, gradient: Tensor) -> Tensor:
    output: Tensor = layer(x)
    output.backward(gradient)
    return output.detach()


def clear(layer: nn.Module, x: Tensor) -> None:
    for tensor in (x, *layer.parameters()):
        tensor.grad = None


def compare(ours: ExpertLayer, theirs: PlainLayer, x: Tensor, gradient: Tensor) -> None:
    """Fail unless both give the same output and gradients."""

    def results(layer: nn.Module) -> list[Tensor]:
        output = step(layer, x, gradient)
        assert x.grad is not None
        seen = [output, x.grad]
        if isinstance(layer, ExpertLayer):
            seen += [
                parameter.grad
                for parameter in (layer.router.weight, *layer.inner.parameters(), *layer.outer.parameters())
            ]
        elif isinstance(layer, PlainLayer):
            seen.append(layer.gate.weight.grad)
            for linears in (layer.inner, layer.outer):
                seen += [torch.stack([getattr(each, name).grad for each in linears]) for name in ("weight", "bias")]
        clear(layer, x)
        return seen

    for result, wanted in zip(results(ours), results(theirs), strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=TOLERANCE * float(wanted.abs().max()))


def measure(layer: nn.Module, x: Tensor, gradient: Tensor, steps: int) -> tuple[float, float]:
    """Seconds per forward and backward, from a barrier to a barrier, and seconds of processor time."""
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step(layer, x, gradient)
        clear(layer, x)
    cpu = time.process_time() - start_cpu
    dist.barrier()
    return (time.perf_counter() - start) / steps, cpu / steps


def work(rank: int, port: int, setting: Setting, answers: SimpleQueue[tuple[Seconds, Seconds]]) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.ep)
    recorder = Recorder()
    groups = ExpertGroups(AxisGroup(dist.group.WORLD, Axis.EP, recorder), AxisGroup(None, Axis.CP, recorder))
    experts = ExpertOptions(setting.experts, setting.top_k, grouped=setting.grouped)
    ours = ExpertLayer(setting.hidden, experts, alone().region, groups)
    nn.init.normal_(ours.router.weight, generator=torch.Generator().manual_seed(0))
    ours.draw_experts(0, 0.05)
    theirs = PlainLayer(ours, setting.top_k)
    generator = torch.Generator().manual_seed(rank + 1)
    x, gradient = (torch.randn(1, setting.tokens, setting.hidden, generator=generator) for _ in range(2))
    compare(ours, theirs, x.requires_grad_(), gradient)
    seconds: tuple[Seconds, Seconds] = (([], []), ([], []))  # ours and theirs
    for turn in range(setting.rounds + 1):
        for index in (0, 1) if turn % 2 else (1, 0):
            taken = measure((ours, theirs)[index], x, gradient, setting.steps)
            if turn:  # the first round warms up
                for values, value in zip(seconds[index], taken, strict=True):
                    values.append(value)
    if rank == 0:
        answers.put(seconds)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="our layer with experts against a plain one of torch's parts")
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512], help="of each rank")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each side")
    parser.add_argument("--steps", type=int, default=3, help="in a row in each turn")
    parser.add_argument("--grouped", action="store_true", help="multiply all experts' rows at once")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for tokens in options.tokens:
        setting = Setting(
            options.ep,
            tokens,
            options.hidden,
            options.experts,
            options.top_k,
            options.rounds,
            options.steps,
            options.grouped,
        )
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        answers = mp.get_context("spawn").SimpleQueue()
        mp.spawn(work, (store.port, setting, answers), nprocs=setting.ep)
        ours, theirs = answers.get()
        ratio, text = ratio_of(ours[0], theirs[0])
        print(
            f"ep={setting.ep} n={tokens} h={setting.hidden} E={setting.experts} k={setting.top_k}: "
            f"ours {statistics.median(ours[0]) * 1e3:7.2f} ms   torch {statistics.median(theirs[0]) * 1e3:7.2f} ms   "
            f"ratio {text}, of processor time {ratio_of(ours[1], theirs[1])[1]} (target ≤ 1.0): "
            f"{'met' if ratio <= 1 else 'MISSED'}",
            flush=True,
        )


def ratio_of(ours: list[float], theirs: list[float]) -> tuple[float, str]:
    """The median of the ratios of neighbours in time, and that with the middle half of them."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    median, quarter = statistics.median(ratios), len(ratios) // 4
    return median, f"{median:.3f} ({ratios[quarter]:.3f}–{ratios[-1 - quarter]:.3f})"


if __name__ == "__main__":
    main()
