"""Loops by hand whose order of forwards and backwards is that of breadth-first chunks, profiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

SIZE = 16


def train_by_hand(loop: str, folder: str) -> None:
    """Two steps of a loop under a plain profile: "ring" or "chunks"."""
    rank = dist.get_rank()
    layers = [[layer for _ in range(4) for layer in (torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU())] for _ in range(2)]
    modules = torch.nn.ModuleList([torch.nn.Sequential(*own) for own in layers])
    optimizer = torch.optim.SGD(modules.parameters(), lr=1e-3)
    step = {"ring": _ring, "chunks": _chunks}[loop]
    step(modules)
    optimizer.step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            step(modules)
            optimizer.step()
    profiler.export_chrome_trace(str(Path(folder) / f"rank{rank}.json"))


def _passed_on(tensor: torch.Tensor, away: int) -> torch.Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    came = torch.empty(4, SIZE)
    work = dist.isend(tensor, (rank + away) % world)
    dist.recv(came, (rank - away) % world)
    work.wait()
    return came


def _ring(modules: torch.nn.ModuleList) -> None:
    """Ring attention's order: as many turns forward as there are ranks, and as many back."""
    turning, losses = torch.randn(4, SIZE), []
    for _ in range(dist.get_world_size()):
        losses.append(modules[0](turning).pow(2).mean())
        turning = _passed_on(turning, 1)
    gradient = torch.zeros(4, SIZE)
    for loss in losses:
        loss.backward()
        gradient = _passed_on(gradient, -1)


def _chunks(modules: torch.nn.ModuleList, microbatches: int = 8) -> None:
    """Two chunks on each rank, one after the other, and the backwards in the order of the forwards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    last = len(modules) * world - 1
    kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    sent: list[Any] = []
    for chunk, module in enumerate(modules):
        stage = chunk * world + rank
        for microbatch in range(microbatches):
            x = torch.randn(4, SIZE)
            if stage:
                dist.recv(x, (rank - 1) % world)
            x.requires_grad_()
            y = module(x)
            kept[chunk, microbatch] = (x, y)
            if stage < last:
                sent.append(dist.isend(y.detach(), (rank + 1) % world))
    for chunk in reversed(range(len(modules))):
        stage = chunk * world + rank
        for microbatch in range(microbatches):
            x, y = kept[chunk, microbatch]
            gradient = torch.ones(4, SIZE)
            if stage < last:
                dist.recv(gradient, (rank + 1) % world)
            y.backward(gradient)
            if stage:
                sent.append(dist.isend(x.grad, (rank - 1) % world))
    for work in sent:
        work.wait()
