"""A script of somebody else's with a fault on some of its ranks: torch's own schedules and profiler, nothing of pptrace's.

``plain_faulty.py FOLDER SETTING`` with ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` set; ``SETTING`` is
:class:`PlainSetting` in JSON. Writes ``rank<r>.json.gz`` and ``steps<r>.times``: lengths of steps, s, recorded or not.

Ops sleep for a stated time, and so do faults, but the slow link, which is a property of the network that ranks are started in.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import pipelining
from torch.profiler import ProfilerActivity, profile

CHUNKS = {"ScheduleInterleaved1F1B": 2, "ScheduleZBVZeroBubble": 2}
"""Stages on a rank, of the schedules that have more than one."""

_WIDTH = 25_000
"""Numbers of a message: 100 kB, 40 ms at 20 Mbit/s."""


@dataclass(frozen=True, slots=True)
class PlainSetting:
    """Program that runs, and the fault, if any, of some ranks: ``slow``, ``python``, ``pauses`` or ``late``.

    ``amount`` is the factor of what ops sleep (``slow``), or the time of one occurrence, s; ``chance`` that of an occurrence at
    an op. ``rows`` are those that each rank of an expert group gets in a microbatch; none: no experts.
    """

    schedule: str = "Schedule1F1B"
    pp: int = 4
    dp: int = 1
    microbatches: int = 8
    forward_s: float = 0.03
    steps: int = 6
    rows: tuple[int, ...] = ()
    fault: str = ""
    ranks: tuple[int, ...] = ()
    amount: float = 0.0
    chance: float = 1.0


class _Sleep(Function):
    """Passes its input on, and sleeps first: ``forward()`` and ``backward()`` say how long, s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[], float], backward: Callable[[], float]) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds())
        return gradients[0].clone(), None, None


class _Exchange(Function):
    """All-to-all of an expert group, backwards too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x.contiguous(), group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x = torch.empty_like(gradients[0])
        dist.all_to_all_single(x, gradients[0].contiguous(), group=ctx.group)
        return x, None


def _nothing() -> float:
    return 0.0


class Stage(nn.Module):
    """A stage that sleeps as long backwards for its input as for its weight, and once forwards."""

    def __init__(self, seconds: Callable[[], float], experts: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._seconds, self._experts = seconds, experts

    def forward(self, x: Tensor) -> Tensor:
        weight = _Sleep.apply(self.weight, _nothing, self._seconds)
        if self._experts is None:
            return _Sleep.apply(x, self._seconds, self._seconds) * weight
        sent = _Exchange.apply(x, self._experts)
        slept = _Sleep.apply(sent, self._seconds, self._seconds) * weight
        return _Exchange.apply(slept, self._experts)


def _between(stages: list[Any], chances: Random, chance: float, occur: Callable[[], object]) -> None:
    """Something occurs before ops of the stages, each with a chance."""

    def after(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if chances.random() < chance:
                occur()
            return function(*args, **kwargs)

        return call

    for stage in stages:
        stage.forward_one_chunk = after(stage.forward_one_chunk)
        stage.backward_one_chunk = after(stage.backward_one_chunk)


def _collect(seconds: float) -> Callable[[], object]:
    """A collection of a heap so large that one takes about so long."""
    gc.set_threshold(0)
    heap: list[object] = []

    def collect() -> int:
        return gc.collect() + 0 * len(heap)

    while True:
        began = time.perf_counter()
        collect()
        if time.perf_counter() - began > seconds:
            return collect
        heap.extend(([index], [index]) for index in range(20_000))


def main(folder: Path, setting: PlainSetting) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = dist.device_mesh.init_device_mesh("cpu", (setting.pp, setting.dp), mesh_dim_names=("pp", "dp"))
    place, peers = mesh.get_local_rank("pp"), mesh.get_group("dp")
    chunks = CHUNKS.get(setting.schedule, 1)
    numbers = [place + chunk * setting.pp for chunk in range(chunks)]
    if "ZBV" in setting.schedule:
        numbers = [place, 2 * setting.pp - 1 - place]
    has_fault, chances = rank in setting.ranks, Random(rank)

    def seconds() -> float:
        share = setting.rows[mesh.get_local_rank("dp")] if setting.rows else 1
        is_slow = has_fault and setting.fault == "slow" and chances.random() < setting.chance
        return setting.forward_s * share * (setting.amount if is_slow else 1)

    modules = [Stage(seconds, peers if setting.rows else None) for _ in numbers]
    num_stages = setting.pp * chunks
    stages = [
        pipelining.PipelineStage(module, number, num_stages, torch.device("cpu"), group=mesh.get_group("pp"))
        for module, number in zip(modules, numbers, strict=True)
    ]
    kind = getattr(pipelining, setting.schedule)
    is_single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    schedule = kind(
        stages[0] if is_single else stages, setting.microbatches, loss_fn=lambda y, target: (y - target).square().mean()
    )
    optimizer = torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=1e-6)
    if has_fault and setting.fault == "python":
        _between(stages, chances, setting.chance, partial(time.sleep, setting.amount))
    if has_fault and setting.fault == "pauses":
        _between(stages, chances, setting.chance, _collect(setting.amount))
    batch = torch.zeros(setting.microbatches, _WIDTH)

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        if has_fault and setting.fault == "late" and chances.random() < setting.chance:
            time.sleep(setting.amount)
        inputs = (batch,) if 0 in numbers else ()
        target = {"target": batch} if num_stages - 1 in numbers else {}
        schedule.step(*inputs, **target)
        if setting.dp > 1:
            for module in modules:
                dist.all_reduce(module.weight.grad, group=peers)
        optimizer.step()
        dist.barrier()
        return time.perf_counter() - began

    lengths = [step() for _ in range(2 + setting.steps)][2:]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        recorded = [step() for _ in range(setting.steps)]
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
    times = {"unrecorded_s": lengths, "recorded_s": recorded}
    (folder / f"steps{rank}.times").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    fields = json.loads(sys.argv[2])
    main(Path(sys.argv[1]), PlainSetting(**{**fields, "rows": tuple(fields["rows"]), "ranks": tuple(fields["ranks"])}))
