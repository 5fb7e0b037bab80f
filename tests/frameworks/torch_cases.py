"""Training with torch.distributed.pipelining, profiled: what the ranks of the pool run."""

from __future__ import annotations

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
from instrument.models.gpt import GptConfig, cross_entropy, make_stages
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


def train_profiled(run: TorchRun, folder: str) -> str:
    """Train under PyTorch's profiler, write ``rank<r>.json``; the schedule's own table of this rank's actions, as text."""
    rank = dist.get_rank()
    plan = run.plan
    config = GptConfig(2 * plan.num_stages, run.hidden, 4, 16)
    mine = plan.stages_of(rank)
    modules = make_stages(config, partition(config.layers, plan.num_stages), mine)
    stages = [PipelineStage(modules[stage], stage, plan.num_stages, CPU, group=dist.group.WORLD) for stage in mine]
    chosen = SCHEDULES[run.schedule]
    single = run.schedule in ("gpipe", "1f1b")
    schedule = chosen(stages[0] if single else stages, run.microbatches, loss_fn=cross_entropy)
    batch = TextData(run.microbatches, 2, config.sequence).batch(0, 0)
    inputs = (batch.tokens.flatten(0, 1),) if 0 in mine else ()
    targets = batch.targets.flatten(0, 1) if plan.num_stages - 1 in mine else None
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
