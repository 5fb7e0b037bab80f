"""Functions that the ranks of the pool run for the tests of tensor and sequence parallelism.

The reference is computed by every rank for itself with the same values in torch's plain modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from instrument.backward_split.split import Splittable, WeightQueue, WeightWork, attach
from instrument.collectives import AxisGroup
from instrument.route import Route
from instrument.sequence.partial import partial_gradients, sum_partial_gradients
from instrument.sequence.shards import local_part
from instrument.tensor.cross_entropy import vocab_parallel_cross_entropy
from instrument.tensor.embedding import VocabParallelEmbedding
from instrument.tensor.linear import ColumnParallelLinear, RowParallelLinear
from instrument.tensor.region import Region
from pptrace.marks import PREFIX, Mark
from tests.instrument.cases.collectives import Listening, axis_of_all_ranks, heard

BATCH, SEQUENCE, HIDDEN, VOCABULARY = 2, 8, 16, 12
NUM_BYTES = BATCH * SEQUENCE * HIDDEN * 8
"""Of one activation b·s·h in float64."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way for the layers to work."""

    sequence: bool = False
    overlap: bool = False
    split: bool = False
    route: Route = Route.DIRECT


@dataclass(frozen=True, slots=True)
class Outcome:
    """Largest absolute differences from one process, by name, and the marks of forward, backward (B or I), W and the sums."""

    errors: dict[str, float]
    forward: list[Mark]
    backward: list[Mark]
    weights: list[Mark]
    sync: list[Mark]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def error(result: Tensor | None, expected: Tensor | None) -> float:
    assert result.shape == expected.shape, (result.shape, expected.shape)
    return float((result.detach() - expected.detach()).abs().max())


def backward_in_parts(
    group: AxisGroup, module: nn.Module, output: Tensor, gradient: Tensor | None, queue: WeightQueue | None
) -> tuple[list[Mark], list[Mark]]:
    """The marks of B and nothing, or of I and W. No parameter of a layer that can be split has a gradient before W."""

    def run() -> list[WeightWork]:
        if queue is None:
            output.backward(gradient)
            return []
        with queue.collecting() as collected:
            output.backward(gradient)
        return collected

    waiting, marks = heard(group.recorder, run)
    layers = [part for part in module.modules() if isinstance(part, Splittable)] if queue is not None else []
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters(recurse=False))
    _, of_weights = heard(group.recorder, lambda: [work.run() for work in waiting])
    return marks, of_weights


def column(variants: Sequence[Variant]) -> list[Outcome]:
    return [_linear(variant, _ColumnOf(), 3 * HIDDEN) for variant in variants]


def row(variants: Sequence[Variant]) -> list[Outcome]:
    return [_linear(variant, _RowOf(), HIDDEN) for variant in variants]


class _ColumnOf:
    """Whole input (or its shard) → a part of the outputs."""

    def layer(self, plain: nn.Linear, region: Region) -> ColumnParallelLinear:
        layer = ColumnParallelLinear(plain.in_features, plain.out_features, region, dtype=torch.float64)
        layer.take(plain.weight, plain.bias)
        return layer

    def of_input(self, x: Tensor, region: Region) -> Tensor:
        return local_part(x, -2, region.group) if region.sequence else x

    def of_output(self, y: Tensor, region: Region) -> Tensor:
        return local_part(y, -1, region.group)

    def of_weight(self, weight: Tensor, region: Region) -> Tensor:
        return local_part(weight, 0, region.group)

    def of_bias(self, bias: Tensor, region: Region) -> Tensor:
        return local_part(bias, 0, region.group)


class _RowOf:
    """A part of the inputs → whole output (or its shard)."""

    def layer(self, plain: nn.Linear, region: Region) -> RowParallelLinear:
        layer = RowParallelLinear(plain.in_features, plain.out_features, region, dtype=torch.float64)
        layer.take(plain.weight, plain.bias)
        return layer

    def of_input(self, x: Tensor, region: Region) -> Tensor:
        return local_part(x, -1, region.group)

    def of_output(self, y: Tensor, region: Region) -> Tensor:
        return local_part(y, -2, region.group) if region.sequence else y

    def of_weight(self, weight: Tensor, region: Region) -> Tensor:
        return local_part(weight, 1, region.group)

    def of_bias(self, bias: Tensor, region: Region) -> Tensor:
        return bias


