"""A script of somebody else's: torch.distributed.pipelining over NCCL, and nothing of pptrace's.

pptrace run -n 4 tools/gpu/scripts/pipelining.py SCHEDULE
torchrun --nproc-per-node 4 tools/gpu/scripts/pipelining.py SCHEDULE DIR    profiles itself, and writes NCCL's flight recorder
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from place import join  # type: ignore[import-not-found]
from torch.distributed import pipelining
from torch.profiler import ProfilerActivity, profile

CHUNKS = {"Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2, "ScheduleZBVZeroBubble": 2}
WIDTH, BATCH, MICROBATCHES, STEPS = 256, 64, 8, 6


def block() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))


def main(name: str, folder: str | None = None) -> None:
    device = join()
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = CHUNKS[name]
    numbers = [rank + chunk * world for chunk in range(chunks)]
    if "ZBV" in name:
        numbers = [rank, 2 * world - 1 - rank]
    torch.manual_seed(rank)
    modules = [block().to(device) for _ in numbers]
    stages = [
        pipelining.PipelineStage(module, number, world * chunks, device)
        for module, number in zip(modules, numbers, strict=True)
    ]
    schedule_class = getattr(pipelining, name)
    schedule = schedule_class(
        stages[0] if chunks == 1 else stages,
        MICROBATCHES,
        loss_fn=lambda out, target: ((out - target) ** 2).mean(),
    )
    optimizer = torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=1e-3)
    has_last = world * chunks - 1 in numbers

    def train(step: int) -> None:
        optimizer.zero_grad()
        inputs = (torch.randn(BATCH, WIDTH, device=device),) if 0 in numbers else ()
        target = torch.zeros(BATCH, WIDTH, device=device) if has_last else None
        losses: list[torch.Tensor] = []
        schedule.step(*inputs, target=target, losses=losses if has_last else None)
        optimizer.step()
        if losses:
            print(f"step {step} loss {torch.stack(losses).mean().item():.6f}", flush=True)

    for step in range(3):
        train(step)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) if folder else nullcontext() as profiler:
        for step in range(3, STEPS):
            train(step)
    if folder and profiler is not None:
        profiler.export_chrome_trace(str(Path(folder) / f"rank{rank}.json.gz"))
        if device.type == "cuda":
            dump = torch._C._distributed_c10d._dump_nccl_trace()
            (Path(folder) / f"nccl_trace_rank_{rank}").write_bytes(dump)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
