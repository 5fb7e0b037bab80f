"""Training with torch.distributed.pipelining, profiled: what the ranks of the pool run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.profiler import ProfilerActivity, profile

from instrument.data.text import TextData
from instrument.models.gpt import cross_entropy, make_stages
from instrument.models.gpt_config import GptConfig
from instrument.pipeline.partition import partition
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build

CPU = torch.device("cpu")
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}


@dataclass(frozen=True, slots=True)
class TorchRun:
    """A few steps of one of torch's schedules on a pipeline of all ranks."""

    schedule: str
    pp: int
    microbatches: int
    chunks: int | None = None
    steps: int = 2
    hidden: int = 64
    record_shapes: bool = True

    @property
    def plan(self) -> Plan:
        """The plan of the same name, which :mod:`tests.schedule` compares with torch's own tables."""
        return build(self.schedule, self.pp, self.microbatches, self.chunks)


class _Slow(torch.autograd.Function):
    """A stage of one operator each way, that lasts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return gradients[0].clone()


class SlowStage(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Slow.apply(x) * self.scale


class _Known(torch.autograd.Function):
    """A loss whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, gradient: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.saved_tensors[0] * gradients[0], None, None


class ChunkedLoss(torch.nn.Module):
    """A head that runs forward and backward for one chunk after the other, as torchtitan's ``ChunkedLossWrapper``."""

    def __init__(self, num_chunks: int) -> None:
        super().__init__()
        self.head, self.num_chunks = torch.nn.Linear(8, 8), num_chunks

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        gradients, losses = [], []
        for chunk, aim in zip(out.detach().chunk(self.num_chunks), target.chunk(self.num_chunks), strict=True):
            loss = ((self.head(chunk.requires_grad_()) - aim) ** 2).mean()
            loss.backward()
            gradients.append(chunk.grad)
            losses.append(loss.detach())
        return _Known.apply(out, torch.cat(gradients), torch.stack(losses).sum())


@dataclass(frozen=True, slots=True)
class SlowRun:
    """Steps of torch's unlabelled schedule, or of one by hand, with what people put around them.

    ``by_hand`` is "", "fifo" or "lifo": all forwards, then all backwards in the order of the forwards or against it.
    ``loss_chunks``: the loss runs backwards of its own, of so many chunks; 0 for one without.
    """

    microbatches: int = 4
    steps: int = 2
    record_shapes: bool = False
    by_hand: str = ""
    loss_chunks: int = 0


def train_slow(run: SlowRun, folder: str) -> list[tuple[str, int, int, int]]:
    """Train under a plain profile, with a barrier, zero_grad, clipping and logging around each step; (kind, microbatch, first
    and last ns) of each op, as the stage's own functions saw it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    module = SlowStage()
    stage = PipelineStage(module, rank, world, CPU, group=dist.group.WORLD)
    seen: list[tuple[str, int, int, int]] = []

    def logged(kind: str, function: Any) -> Any:
        def call(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            start = time.time_ns()
            result = function(microbatch, *args, **kwargs)
            seen.append((kind, microbatch, start, time.time_ns()))
            return result

        return call

    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    stage.forward_one_chunk = logged("F", stage.forward_one_chunk)
    stage.backward_one_chunk = logged("B", stage.backward_one_chunk)
    chunked = ChunkedLoss(run.loss_chunks) if run.loss_chunks else None
    loss_fn = chunked or (lambda out, target: ((out - target) ** 2).mean())
    schedule = Schedule1F1B(stage, run.microbatches, loss_fn=loss_fn)

    def step() -> None:
        dist.barrier()
        optimizer.zero_grad()
        if run.by_hand:
            _all_forwards_first(run, module, logged)
        else:
            inputs = (torch.randn(4 * run.microbatches, 8),) if rank == 0 else ()
            target = torch.zeros(4 * run.microbatches, 8) if rank == world - 1 else None
            schedule.step(*inputs, target=target, losses=[] if rank == world - 1 else None, return_outputs=False)
        if chunked is not None:
            chunked.zero_grad()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        sum(parameter.detach().norm() for parameter in module.parameters()).item()
        optimizer.step()

    step()
    dist.barrier()
    seen.clear()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=run.record_shapes) as profiler:
        for _ in range(run.steps):
            step()
    profiler.export_chrome_trace(str(Path(folder) / f"rank{rank}.json"))
    return seen


def _all_forwards_first(run: SlowRun, module: SlowStage, logged: Any) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    sends = []

    def forward(microbatch: int, x: torch.Tensor) -> torch.Tensor:
        y = module(x.requires_grad_())
        kept[microbatch] = (x, y.pow(2).mean() if rank == last else y)
        return y.detach()

    def backward(microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        x, y = kept.pop(microbatch)
        y.backward(gradient)
        return x.grad

    order = list(range(run.microbatches))
    for microbatch in order:
        x = torch.randn(4, 8)
        if rank:
            dist.recv(x, rank - 1)
        y = logged("F", forward)(microbatch, x)
        if rank < last:
            sends.append(dist.isend(y, rank + 1))
    for microbatch in order if run.by_hand == "fifo" else order[::-1]:
        gradient = torch.empty(4, 8) if rank < last else None
        if gradient is not None:
            dist.recv(gradient, rank + 1)
        own = logged("B", backward)(microbatch, gradient)
        if rank:
            sends.append(dist.isend(own, rank - 1))
    for work in sends:
        work.wait()


def train_profiled(run: TorchRun, folder: str) -> str:
    """Train under PyTorch's profiler, write ``rank<r>.json``; the schedule's own table of this rank's actions, as text."""
    rank = dist.get_rank()
    plan = run.plan
    config = GptConfig(2 * plan.num_stages, run.hidden, 4, 16)
    rank_stages = plan.stages_of(rank)
    modules = make_stages(config, partition(config.layers, plan.num_stages), rank_stages)
    stages = [
        PipelineStage(modules[stage], stage, plan.num_stages, CPU, group=dist.group.WORLD) for stage in rank_stages
    ]
    chosen = SCHEDULES[run.schedule]
    single = run.schedule in ("gpipe", "1f1b")
    schedule = chosen(stages[0] if single else stages, run.microbatches, loss_fn=cross_entropy)
    batch = TextData(run.microbatches, 2, config.sequence).batch(0, 0)
    inputs = (batch.tokens.flatten(0, 1),) if 0 in rank_stages else ()
    targets = batch.targets.flatten(0, 1) if plan.num_stages - 1 in rank_stages else None
    optimizer = torch.optim.AdamW(torch.nn.ModuleList(modules.values()).parameters())

    def step() -> None:
        losses: list[torch.Tensor] | None = None if targets is None else []
        schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    step()  # shapes are inferred in the first
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=run.record_shapes) as profiler:
        for _ in range(run.steps):
            step()
    profiler.export_chrome_trace(str(Path(folder) / f"rank{rank}.json"))
    return ""
