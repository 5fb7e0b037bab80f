"""Training with the gradient norm clipped: what the ranks of the pool run, and the same in one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from instrument.mesh import Mesh
from instrument.models.gpt import GptStage, cross_entropy
from instrument.optim.adamw import AdamW
from instrument.optim.clipping import ClippedOptimizer, OptimizerSync, make_clipped_optimizer
from instrument.optim.control_channel import ControlChannel
from instrument.pipeline.runtime import PipelineRuntime
from instrument.recorder import Recorder
from tests.instrument.pipeline.cases.training import Case, mesh_of, runtime_of

LR = 1e-2


@dataclass(frozen=True, slots=True)
class Training:
    """A case trained for some steps. ``overflows``: step → the parameter whose gradient gets an infinity."""

    case: Case
    max_norm: float
    sync: OptimizerSync = OptimizerSync.POST_VALIDATION
    overflows: Mapping[int, str] = field(default_factory=dict)
    steps: int = 4


@dataclass(frozen=True, slots=True)
class Trained:
    """Model of one rank after training; ``parameters`` by name, of all its stages."""

    parameters: Mapping[str, Tensor]
    losses: tuple[float, ...]
    num_rollbacks: int
    forwards: tuple[int, ...]  # by step


def train_all(trainings: Sequence[Training]) -> list[Trained]:
    """Train every case, all of one mesh shape."""
    mesh = mesh_of(trainings[0].case)
    return [_train(training, mesh) for training in trainings]


def clipped_optimizer_of(
    runtime: PipelineRuntime, mesh: Mesh, sync: OptimizerSync, max_norm: float
) -> ClippedOptimizer:
    recorder = runtime.program.recorder
    optimizer = AdamW(runtime.program.parameters(), LR)
    return make_clipped_optimizer(
        sync, optimizer, runtime.gradients.counted, max_norm, ControlChannel(mesh, recorder), recorder
    )


def _train(training: Training, mesh: Mesh) -> Trained:
    case = training.case
    runtime = runtime_of(case, mesh, Recorder())
    optimizer = clipped_optimizer_of(runtime, mesh, training.sync, training.max_norm)
    forwards = [0] * training.steps
    losses: list[float] = []
    for step in range(training.steps):
        with _counting(runtime, forwards, step):
            result = runtime.run(case.batch(mesh.dp_rank, step), step, optimizer)
        if result.loss is not None:
            losses.append(float(result.loss))
        _overflow(runtime.program.stages.values(), training.overflows.get(step))
        optimizer.optimize(step)
    optimizer.finish(training.steps - 1)
    parameters = {
        name: weight.detach() for stage in runtime.program.stages.values() for name, weight in stage.named_parameters()
    }
    return Trained(parameters, tuple(losses), optimizer.num_rollbacks, tuple(forwards))


class _counting:  # noqa: N801
    """Counts the forwards of a step's stages."""

    def __init__(self, runtime: PipelineRuntime, forwards: list[int], step: int) -> None:
        def count(*_: object) -> None:
            forwards[step] += 1

        self._hooks = [stage.register_forward_pre_hook(count) for stage in runtime.program.stages.values()]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _overflow(stages: Iterable[nn.Module], name: str | None) -> None:
    for stage in stages:
        for result, weight in stage.named_parameters(remove_duplicate=False):
            if result == name and weight.grad is not None:
                weight.grad.view(-1)[0] = math.inf


@dataclass(frozen=True, slots=True)
class Reference:
    """One process: parameters at the end, and by step the loss and the squared norm of each parameter's gradient."""

    parameters: Mapping[str, Tensor]
    losses: tuple[float, ...]
    squares: tuple[Mapping[str, float], ...]


def reference(training: Training) -> Reference:
    """``clip_grad_norm_`` and torch's AdamW on the whole model, leaving out steps with non-finite gradients."""
    case = training.case
    model = GptStage(case.config, range(case.config.layers))
    if case.tied:
        model.head.projection.weight = model.embedding.tokens.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, squares = [], []
    for step in range(training.steps):
        batches = [case.batch(dp_rank, step) for dp_rank in range(case.dp)]
        tokens = torch.cat([batch.tokens.flatten(0, 1) for batch in batches])
        targets = torch.cat([batch.targets.flatten(0, 1) for batch in batches])
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        losses.append(float(loss.detach()))
        _overflow([model], training.overflows.get(step))
        squares.append(
            {name: float(w.grad.square().sum()) for name, w in model.named_parameters() if w.grad is not None}
        )
        if math.isfinite(float(clip_grad_norm_(model.parameters(), training.max_norm))):
            optimizer.step()
        optimizer.zero_grad()
    parameters = {name: weight.detach() for name, weight in model.named_parameters(remove_duplicate=False)}
    return Reference(parameters, tuple(losses), tuple(squares))


@cache
def names_of(case: Case) -> list[set[str]]:
    """By pipeline rank, the parameters that are on no rank before it: those it counts."""
    plan, seen, names = case.plan, set[str](), []
    for rank in range(plan.pp):
        parameters = {
            name
            for stage in plan.stages_of(rank)
            for name, _ in GptStage(case.config, case.cut[plan.model_stage(stage)]).named_parameters()
        }
        if case.tied and "head.projection.weight" in parameters:
            parameters = parameters - {"head.projection.weight"} | {"embedding.tokens.weight"}
        names.append(parameters - seen)
        seen |= parameters
    return names


def partial_squares(case: Case, squares: Mapping[str, float]) -> list[float]:
    """Squared norm of the gradients on pipeline ranks 0 … r, for every r."""
    sums, total = [], 0.0
    for names in names_of(case):
        total += sum(squares[name] for name in names)
        sums.append(total)
    return sums


def wait_for_the_next_forward(sync: OptimizerSync, patience_s: float) -> bool | None:
    """The last rank does not begin its update of step 0 before rank 0 has run a forward of step 1, or patience is over.

    Returns:
        On the last rank, whether it has heard of that forward; None elsewhere.
    """
    case = Case("1f1b", dist.get_world_size(), 4)
    mesh = mesh_of(case)
    runtime = runtime_of(case, mesh)
    optimizer = clipped_optimizer_of(runtime, mesh, sync, max_norm=1e3)
    store = dist.distributed_c10d._get_default_store()
    runtime.run(case.batch(0, 0), 0, optimizer)
    heard = None
    if mesh.pp_rank == mesh.shape.pp - 1:
        heard = _hears(store, patience_s)
    optimizer.optimize(0)
    if mesh.pp_rank == 0:
        runtime.program.stages[0].register_forward_hook(lambda *_: store.set("forward of step 1", "has run"))
    runtime.run(case.batch(0, 1), 1, optimizer)
    optimizer.optimize(1)
    optimizer.finish(1)
    return heard


def _hears(store: dist.Store, patience_s: float) -> bool:
    try:
        store.wait(["forward of step 1"], timedelta(seconds=patience_s))
    except dist.DistStoreError:
        return False
    return True
