"""Forward and backward of our tensor-parallel transformer layer against torch's DTensor ``parallelize_module``.

    python tools/bench/bench_tensor.py [--tp 2] [--seq 128 512] [--hidden 256] [--launches 2] [--rounds 10]

The layer: norm, fused qkv (column), attention, its projection (row), norm, and an MLP (column, GELU, row). Ours is the
:class:`instrument.models.gpt.Block` that trains; torch's has plain ``nn.Linear`` under ``ColwiseParallel`` and
``RowwiseParallel``, with SP ``SequenceParallel`` norms too, and a fused qkv whose rows are ordered so that a plain cut
gives each rank its heads, which is to torch's favour. Same values, sizes, processes, threads and backend.

All sides take turns in changing order, and a round's ratio compares neighbours in time. Outputs and gradients are
compared first. Under SP the gradients of norms are parts of a sum: ours are summed inside the times, torch leaves its
own in parts, and they are summed for the comparison alone. Prints medians over all rounds, and that of their ratios
ours/theirs (target ≤ 1.0).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from instrument.mesh import Mesh, fit_shape, make_mesh
from instrument.models.gpt import Block
from instrument.models.gpt_config import GptConfig
from instrument.models.parallel import ParallelOptions, make_parallel
from instrument.recorder import Recorder
from instrument.sequence.partial import partial_gradients, sum_partial_gradients
from instrument.tensor.heads import share_heads
from instrument.tensor.region import take_rows

SEQUENCE_DIM = 1
TOLERANCE = 1e-5
"""Of a float32 output or gradient, relative to its largest entry: sums are added in other orders."""

FORMS = {
    "tp": ParallelOptions(),
    "tp overlap": ParallelOptions(overlap=True),
    "sp": ParallelOptions(sequence=True),
    "sp overlap": ParallelOptions(sequence=True, overlap=True),
}
"""Ours; each is compared with torch's form of the same name without overlap, which torch does not have."""

Seconds = dict[str, list[float]]
"""Side → seconds per forward and backward in every round."""


@dataclass(frozen=True, slots=True)
class Setting:
    tp: int
    sequence: int
    microbatch_size: int
    hidden: int
    heads: int
    launches: int
    rounds: int
    steps: int

    @property
    def config(self) -> GptConfig:
        return GptConfig(1, self.hidden, self.heads, self.sequence)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """A layer with its input and the gradient of its output, both of this rank; ``finish`` ends a step's backward."""

    layer: nn.Module
    input: Tensor
    gradient: Tensor
    finish: Callable[[], None]

    def step(self) -> Tensor:
        output: Tensor = self.layer(self.input)
        output.backward(self.gradient)
        self.finish()
        return output

    def clear(self) -> None:
        for tensor in (self.input, *self.layer.parameters()):
            tensor.grad = None


class TorchBlock(nn.Module):
    """:class:`Block` of whole linear layers for ``parallelize_module`` to cut; it cuts ``heads`` with them."""

    def __init__(self, whole: Block, heads: int, size: int) -> None:
        super().__init__()
        hidden = whole.qkv.in_features
        self.head_dim = hidden // heads
        for name in ("attention_norm", "mlp_norm"):
            norm = nn.LayerNorm(hidden)
            norm.load_state_dict(getattr(whole, name).state_dict())
            setattr(self, name, norm)
        for name in ("qkv", "attention_out", "mlp_in", "mlp_out"):
            source = getattr(whole, name)
            linear = nn.Linear(source.in_features, source.out_features)
            linear.load_state_dict(source.state_dict())
            setattr(self, name, linear)
        with torch.no_grad():
            rows = [part for rank in range(size) for part in share_heads(heads, heads, rank, size).rows(self.head_dim)]
            for tensor in (self.qkv.weight, self.qkv.bias):
                tensor.copy_(take_rows(tensor.clone(), rows))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in qkv.chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attention_out(attended)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


def drawn_block(setting: Setting) -> Block:
    """The whole layer; norms and biases too are drawn, so that none is a neutral element."""
    whole = Block(setting.config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in whole.named_parameters():
        centre = 1.0 if "norm.weight" in name else 0.0
        nn.init.normal_(parameter, centre, 0.05, generator=generator)
    return whole


def data(setting: Setting, sequence: bool, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's input and gradient of the output, (microbatch, sequence or its shard, hidden)."""
    generator = torch.Generator().manual_seed(1)
    size = (setting.microbatch_size, setting.sequence, setting.hidden)
    whole = (torch.randn(size, generator=generator) for _ in range(2))
    x, gradient = ((t.chunk(setting.tp, SEQUENCE_DIM)[rank] if sequence else t).contiguous() for t in whole)
    return x.requires_grad_(), gradient


def ours(setting: Setting, mesh: Mesh, options: ParallelOptions) -> Side:
    parallel = make_parallel(mesh, options, Recorder())
    layer = Block(setting.config, parallel)
    layer.take(drawn_block(setting))
    partials = partial_gradients(layer)
    group = parallel.region.group

    def finish() -> None:
        if partials:
            sum_partial_gradients(partials, group)

    return Side(layer, *data(setting, options.sequence, mesh.tp_rank), finish)


def theirs(setting: Setting, mesh: DeviceMesh, sequence: bool) -> Side:
    layer = TorchBlock(drawn_block(setting), setting.heads, setting.tp)
    plan: dict[str, ParallelStyle] = {
        "qkv": ColwiseParallel(input_layouts=Shard(SEQUENCE_DIM) if sequence else None),
        "attention_out": RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM) if sequence else None),
        "mlp_in": ColwiseParallel(input_layouts=Shard(SEQUENCE_DIM) if sequence else None),
        "mlp_out": RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM) if sequence else None),
    }
    if sequence:
        plan |= {name: SequenceParallel(sequence_dim=SEQUENCE_DIM) for name in ("attention_norm", "mlp_norm")}
    parallelize_module(layer, mesh, plan)
    return Side(layer, *data(setting, sequence, mesh.get_local_rank()), lambda: None)


