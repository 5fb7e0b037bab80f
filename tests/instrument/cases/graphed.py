"""Functions that the ranks of the pool run: training with graphs and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from instrument.mesh import Mesh
from tests.instrument.pipeline.cases.training import Case, mesh_of, runtime_of
from tests.support.graph_imitation import Graph

STEPS = 3


@dataclass(frozen=True, slots=True)
class Twice:
    """One rank's results with graphs and without: all losses, parameters and gradients that differ in any bit, by name; and how
    many there are. ``num_replays`` are those of each step's graphs.
    """

    different: tuple[str, ...]
    num_compared: int
    num_replays: float


def train_twice(cases: Sequence[Case]) -> list[Twice]:
    """Train each case (all of one mesh shape) with graphs and without."""
    mesh = mesh_of(cases[0])
    return [_train_twice(case, mesh) for case in cases]


def _train_twice(case: Case, mesh: Mesh) -> Twice:
    plain = _train(case, mesh)
    before = Graph.num_replays
    graphed = _train(replace(case, graphs=True), mesh)
    assert plain.keys() == graphed.keys()
    different = tuple(name for name in plain if not torch.equal(plain[name], graphed[name]))
    return Twice(different, len(plain), (Graph.num_replays - before) / STEPS)


def _train(case: Case, mesh: Mesh) -> dict[str, Tensor]:
    """Losses of all steps and of an evaluation, the last step's gradients, and the parameters before it."""
    runtime = runtime_of(case, mesh)
    optimizer = torch.optim.AdamW(runtime.program.parameters())
    results: dict[str, Tensor] = {}
    for step in range(STEPS):
        if step:
            runtime.optimize(optimizer, step - 1)
        result = runtime.run(case.batch(mesh.dp_rank, step), step)
        evaluated = runtime.evaluate(case.batch(mesh.dp_rank, STEPS), step)
        losses = {f"loss {step}": result.loss, f"evaluation {step}": evaluated}
        results |= {name: loss for name, loss in losses.items() if loss is not None}
    for index, parameter in enumerate(runtime.program.parameters()):
        results |= {f"parameter {index}": parameter.detach(), f"gradient {index}": parameter.grad}
    return results
