"""Torch's own schedules under hooks, with a record of what really ran that the hooks have no part in."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tests.adapters.hooked import hooks, recorded
from tests.frameworks.torch_cases import SCHEDULES, TorchRun

WIDTH = 32


class LoggedStage(PipelineStage):
    """Says what it ran: (kind, stage, microbatch, from, to), ns of the wall clock."""

    log: list[tuple[str, int, int, int, int]]

    def _logged(self, kind: str, microbatch: int, begin: int) -> None:
        self.log.append((kind, self.stage_index, microbatch, begin, time.time_ns()))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin = time.time_ns()
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._logged("F", fwd_chunk_id, begin)
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        begin = time.time_ns()
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        full = args[1] if len(args) > 1 else kwargs.get("full_backward", True)
        self._logged("B" if full else "I", bwd_chunk_id, begin)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        begin = time.time_ns()
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._logged("W", bwd_chunk_id, begin)


def _block(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def make(run: TorchRun, kind: Any = None) -> tuple[Any, torch.optim.Optimizer, list[LoggedStage]]:
    """The schedule, the optimizer and the stages of this rank."""
    plan = run.plan
    held = plan.stages_of(dist.get_rank())
    cpu = torch.device("cpu")
    stages = [LoggedStage(_block(index), index, plan.num_stages, cpu) for index in held]
    for stage in stages:
        stage.log = []
    chosen = kind or SCHEDULES[run.schedule]
    single = issubclass(chosen, ScheduleGPipe | Schedule1F1B)
    schedule = chosen(stages[0] if single else stages, run.microbatches, loss_fn=nn.functional.mse_loss)
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]

    class Optimizer(torch.optim.SGD):
        """One of this case's own: torch wraps each class of optimizers once in a process, for the hooks of that time."""

        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    return schedule, Optimizer(parameters, lr=0.1), stages


def step(schedule: Any, stages: list[LoggedStage], microbatches: int, seed: int) -> list[str]:
    """One pass; the losses as hexadecimal numbers, where this rank has them."""
    generator = torch.Generator().manual_seed(seed)
    tokens, target = (torch.randn(2 * microbatches, WIDTH, generator=generator) for _ in range(2))
    losses: list[torch.Tensor] = []
    is_last = any(stage.is_last for stage in stages)
    inputs = (tokens,) if any(stage.is_first for stage in stages) else ()
    schedule.step(*inputs, **({"target": target, "losses": losses} if is_last else {}))
    return [loss.item().hex() for loss in losses]


def train(
    run: TorchRun, folder: str, hooked: bool = True, kind: Any = None, passes: int = 1
) -> tuple[list[str], list[list[Any]]]:
    """Some steps of so many passes each, those after the first recorded into ``folder``, with or without hooks.

    Returns:
        The losses of all steps, and by recorded step what this rank ran.
    """
    path = Path(folder) / f"rank{dist.get_rank()}.json"
    if not hooked:
        schedule, optimizer, stages = make(run, kind)
        return _record(run, schedule, optimizer, stages, recorded(path), passes)
    with hooks() as (session, adapters):
        schedule, optimizer, stages = make(run, kind)
        result = _record(run, schedule, optimizer, stages, recorded(path, session, adapters), passes)
        assert adapters.hooks.lines == []
        return result


def _record(
    run: TorchRun,
    schedule: Any,
    optimizer: torch.optim.Optimizer,
    stages: list[LoggedStage],
    recording: AbstractContextManager[None],
    passes: int,
) -> tuple[list[str], list[list[Any]]]:
    """Train, and record all steps but the first."""
    losses = _whole_step(schedule, optimizer, stages, run, range(passes))
    ran = []
    dist.barrier()
    with recording:
        for number in range(run.steps):
            for stage in stages:
                stage.log.clear()
            losses += _whole_step(schedule, optimizer, stages, run, range((number + 1) * passes, (number + 2) * passes))
            ran.append(sorted((list(entry) for stage in stages for entry in stage.log), key=lambda entry: entry[3]))
    return losses, ran


def _whole_step(
    schedule: Any, optimizer: torch.optim.Optimizer, stages: list[LoggedStage], run: TorchRun, seeds: range
) -> list[str]:
    losses = [loss for seed in seeds for loss in step(schedule, stages, run.microbatches, seed)]
    optimizer.step()
    optimizer.zero_grad()
    return losses
