"""Tensor and data parallel training as people write it, recorded under hooks; what the ranks of a pool run."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from tests.adapters.hooked import hooks, recorded

BATCH, WIDTH, HIDDEN, LAYERS, STEPS = 8, 16, 32, 3, 4


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))


def _tensor_parallel(mesh: DeviceMesh, how: str) -> nn.Module:
    model: nn.Module = Mlp()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if how == "fsdp":
        fully_shard(model, mesh=mesh["dp"])
        return model
    _pre_dp_module_transform(model)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def _buckets() -> nn.Module:
    """DDP with a bucket for each layer, nearly, and buffers to broadcast."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(LAYERS)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.001, gradient_as_bucket_view=True)


def _renamed() -> nn.Module:
    """FSDP over all ranks, which other meshes have as well, as torchtitan's of its losses."""
    size = dist.get_world_size()
    world = init_device_mesh("cpu", (size,), mesh_dim_names=("world",))
    mesh = world._unflatten(0, (size, 1), ("dp_shard", "cp"))["dp_shard"] if hasattr(world, "_unflatten") else world
    model = fully_shard(Mlp(), mesh=mesh)
    init_device_mesh("cpu", (size,), mesh_dim_names=("loss_mesh",))
    return model


MODELS = {"buckets": _buckets, "renamed": _renamed}


def train_parallel(how: str, folder: str, with_hooks: bool) -> list[str]:
    """Train a few steps and average the loss over the world; the losses, to the bit. ``rank<r>.json`` holds the last steps."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    with hooks() if with_hooks else nullcontext((None, None)) as (session, adapters):
        tp = 1 if how in MODELS else 2
        mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = MODELS[how]() if how in MODELS else _tensor_parallel(mesh, how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = [_step(model, optimizer, mesh, 0), _step(model, optimizer, mesh, 1)]
        with recorded(Path(folder) / f"rank{rank}.json", session, adapters):
            losses += [_step(model, optimizer, mesh, number) for number in range(2, STEPS)]
    return [loss.hex() for loss in losses]


def _step(model: nn.Module, optimizer: Any, mesh: DeviceMesh, number: int) -> float:
    torch.manual_seed(number * 10 + mesh.get_local_rank("dp"))
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
    loss = model(torch.randn(BATCH, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average = loss.detach().clone()
    dist.all_reduce(average)
    return float(average)