def local_gradient(gradient: Tensor) -> Tensor:
    """Part that a rank has of it, once parts of a sum are summed."""
    if not isinstance(gradient, DTensor):
        return gradient
    if any(placement.is_partial() for placement in gradient.placements):
        gradient = gradient.redistribute(placements=[Replicate()])
    local: Tensor = gradient.to_local()
    return local


def results(side: Side) -> Iterator[tuple[str, Tensor]]:
    output = side.step()
    yield "output", output.detach()
    assert side.input.grad is not None
    yield "input", side.input.grad
    for name, parameter in sorted(side.layer.named_parameters()):
        assert parameter.grad is not None
        yield name, local_gradient(parameter.grad)
    side.clear()


def compare(ours: Side, other: Side) -> None:
    """Fail unless both give the same output and gradients."""
    for (name, result), (wanted_name, wanted) in zip(results(ours), results(other), strict=True):
        assert name == wanted_name
        largest = float(wanted.abs().max())
        torch.testing.assert_close(
            result, wanted, rtol=0, atol=TOLERANCE * largest, msg=lambda message, name=name: f"{name}: {message}"
        )


def measure(side: Side, steps: int) -> float:
    """Seconds per forward and backward, from a barrier to a barrier."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        side.step()
        side.clear()
    dist.barrier()
    return (time.perf_counter() - start) / steps


def work(rank: int, port: int, setting: Setting, answers: SimpleQueue[Seconds]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.tp)
    mesh = make_mesh(fit_shape(setting.tp, pp=1, tp=setting.tp), "cpu", "gloo")
    device_mesh = init_device_mesh("cpu", (setting.tp,))
    sides = {f"torch {name}": theirs(setting, device_mesh, name == "sp") for name in ("tp", "sp")}
    sides |= {name: ours(setting, mesh, options) for name, options in FORMS.items()}
    for name in FORMS:
        compare(sides[name], sides[opponent(name)])
    seconds: Seconds = {name: [] for name in sides}
    for turn in range(setting.rounds + 1):
        for name in order(list(sides), turn):
            taken = measure(sides[name], setting.steps)
            if turn:  # the first round warms up
                seconds[name].append(taken)
    if rank == 0:
        answers.put(seconds)
    dist.destroy_process_group()


def opponent(form: str) -> str:
    return f"torch {form.split()[0]}"


def order(names: list[str], turn: int) -> list[str]:
    """Another one first in every turn, and every other time backwards."""
    first = turn % len(names)
    turned = names[first:] + names[:first]
    return turned if turn % 2 else turned[::-1]


def launch(setting: Setting) -> Seconds:
    """One launch of all ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (store.port, setting, answers), nprocs=setting.tp)
    return answers.get()


def report(setting: Setting, form: str, ours: list[float], others: list[float]) -> None:
    ratios = sorted(a / b for a, b in zip(ours, others, strict=True))
    ratio = statistics.median(ratios)
    spread = f"{ratios[len(ratios) // 4]:.3f}–{ratios[-1 - len(ratios) // 4]:.3f}"
    print(
        f"tp={setting.tp} b={setting.microbatch_size} s={setting.sequence} h={setting.hidden} {form:10}: "
        f"ours {statistics.median(ours) * 1e3:7.2f} ms   torch {statistics.median(others) * 1e3:7.2f} ms   "
        f"ratio {ratio:.3f} (middle half {spread}; target ≤ 1.0): {'met' if ratio <= 1 else 'MISSED'}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="our tensor-parallel layer against torch's")
    parser.add_argument("--tp", type=int, nargs="+", default=[2])
    parser.add_argument("--seq", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--launches", type=int, default=2, help="times to start the processes anew")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each side in a launch")
    parser.add_argument("--steps", type=int, default=3, help="in a row in each turn")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for tp, sequence in product(options.tp, options.seq):
        setting = Setting(
            tp,
            sequence,
            options.microbatch_size,
            options.hidden,
            options.heads,
            options.launches,
            options.rounds,
            options.steps,
        )
        rounds = [launch(setting) for _ in range(setting.launches)]
        joined = {name: [taken for seconds in rounds for taken in seconds[name]] for name in rounds[0]}
        for form in FORMS:
            report(setting, form, joined[form], joined[opponent(form)])


if __name__ == "__main__":
    main()
