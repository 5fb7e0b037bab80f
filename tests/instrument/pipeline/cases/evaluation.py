"""Function that the ranks of the pool run: training with evaluations in between, and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from instrument.data.text import TextData
from instrument.mesh import Mesh
from instrument.models.feed import make_feed
from instrument.optim.main_parameters import make_adamw
from instrument.recorder import Recorder
from tests.instrument.models.cases.mixes import (
    LEARNING_RATE,
    MICROBATCH_SIZE,
    SEQUENCE,
    STEPS,
    Mix,
    device_of,
    mesh_of,
    parallel_of,
    runtime_of,
)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Results of one rank: losses of evaluations, each of the next step's batch, and of these steps, where it has any; what its
    values sum to after training with evaluations, and without; whether all modules train again, and routes were counted.
    """

    evaluated: tuple[float, ...]
    trained: tuple[float, ...]
    sums: tuple[float, float]
    trains: bool
    counted: bool


def evaluate_mixes(mixes: Sequence[Mix]) -> list[Evaluated]:
    """Train every mix (all of one mesh shape) twice."""
    mesh = mesh_of(mixes[0])
    return [_evaluate(mix, mesh) for mix in mixes]


def _evaluate(mix: Mix, mesh: Mesh) -> Evaluated:
    evaluated, trained, total, trains, counted = _train(mix, mesh, evaluates=True)
    *_, without, _, _ = _train(mix, mesh, evaluates=False)
    return Evaluated(tuple(evaluated), tuple(trained), (total, without), trains, counted)


def _train(mix: Mix, mesh: Mesh, evaluates: bool) -> tuple[list[float], list[float], float, bool, bool]:
    recorder = Recorder()
    runtime = runtime_of(mix, mesh, recorder)
    data = TextData(mix.microbatches, MICROBATCH_SIZE, SEQUENCE)
    feed = make_feed(data, mesh, mix.plan, parallel_of(runtime), device_of(mix), (MICROBATCH_SIZE, SEQUENCE))
    optimizer = make_adamw(runtime.program.parameters(), runtime.gradients.main, LEARNING_RATE)
    evaluated, trained, counted = [], [], False
    for step in range(STEPS):
        batch = feed.batch(step)
        if evaluates:
            with recorder.counting_routes() as counts:
                loss = runtime.evaluate(batch, step)
            counted |= counts.facts() is not None
            evaluated += [float(loss)] if loss is not None else []
        result = runtime.run(batch, step)
        runtime.optimize(optimizer, step)
        trained += [float(result.loss)] if result.loss is not None else []
    modules = nn.ModuleList(runtime.program.stages.values())
    values = [*modules.parameters(), *modules.buffers()]
    total = sum(float(value.detach().double().abs().sum()) for value in values)
    return evaluated, trained, total, all(module.training for module in modules.modules()), counted
