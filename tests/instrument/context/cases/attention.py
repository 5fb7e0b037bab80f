"""Functions that the ranks of the pool run for the tests of context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from instrument.context import ring
from instrument.context.attention import ContextAttention, make_context_groups
from instrument.context.kernels import CpuFlash, Exact, Gradients, Kernel
from instrument.context.shard import ContextShape, shard_sequence
from instrument.mesh import fit_shape, make_mesh
from instrument.recorder import Recorder
from instrument.route import Route
from pptrace.marks import Mark
from tests.instrument.cases.collectives import Listening, heard

HEADS, HEAD_DIM, MICROBATCH = 4, 8, 2


@dataclass(frozen=True, slots=True)
class ContextCase:
    """One layer's attention; a sequence of 6 · cp positions unless told otherwise."""

    shape: ContextShape
    causal: bool = True
    kv_heads: int = HEADS
    positions: int = 0
    dtype: torch.dtype = torch.float64
    again: bool = False  # inside a checkpoint
    exact: bool = False  # without flash kernels
    rows_apart: bool = False  # head dim is not the fastest-varying dimension
    route: Route = Route.DIRECT

    @property
    def sequence(self) -> int:
        return self.positions or 6 * self.shape.size

    def whole(self) -> tuple[Tensor, ...]:
        """q, k, v and the gradient of the output, (microbatch, sequence, heads, head dim) as a projection gives them."""
        generator = torch.Generator().manual_seed(self.sequence)
        heads = (HEADS, self.kv_heads, self.kv_heads, HEADS)
        return tuple(
            torch.randn(MICROBATCH, self.sequence, number, HEAD_DIM, dtype=self.dtype, generator=generator)
            for number in heads
        )


Maker = Callable[[ContextCase], tuple[ContextAttention, int]]
"""Of a case its attention on this rank, and the rank's place on cp."""


def maker(size: int, pp: int = 1, recorder: Recorder | None = None) -> Maker:
    """Make attentions of cases on ``size`` context ranks; the groups of a shape once."""
    mesh = make_mesh(fit_shape(dist.get_world_size(), pp, cp=size), "cpu", "gloo")
    groups_of = cache(lambda shape, route: make_context_groups(mesh, shape, recorder or Recorder(), route))

    def make(case: ContextCase) -> tuple[ContextAttention, int]:
        return ContextAttention(groups_of(case.shape, case.route), case.causal), mesh.coordinates[2]

    return make


def errors(cases: Sequence[ContextCase], pp: int = 1) -> list[list[float]]:
    """Of every case the largest differences from attention over the whole sequence: output, and gradients of q, k, v."""
    make = maker(cases[0].shape.size, pp)
    return [_errors(case, make) for case in cases]


def _errors(case: ContextCase, make: Maker) -> list[float]:
    attention, rank = make(case)
    with computed_by(Exact()) if case.exact else nullcontext():
        result = run_layer(attention, case, rank)
    assert {tensor.dtype for tensor in result} == {case.dtype}
    wanted = [shard_sequence(tensor, case.shape, rank) for tensor in reference(case)]
    return [float((ours - other).abs().max()) for ours, other in zip(result, wanted, strict=True)]


def computed_by(kernel: Kernel) -> AbstractContextManager[object]:
    """Let rings compute with a kernel."""
    return mock.patch.object(ring, "kernel_for", return_value=kernel)


