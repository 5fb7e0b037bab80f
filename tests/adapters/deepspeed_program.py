"""DeepSpeed's pipeline engine on CPUs over gloo: two layers per stage. For ``pptrace run``; arguments are key=value.

``truth`` is a folder that takes, by rank, every op as the stage's module sees it and every message by the values it carries.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402
from deepspeed.runtime.pipe import p2p  # noqa: E402
from deepspeed.runtime.pipe.engine import PipelineEngine  # noqa: E402
from torch import nn  # noqa: E402

options = {"m": 4, "steps": 3, "zero": 0, "groups": 1, "tensors": 1, "eval": 0, "truth": ""}
options |= {key: type(options[key])(value) for key, value in (item.split("=") for item in sys.argv[1:])}
deepspeed.utils.logger.setLevel(logging.ERROR)
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile C++
deepspeed.init_distributed(dist_backend="gloo")
rank = dist.get_rank()


def first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


class Layer(nn.Module):
    """Gives ``tensors`` tensors, the last layer one."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.net, self.tensors = nn.Linear(16, 16), tensors

    def forward(self, given: Any) -> Any:
        out = first(given) + self.net(first(given))
        if isinstance(given, tuple):
            out = out + 0 * given[1]
        return (out, out * 0.5) if self.tensors > 1 else out


torch.manual_seed(0)
tensors = int(options["tensors"])
layers = [*(LayerSpec(Layer, tensors) for _ in range(3)), LayerSpec(Layer, 1)]
module = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
parameters: Any = list(module.parameters())
if options["groups"] == 2:
    parameters = [{"params": [p for p in parameters if (p.ndim > 1) == matrices]} for matrices in (True, False)]
engine, *_ = deepspeed.initialize(
    model=module,
    model_parameters=parameters,
    config={
        "train_batch_size": 4 * int(options["m"]),
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": options["m"],
        "steps_per_print": 10**6,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": options["zero"]},
    },
)
stage = engine.grid.get_stage_id()
seen: list[list[Any]] = []
"""Of what this rank did, in its order: [kind, stage, microbatch], of a message first [kind, its values]."""
known: dict[tuple[str, tuple[float, ...]], int] = {}
"""By kind and values the microbatch of a message."""
count = 0
negotiates = 0


def values(tensor: torch.Tensor) -> tuple[float, ...]:
    return tuple(tensor.detach().flatten()[:8].tolist())


def forward(*args: Any, _forward: Callable[..., Any] = module.forward) -> Any:
    global count
    microbatch, count = count, count + 1
    seen.append(["F", stage, microbatch])
    given = first(args[0])
    known["RECV_F", values(given)] = microbatch
    if given.requires_grad:
        given.register_hook(lambda grad: known.__setitem__(("SEND_B", values(grad)), microbatch))
    result = _forward(*args)
    out = first(result)
    known["SEND_F", values(out)] = microbatch

    def note(grad: torch.Tensor) -> None:
        if ["B", stage, microbatch] not in seen:  # the engine goes back once for each tensor of an output
            seen.append(["B", stage, microbatch])
            known["RECV_B", values(grad)] = microbatch

    if out.requires_grad:
        out.register_hook(note)
    return result


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Shapes that are exchanged before tensors are no messages of a microbatch."""

    def negotiated(*args: Any) -> Any:
        global negotiates
        negotiates += 1
        try:
            return function(*args)
        finally:
            negotiates -= 1

    return negotiated


def watched(function: Callable[..., Any], down: str, up: str) -> Callable[..., Any]:
    def passed(tensor: torch.Tensor, other: int) -> Any:
        result = function(tensor, other)
        if not negotiates:
            seen.append([up if other > stage else down, values(tensor)])
        return result

    return passed


def resolved() -> list[list[Any]]:
    """Of several tensors of one message only the first is known."""
    indices = [[item[0], stage, known.get((item[0], item[1]))] if len(item) == 2 else item for item in seen]
    return [index for index in indices if index[2] is not None]


module.forward = forward
if options["truth"]:
    for name in ("_send_tensor_meta", "_recv_tensor_meta"):
        setattr(PipelineEngine, name, quiet(getattr(PipelineEngine, name)))
    p2p.send, p2p.recv = watched(p2p.send, "SEND_B", "SEND_F"), watched(p2p.recv, "RECV_F", "RECV_B")


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)


batches, steps = data(), []
for step in range(int(options["steps"])):
    count = 0
    seen.clear()
    known.clear()
    loss = engine.train_batch(batches)
    steps.append(resolved())
    print(f"loss of rank {rank}, step {step}: {float(loss)!r}", flush=True)
    if options["eval"]:
        engine.eval_batch(batches)
if options["truth"]:
    folder = Path(str(options["truth"]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.json").write_text(json.dumps(steps))
dist.destroy_process_group()
