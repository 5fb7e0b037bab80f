"""The calls of megatron-core's own schedules, rank by rank in one process: a script that prints JSON.

Its argument is a JSON list of [pp, rank, microbatches, chunks, group size, overlap, warmup_flush, batched]. The schedules and the
P2PCommunicator are megatron-core's; torch.distributed's functions under them record what they are given. Each answer is a list
of [F or B, stage, microbatch] and, for a call, of [post or wait, [[kind, stage, microbatch], …]]; of [reduce, [stage]] where its
``grad_sync_func`` (``align_grad_reduce``) is called.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

KINDS = {("send", "next"): "SEND_F", ("recv", "prev"): "RECV_F", ("send", "prev"): "SEND_B", ("recv", "next"): "RECV_B"}
zeros, empty = torch.zeros, torch.empty


def on_cpu(make: Any) -> Any:
    return lambda *args, **kwargs: make(*args, **{k: v for k, v in kwargs.items() if k != "device"})


torch.cuda.current_device = lambda: 0
dist.is_initialized = lambda: True
torch.cuda.synchronize = lambda *_: None
torch.zeros, torch.empty = on_cpu(zeros), on_cpu(empty)

from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.pipeline_parallel import p2p_communication, schedules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class Group:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Recording:
    """One rank's pass: events with the tensors of messages, resolved to stages and microbatches at its end."""

    def __init__(self, pp: int, rank: int) -> None:
        self.pp, self.rank = pp, rank
        self.events: list[list[Any]] = []
        self.call: list[list[Any]] = []
        self.inputs: list[tuple[torch.Tensor, list[int]]] = []
        self.outputs: list[tuple[torch.Tensor, list[int]]] = []
        self.gradients: list[tuple[torch.Tensor, list[int]]] = []

    def post(self, sends: bool, tensor: torch.Tensor, end: str) -> SimpleNamespace:
        item = [KINDS["send" if sends else "recv", end], tensor]
        self.call.append(item)
        return SimpleNamespace(wait=lambda: self.events.append(["wait", [item]]))

    def resolved(self) -> list[list[Any]]:
        def named(item: list[Any]) -> list[Any]:
            kind, tensor = item
            if kind == "SEND_B":
                return [kind, *next(known for given, known in self.inputs if given.grad is tensor)]
            if kind == "RECV_B":
                return [kind, *next(known for grad, known in self.gradients if grad.data_ptr() == tensor.data_ptr())]
            known_by = self.outputs if kind == "SEND_F" else self.inputs
            return [kind, *next(known for given, known in known_by if given is tensor)]

        return [
            event if event[0] in ("F", "B", "reduce") else [event[0], [named(item) for item in event[1]]]
            for event in self.events
        ]


class Stage(nn.Module):
    def __init__(self, config: TransformerConfig, recording: Recording, chunk: int) -> None:
        super().__init__()
        self.config, self.recording, self.model_type = config, recording, ModelType.encoder_or_decoder
        self.stage = chunk * recording.pp + recording.rank
        self.weight = nn.Parameter(torch.ones(()))
        self.given: torch.Tensor | None = None
        self.count = 0

    def set_input_tensor(self, given: Any) -> None:
        self.given = given[0] if isinstance(given, list) else given

    def forward(self) -> torch.Tensor:
        seen, known = self.recording, [self.stage, self.count]
        self.count += 1
        seen.events.append(["F", *known])
        x = torch.ones(2, 1, 4)
        if self.given is not None:
            x = self.given
            seen.inputs.append((x, known))
        out = x * self.weight
        seen.outputs.append((out, known))

        def backward(grad: torch.Tensor) -> None:
            seen.events.append(["B", *known])
            seen.gradients.append((grad, known))

        out.register_hook(backward)
        return out


def run(pp: int, rank: int, m: int, v: int, n: int, overlap: bool, flush: bool, batched: bool) -> list[list[Any]]:
    seen = Recording(pp, rank)
    virtual = {"virtual_pipeline_model_parallel_size": v, "microbatch_group_size_per_vp_stage": n} if v > 1 else {}
    config = TransformerConfig(
        num_layers=pp * v, hidden_size=4, num_attention_heads=1, pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32, batch_p2p_comm=batched, overlap_p2p_comm=overlap,
        overlap_p2p_comm_warmup_flush=flush, deallocate_pipeline_outputs=False, use_cpu_initialization=True, **virtual,
    )  # fmt: skip
    dist.get_global_rank = lambda _group, peer: "next" if peer == (rank + 1) % pp else "prev"
    if pp == 2:  # one rank on both sides: the communicator asks for the next one first
        sides = iter(("next", "prev"))
        dist.get_global_rank = lambda _group, _peer: next(sides)
    dist.get_backend = lambda _group=None: "gloo"
    dist.isend = lambda tensor, dst, group=None: seen.post(True, tensor, dst)
    dist.irecv = lambda tensor, src, group=None: seen.post(False, tensor, src)
    dist.P2POp = lambda function, tensor, peer, group=None: (function, tensor, peer)
    dist.batch_isend_irecv = lambda ops: [function(tensor, peer) for function, tensor, peer in ops]
    communicator = p2p_communication.P2PCommunicator(Group(pp, rank), config)
    for name in ("_p2p_ops", "_batched_p2p_ops"):
        setattr(p2p_communication, name, whole(seen, ORIGINAL[name]))
    one = Group(1, 0)
    groups = SimpleNamespace(tp=one, cp=one, embd=None, pos_embd=None, pp=communicator.pp_group, dp_cp=one)
    stages = [Stage(config, seen, chunk) for chunk in range(v)]

    def reduce_of(stage: Stage) -> Any:
        return lambda _parameters: seen.events.append(["reduce", [stage.stage]])

    config.no_sync_func = nullcontext
    config.grad_sync_func = [reduce_of(stage) for stage in stages] if v > 1 else reduce_of(stages[0])

    def forward_step(_batches: Any, model: Any) -> Any:
        return model(), lambda out: (out.sum(), {})

    of = schedules.forward_backward_pipelining_with_interleaving
    of = of if v > 1 else schedules.forward_backward_pipelining_without_interleaving
    of(
        forward_step_func=forward_step, data_iterator=[None] * v, model=stages, num_microbatches=m, seq_length=2,
        micro_batch_size=1, forward_only=False, p2p_communicator=communicator, pg_collection=groups,
    )  # fmt: skip
    return seen.resolved()


ORIGINAL = {name: getattr(p2p_communication, name) for name in ("_p2p_ops", "_batched_p2p_ops")}


def whole(seen: Recording, post: Any) -> Any:
    """A function that posts the transfers of a call, which are one event in the order in which it posts them."""

    def posted(**kwargs: Any) -> Any:
        seen.call = []
        made = post(**kwargs)
        if seen.call:
            seen.events.append(["post", seen.call])
        return made

    return posted


print(json.dumps([run(*case) for case in json.loads(sys.argv[1])]))