def run_layer(attention: ContextAttention, case: ContextCase, rank: int) -> list[Tensor]:
    """Output and gradients of q, k and v of this rank, as the pipeline runs them: from an edge of the graph."""
    q, k, v, gradient = (shard_sequence(tensor, case.shape, rank) for tensor in case.whole())
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    function = attention
    if case.again:
        function = lambda *inputs: checkpoint(attention, *inputs, use_reentrant=False)  # noqa: E731
    inputs = [leaf.transpose(1, 2) for leaf in leaves]
    if case.rows_apart:
        inputs = [tensor.mT.contiguous().mT for tensor in inputs]
    output = function(*inputs).transpose(1, 2)
    edge = torch.autograd.graph.get_gradient_edge(output)
    answer = output.detach().clone()
    del output, inputs
    torch.autograd.backward(edge, gradient)
    return [answer, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def reference(case: ContextCase) -> list[Tensor]:
    """The same in one process, in float64."""
    *leaves, gradient = (tensor.double() for tensor in case.whole())
    inputs = [leaf.requires_grad_().transpose(1, 2) for leaf in leaves]
    output = F.scaled_dot_product_attention(*inputs, is_causal=case.causal, enable_gqa=True).transpose(1, 2)
    output.backward(gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def marks_of(cases: Sequence[ContextCase]) -> list[tuple[list[Mark], list[Mark]]]:
    """The marks of forward, and of backward, of every case."""
    recorder = Listening()
    make = maker(cases[0].shape.size, recorder=recorder)
    return [_marks_of(case, make, recorder) for case in cases]


def inputs_of(case: ContextCase, rank: int) -> tuple[list[Tensor], Tensor]:
    """This rank's q, k and v, and the gradient of its output, each head by itself."""
    q, k, v, gradient = (shard_sequence(tensor, case.shape, rank).transpose(1, 2) for tensor in case.whole())
    return [tensor.requires_grad_() for tensor in (q, k, v)], gradient


def _marks_of(case: ContextCase, make: Maker, recorder: Listening) -> tuple[list[Mark], list[Mark]]:
    attention, rank = make(case)
    leaves, gradient = inputs_of(case, rank)
    output, forward = heard(recorder, lambda: attention(*leaves))
    _, backward = heard(recorder, lambda: output.backward(gradient))
    return forward, backward


def order_of_work(case: ContextCase) -> tuple[str, str]:
    """Forward and backward as a letter for each event: x posts an exchange, w waits for one, c computes a square."""
    attention, rank = maker(case.shape.size)(case)
    leaves, gradient = inputs_of(case, rank)
    with profile(activities=[ProfilerActivity.CPU]) as ahead:
        output = attention(*leaves)
    with profile(activities=[ProfilerActivity.CPU]) as back:
        output.backward(gradient)
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    posts = ("pp1:exchange", "pp1:all_gather", "pp1:reduce_scatter")
    letters = {**dict.fromkeys(posts, "x"), "pp1:await": "w", flash: "c", f"{flash}_backward": "c"}

    def read(profiler: Any) -> str:
        events = sorted(profiler.events(), key=lambda event: event.time_range.start)
        return "".join(letters.get(event.name.split(" ")[0], "") for event in events)

    return read(ahead), read(back)


class CountingKernel(CpuFlash):
    """Counts the elements of the score matrix that are asked for."""

    def __init__(self) -> None:
        self.num_scores = [0, 0]

    def _count(self, index: int, q: Tensor, k: Tensor, masked: bool) -> None:
        rows, columns = q.shape[2], k.shape[2]
        assert not masked or rows == columns
        self.num_scores[index] += rows * (rows + 1) // 2 if masked else rows * columns

    def forward(self, q: Tensor, k: Tensor, v: Tensor, masked: bool) -> tuple[Tensor, Tensor]:
        self._count(0, q, k, masked)
        return super().forward(q, k, v, masked)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, masked: bool
    ) -> Gradients:
        self._count(1, q, k, masked)
        return super().backward(grad, q, k, v, out, lse, masked)


def num_scores(cases: Sequence[ContextCase]) -> list[list[int]]:
    """Elements of the score matrix that this rank computes in forward and in backward, of every case."""
    result = []
    make = maker(cases[0].shape.size)
    for case in cases:
        attention, rank = make(case)
        kernel = CountingKernel()
        with computed_by(kernel):
            run_layer(attention, case, rank)
        result.append(kernel.num_scores)
    return result
