"""DeepSeek's DualPipe (``v=0``) or DualPipe-V on CPUs over gloo. For ``pptrace run``; arguments are key=value.

Each microbatch's values are its number, so that the stages' functions know what they compute; ``truth`` is a folder that takes,
by rank, every op as they saw it. ``overlap=1``: the stages compute forwards and backwards together.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
from dualpipe import DualPipe, DualPipeV, comm, set_p2p_tensor_dtype, set_p2p_tensor_shapes  # noqa: E402
from dualpipe.utils import WeightGradStore, run_backward  # noqa: E402

options = {"v": 0, "m": 10, "steps": 3, "overlap": 0, "eval": 0, "mapping": "", "truth": ""}
options |= {key: type(options[key])(value) for key, value in (item.split("=") for item in sys.argv[1:])}
comm.build_from_tensor_shapes = lambda: [
    torch.empty(shape, dtype=comm.TENSOR_DTYPE, requires_grad=True) for shape in comm.TENSOR_SHAPES
]
seen: list[list[Any]] = []
"""Of what this rank did, in its order: [kind, stage, microbatch]."""


class Through(torch.autograd.Function):
    """Hands on what it gets; notes whose forward, backward and weight gradients it is."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, stage: int) -> torch.Tensor:
        ctx.stage, ctx.weight = stage, weight
        seen.append(["F", stage, int(given.flatten()[0])])
        return given + 0 * weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        stage, weight, microbatch = ctx.stage, ctx.weight, round(float(gradient.flatten()[0]))
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad

        def gradient_of_weight() -> None:
            weight.grad += gradient.mean()
            if is_apart:
                seen.append(["W", stage, microbatch])

        is_apart = WeightGradStore.enabled
        seen.append(["I" if is_apart else "B", stage, microbatch])
        WeightGradStore.put(gradient_of_weight) if is_apart else gradient_of_weight()
        return gradient, None, None


class Stage(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.weight = number, nn.Parameter(torch.ones(4, 4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return Through.apply(given, self.weight, self.number)  # type: ignore[no-any-return,no-untyped-call]


def overlapped(
    _: type, module: Any, inputs: Any, criterion: Any, labels: Any, _back: Any, loss: Any, outputs: Any, gradients: Any
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    forward = [module(*inputs)]
    own_loss = criterion(*forward, *labels) if criterion is not None else None
    if loss is None:
        run_backward(outputs, gradients)
    else:
        loss.backward()
        loss.detach_()
    return forward, own_loss


if options["overlap"]:
    Stage.overlapped_forward_backward = classmethod(overlapped)  # type: ignore[attr-defined]
dist.init_process_group("gloo")
rank, pp, num = dist.get_rank(), dist.get_world_size(), int(options["m"])
mapping = [int(place) for place in str(options["mapping"]).split(",")] if options["mapping"] else list(range(pp))
place = mapping[rank]
set_p2p_tensor_shapes([(1, 8)])
set_p2p_tensor_dtype(torch.float32)
pipeline = (DualPipeV if options["v"] else DualPipe)((Stage(place), Stage(2 * pp - 1 - place)), rank_mapping=mapping)
optimizer = torch.optim.SGD(pipeline.parameters(), lr=1e-3)


def of_direction(numbers: range) -> torch.Tensor:
    return torch.stack([torch.full((8,), float(number)) for number in numbers])


given = labels = None
if options["v"]:
    if place == 0:
        given = labels = of_direction(range(num))
elif place in (0, pp - 1):  # each end feeds one direction, and has the losses of the other
    directions = range(num // 2), range(num // 2, num)
    given = of_direction(directions[place > 0])
    labels = given


def loss_of(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output * output.detach()).sum()  # whose gradient is the microbatch's number


criterion = loss_of if given is not None else None
steps: list[list[list[Any]]] = []
for step in range(int(options["steps"])):
    seen.clear()
    loss, _ = pipeline.step(given, num_chunks=num, criterion=criterion, labels=[] if labels is None else [labels])
    steps.append([list(item) for item in seen])
    optimizer.step()
    optimizer.zero_grad()
    if options["eval"]:
        with torch.no_grad():
            pipeline.step(given, num_chunks=num, criterion=criterion, labels=[] if labels is None else [labels])
    if loss is not None:
        print(f"loss of {rank} {step}: {loss.mean().item().hex()}", flush=True)
if options["truth"]:
    folder = Path(str(options["truth"]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.json").write_text(json.dumps(steps))
dist.destroy_process_group()
