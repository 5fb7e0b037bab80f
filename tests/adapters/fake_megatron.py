"""Modules of the shape of megatron-core 0.16's, small enough for one process: the same functions, arguments, order of calls."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pptrace.schedule import registry
from pptrace.schedule.actions import Action, Kind

_P2P = """
import torch.distributed as dist

def _p2p_ops(
    *, tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next,
    group, prev_pipeline_rank, next_pipeline_rank
):
    reqs = {}
    if tensor_send_next is not None:
        reqs["send_next"] = dist.isend(tensor_send_next, next_pipeline_rank, group)
    if tensor_recv_prev is not None:
        reqs["recv_prev"] = dist.irecv(tensor_recv_prev, prev_pipeline_rank, group)
    if tensor_send_prev is not None:
        reqs["send_prev"] = dist.isend(tensor_send_prev, prev_pipeline_rank, group)
    if tensor_recv_next is not None:
        reqs["recv_next"] = dist.irecv(tensor_recv_next, next_pipeline_rank, group)
    return reqs

def _batched_p2p_ops(
    *, tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next,
    group, prev_pipeline_rank, next_pipeline_rank
):
    raise NotImplementedError

def _communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next):
    return None
"""
_SCHEDULES = """
def get_model_config(model):
    return model.config

def forward_step(forward_step_func, data_iterator, model, num_microbatches, current_microbatch=None):
    return [forward_step_func(model, current_microbatch)], 0

def backward_step(input_tensor, output_tensor, output_tensor_grad, model_type, config):
    return None

def forward_backward_no_pipelining(*, forward_step_func, model, num_microbatches, forward_only=False):
    raise NotImplementedError

def forward_backward_pipelining_without_interleaving(*, forward_step_func, model, num_microbatches, forward_only=False):
    return run_rank(globals(), forward_step_func, [model], num_microbatches, forward_only)

def forward_backward_pipelining_with_interleaving(*, forward_step_func, model, num_microbatches, forward_only=False):
    return run_rank(globals(), forward_step_func, model, num_microbatches, forward_only)
"""
STATE = """
import torch.distributed as dist
sizes = {}

def initialize_model_parallel(tensor_model_parallel_size=1, order="tp-cp-ep-dp-pp"):
    pass

def get_pipeline_model_parallel_group():
    return dist.group.WORLD

def get_pipeline_model_parallel_world_size():
    return dist.get_world_size()

def get_pipeline_model_parallel_next_rank():
    return (dist.get_rank() + 1) % dist.get_world_size()

def get_pipeline_model_parallel_prev_rank():
    return (dist.get_rank() - 1) % dist.get_world_size()

def one():
    return 1

get_tensor_model_parallel_world_size = get_context_parallel_world_size = one
get_data_parallel_world_size = get_expert_model_parallel_world_size = one
"""


def install(patch: pytest.MonkeyPatch, changes: Iterable[tuple[str, str]] = ()) -> ModuleType:
    """Put the modules where Megatron-LM's are; the schedules. ``changes`` are texts to replace in their sources."""
    for name, source in (
        ("megatron.core.parallel_state", STATE),
        ("megatron.core.pipeline_parallel.p2p_communication", _P2P),
        ("megatron.core.pipeline_parallel.schedules", _SCHEDULES),
    ):
        for old, new in changes:
            source = source.replace(old, new)
        module = ModuleType(name)
        exec(source, vars(module))
        patch.setitem(sys.modules, name, module)
    vars(module)["run_rank"] = run_rank
    return module


class Model(torch.nn.Module):
    def __init__(self, group_size: int | None = None) -> None:
        super().__init__()
        self.config = SimpleNamespace(microbatch_group_size_per_vp_stage=group_size)


def run_rank(
    schedules: dict[str, Any], step: Any, models: list[Model], num_microbatches: int, forward_only: bool
) -> list[Any]:
    """Run this rank's row of the catalogue's plan as Megatron-LM does: messages in, the op, messages out."""
    pp, rank = dist.get_world_size(), dist.get_rank()
    name, group = ("interleaved-1f1b", pp) if len(models) > 1 else ("1f1b", None)
    plan = registry.build(name, pp, num_microbatches, len(models), group)
    outputs: dict[tuple[int, int | None], Any] = {}
    last = plan.num_stages - 1
    for action in plan.compute_actions(rank):
        chunk, work = action.stage // pp, (action.stage, action.microbatch)
        if action.kind is Kind.F:
            _send(**({"tensor_recv_prev": torch.zeros(2)} if action.stage else {}))
            made, _ = schedules["forward_step"](step, None, models[chunk], num_microbatches, action.microbatch)
            outputs[work] = made
            _send(**({"tensor_send_next": made[0]} if action.stage < last else {}))
        elif not forward_only:
            _send(**({"tensor_recv_next": torch.zeros(2)} if action.stage < last else {}))
            schedules["backward_step"](None, outputs.pop(work), None, None, None)
            _send(**({"tensor_send_prev": torch.zeros(3)} if action.stage else {}))
    return ["loss"]


def _send(**tensors: Any) -> None:
    if not tensors:
        return
    p2p = sys.modules["megatron.core.pipeline_parallel.p2p_communication"]
    names = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
    world, rank = dist.get_world_size(), dist.get_rank()
    ends = {"prev_pipeline_rank": (rank - 1) % world, "next_pipeline_rank": (rank + 1) % world}
    reqs = p2p._p2p_ops(**{name: tensors.get(name) for name in names}, group=dist.group.WORLD, **ends)
    for work in reqs.values():
        work.wait()


def expected(pp: int, rank: int, num_microbatches: int, num_chunks: int = 1) -> list[str]:
    """The words of a training pass of :func:`run_rank`; without waits, which groups of one process do not have."""
    name, group = ("interleaved-1f1b", pp) if num_chunks > 1 else ("1f1b", None)
    plan = registry.build(name, pp, num_microbatches, num_chunks, group)
    before, after, last = (rank - 1) % pp, (rank + 1) % pp, plan.num_stages - 1
    words: list[str] = []

    def message(kind: Kind, action: Action, end: str) -> None:
        words.append(f"{Action(kind, action.stage, action.microbatch)}{end}")

    for action in plan.compute_actions(rank):
        forward = action.kind is Kind.F
        if (action.stage if forward else last - action.stage) > 0:
            message(Kind.RECV_F if forward else Kind.RECV_B, action, f"<{before if forward else after}@8")
        words.append(str(action))
        if (last - action.stage if forward else action.stage) > 0:
            message(
                Kind.SEND_F if forward else Kind.SEND_B,
                action,
                f">{after if forward else before}@{8 if forward else 12}",
            )
    return words
