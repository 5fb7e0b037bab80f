"""Modules of the shape of DeepSpeed 0.19's pipeline engine, small enough for one process."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instrument.adapters.deepspeed_pipe import LOAD
from pptrace.schedule import registry
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan

INSTRUCTIONS = (
    *("OptimizerStep", "ReduceGrads", "ReduceTiedGrads", LOAD, "ForwardPass", "BackwardPass"),
    *("SendActivation", "RecvActivation", "SendGrad", "RecvGrad"),
)


class Instruction:
    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs


def install(patch: pytest.MonkeyPatch, without: Iterable[str] = ()) -> ModuleType:
    """The engine's module, whose schedule runs 1F1B in buffers that are used again; ``without`` these instructions."""
    schedule = ModuleType("deepspeed.runtime.pipe.schedule")
    kinds = {name: type(name, (Instruction,), {}) for name in INSTRUCTIONS if name not in without}
    train = type("TrainSchedule", (TrainSchedule,), {"__module__": schedule.__name__, "kinds": kinds})
    vars(schedule).update(kinds, TrainSchedule=train)
    p2p = ModuleType("deepspeed.runtime.pipe.p2p")
    vars(p2p).update(send=lambda tensor, dest_stage: None, recv=lambda tensor, src_stage: None)
    engine = ModuleType("deepspeed.runtime.pipe.engine")
    table = {kind: getattr(Engine, f"exec_{name.lower()}") for name, kind in kinds.items()}
    own = {name: vars(Engine)[name] for name in ("_exec_schedule", "_send_tensor_meta", "_recv_tensor_meta")}
    members = {"_INSTRUCTION_MAP": table, "p2p": p2p, **own}
    vars(engine).update(p2p=p2p, schedule=schedule, PipelineEngine=type("PipelineEngine", (Engine,), members))
    for module in (schedule, p2p, engine):
        patch.setitem(sys.modules, module.__name__, module)
    return engine


class TrainSchedule:
    """The catalogue's 1F1B as instructions; a stage has as many buffers as microbatches in flight."""

    kinds: dict[str, type[Instruction]]

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id

    def __iter__(self) -> Iterator[list[Instruction]]:
        return self.steps()

    def steps(self) -> Iterator[list[Instruction]]:
        plan: Plan = registry.build("1f1b", self.stages, self.micro_batches, 1)
        buffers = max(2, min(self.stages - self.stage_id, self.micro_batches))
        last = self.stages - 1
        for action in plan.compute_actions(self.stage_id):
            buffer = {"buffer_id": int(action.microbatch or 0) % buffers}
            names = ["RecvActivation", LOAD, "ForwardPass", "SendActivation"]
            if action.kind is Kind.B:
                names = ["RecvGrad", "BackwardPass", "SendGrad"]
            without = {LOAD} if 0 < self.stage_id < last else set()
            without |= {"RecvActivation", "SendGrad"} if self.stage_id == 0 else set()
            without |= {"SendActivation", "RecvGrad"} if self.stage_id == last else set()
            yield [self.kinds[name](**buffer) for name in names if name not in without]
        yield [self.kinds[name]() for name in ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep")]


class Engine:
    """One rank; each activation is ``tensors`` tensors of 8 bytes, each gradient one of 12."""

    _INSTRUCTION_MAP: dict[type, Any]
    p2p: ModuleType

    def __init__(self, micro_batches: int, tensors: int = 1) -> None:
        world = dist.get_world_size()
        self.stage_id, self.micro_batches, self.tensors = dist.get_rank(), micro_batches, tensors
        self.sends_shape, self.receives_shape, self.steps = True, True, 0
        topology = SimpleNamespace(get_axis_names=lambda: ["data", "pipe", "other"])
        sizes = {"pipe_parallel_size": world, "data_parallel_size": 1, "model_parallel_size": 1}
        self.grid = SimpleNamespace(
            **sizes,
            topology=lambda: topology,
            stage_to_global=lambda stage_id: stage_id,
            pp_proc_group=dist.group.WORLD,
        )

    def train_batch(self) -> str:
        schedule = sys.modules["deepspeed.runtime.pipe.schedule"].TrainSchedule
        self._exec_schedule(schedule(self.micro_batches, dist.get_world_size(), self.stage_id))
        return "loss"

    def eval_batch(self) -> str:
        with torch.no_grad():
            return self.train_batch()

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        for commands in pipe_schedule:
            for command in commands:
                MethodType(self._INSTRUCTION_MAP[type(command)], self)(**command.kwargs)

    def _send_tensor_meta(self, buffer: Any, recv_stage: int) -> None:
        self.p2p.send(torch.zeros(4), dest_stage=recv_stage)

    def _recv_tensor_meta(self, send_stage: int) -> None:
        self.p2p.recv(torch.zeros(4), src_stage=send_stage)

    def exec_sendactivation(self, buffer_id: int) -> None:
        if self.sends_shape:
            self.sends_shape = False
            self._send_tensor_meta(None, self.stage_id + 1)
        for _ in range(self.tensors):
            self.p2p.send(torch.zeros(2), self.stage_id + 1)

    def exec_recvactivation(self, buffer_id: int) -> None:
        if self.receives_shape:
            self.receives_shape = False
            self._recv_tensor_meta(self.stage_id - 1)
        for _ in range(self.tensors):
            self.p2p.recv(torch.zeros(2), self.stage_id - 1)

    def exec_sendgrad(self, buffer_id: int) -> None:
        self.p2p.send(torch.zeros(3), self.stage_id - 1)

    def exec_recvgrad(self, buffer_id: int) -> None:
        self.p2p.recv(torch.zeros(3), self.stage_id + 1)

    def exec_optimizerstep(self) -> None:
        self.steps += 1

    def nothing(self, buffer_id: int = 0) -> None:
        pass

    exec_reducegrads = exec_reducetiedgrads = exec_loadmicrobatch = nothing
    exec_forwardpass = exec_backwardpass = nothing