def _linear(variant: Variant, parts: _ColumnOf | _RowOf, features_out: int) -> Outcome:
    region = Region(axis_of_all_ranks(variant.route, Listening()), variant.sequence, variant.overlap)
    torch.manual_seed(1)
    plain = nn.Linear(HIDDEN, features_out, dtype=torch.float64)
    whole = draw(BATCH, SEQUENCE, HIDDEN).requires_grad_()
    expected = plain(whole)
    gradient = draw(*expected.shape, seed=2)
    expected.backward(gradient)

    layer = parts.layer(plain, region)
    queue = attach(layer) if variant.split else None
    x = parts.of_input(whole.detach(), region).requires_grad_()
    output, forward = heard(region.group.recorder, lambda: layer(x))
    backward, weights = backward_in_parts(region.group, layer, output, parts.of_output(gradient, region), queue)
    _, sync = heard(region.group.recorder, lambda: sum_partial_gradients(partial_gradients(layer), region.group))
    errors = {
        "output": error(output, parts.of_output(expected, region)),
        "input": error(x.grad, parts.of_input(whole.grad, region)),
        "weight": error(layer.weight.grad, parts.of_weight(plain.weight.grad, region)),
        "bias": error(layer.bias.grad, parts.of_bias(plain.bias.grad, region)),
    }
    return Outcome(errors, forward, backward, weights, sync)


class _Gemms(TorchDispatchMode):
    """Puts every GEMM among the names that a recorder hears, and keeps the first word of the others."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name in ("aten::mm", "aten::addmm", "aten::bmm"):
            self.names.append("GEMM")
        return function(*args, **(kwargs or {}))

    def take(self) -> list[str]:
        taken = [name.removeprefix(PREFIX).split()[0] for name in self.names]
        self.names.clear()
        return taken


def order_of_column() -> tuple[list[str], list[str]]:
    return _order(_ColumnOf())


def order_of_row() -> tuple[list[str], list[str]]:
    return _order(_RowOf())


def _order(parts: _ColumnOf | _RowOf) -> tuple[list[str], list[str]]:
    """Calls, GEMMs and waits of an overlapped layer's forward and backward, in their order."""
    recorder = Listening()
    region = Region(axis_of_all_ranks(recorder=recorder), sequence=True, overlap=True)
    layer = parts.layer(nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64), region)
    x = parts.of_input(draw(BATCH, SEQUENCE, HIDDEN), region).requires_grad_()
    with _Gemms(recorder.names) as gemms:
        output = layer(x)
        forward = gemms.take()
        output.backward(torch.ones_like(output))
        return forward, gemms.take()


def embedding(variants: Sequence[Variant]) -> list[Outcome]:
    return [_embedding(variant) for variant in variants]


def _embedding(variant: Variant) -> Outcome:
    region = Region(axis_of_all_ranks(variant.route, Listening()), variant.sequence, variant.overlap)
    tokens = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) * 5 % VOCABULARY
    plain = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64, _weight=draw(VOCABULARY, HIDDEN))
    expected = plain(tokens)
    gradient = draw(*expected.shape, seed=1)
    expected.backward(gradient)

    layer = VocabParallelEmbedding(VOCABULARY, HIDDEN, region, torch.float64)
    layer.take(plain.weight)
    queue = attach(layer) if variant.split else None
    output, forward = heard(region.group.recorder, lambda: layer(tokens))
    parts = _RowOf()
    backward, weights = backward_in_parts(region.group, layer, output, parts.of_output(gradient, region), queue)
    errors = {
        "output": error(output, parts.of_output(expected, region)),
        "weight": error(layer.weight.grad, local_part(plain.weight.grad, 0, region.group)),
    }
    return Outcome(errors, forward, backward, weights, sync=[])


def cross_entropy() -> tuple[dict[str, float], list[Mark]]:
    """Logits far apart, so that a sum of exponentials without the largest subtracted would overflow."""
    group = axis_of_all_ranks(recorder=Listening())
    whole = (draw(BATCH, SEQUENCE, VOCABULARY) * 500).requires_grad_()
    targets = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % VOCABULARY
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    gradient = draw(BATCH, SEQUENCE, seed=1)
    expected.backward(gradient)
    logits = local_part(whole.detach(), -1, group).requires_grad_()
    loss, marks = heard(group.recorder, lambda: vocab_parallel_cross_entropy(logits, targets, group))
    _, nothing = heard(group.recorder, lambda: loss.backward(gradient))
    assert nothing == []
    return {"loss": error(loss, expected), "input": error(logits.grad, local_part(whole.grad, -1, group))}, marks


def refusals() -> dict[str, str]:
    """Errors of each impossible division."""
    region = Region(axis_of_all_ranks(), sequence=True)
    x = torch.ones(BATCH, 7, HIDDEN, dtype=torch.float64)
    attempts: dict[str, Callable[[], object]] = {
        "column": lambda: ColumnParallelLinear(4, 7, region),
        "row": lambda: RowParallelLinear(7, 4, region),
        "embedding": lambda: VocabParallelEmbedding(7, 4, region),
        "sequence of row": lambda: RowParallelLinear(2 * HIDDEN, 4, region, dtype=torch.float64)(x),
        "sequence of embedding": lambda: VocabParallelEmbedding(8, 4, region)(torch.zeros(1, 7, dtype=torch.int64)),
    }
    refusals_of_rank = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as err:
            refusals_of_rank[name] = f"{type(err).__name__}: {err}"
    return refusals_of_rank
