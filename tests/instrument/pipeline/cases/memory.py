"""Functions that the ranks of the pool run, in worker processes, to compare memory with the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from instrument.backward_split.split import attach
from instrument.models.gpt import GptStage, cross_entropy
from instrument.pipeline.memory import MemoryUse, StorageWatch, measure
from pptrace.schedule.actions import Cell, Kind, iter_halves
from pptrace.schedule.outstanding import recomputed_cells
from tests.instrument.pipeline.cases.training import MICROBATCH_SIZE, Case, mesh_of, runtime_of


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that one microbatch of a stage keeps after its forward, and after its I."""

    after_forward: int
    after_input_grad: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A rank's step beside what the plan makes of the bytes that its stages keep one by one."""

    use: MemoryUse
    predicted_bytes: int
    message_bytes: int


def measure_cases(cases: Sequence[Case]) -> list[Measured]:
    """Every case on a mesh of its own."""
    return [_measure(case) for case in cases]


def _measure(case: Case) -> Measured:
    mesh = mesh_of(case)
    use = measure(runtime_of(case, mesh), case.batch(mesh.dp_rank), step=0)
    config = case.config
    message = torch.zeros(MICROBATCH_SIZE, config.sequence, config.hidden, dtype=config.dtype).nbytes
    return Measured(use, predict(case, mesh.pp_rank), message)


def predict(case: Case, rank: int) -> int:
    """The most bytes along the plan if stages kept what they keep one by one, and messages took no time."""
    plan = case.plan
    again = frozenset[Cell]() if case.keep is None else recomputed_cells(plan, rank, case.keep)
    kept = {
        (stage, is_recomputed): keeps(case, stage, is_recomputed)
        for stage in plan.stages_of(rank)
        for is_recomputed in ((False, True) if again else (False,))
    }
    held = peak = 0
    for half in iter_halves(plan.ranks[rank]):
        if not half.kind.is_compute:
            continue
        of = kept[half.stage, Cell(half.stage, half.microbatch) in again]
        held += {
            Kind.F: of.after_forward,
            Kind.B: -of.after_forward,
            Kind.I: of.after_input_grad - of.after_forward,
            Kind.W: -of.after_input_grad,
        }[half.kind]
        peak = max(peak, held)
    assert held == 0
    return peak


def keeps(case: Case, plan_stage: int, is_recomputed: bool) -> Kept:
    """Run one microbatch of a stage alone."""
    plan, config = case.plan, case.config
    stage = GptStage(config, case.cut[plan.model_stage(plan_stage)])
    queue = attach(stage) if plan.splits_backward else None
    batch = case.batch(0)
    watch = StorageWatch(stage.parameters())
    watch.exempt((batch.tokens, batch.targets))
    with watch:
        x = batch.tokens[0]
        if stage.embedding is None:
            x = torch.rand(*x.shape, config.hidden, dtype=config.dtype).requires_grad_()
        output = stage(x, recompute=is_recomputed)
        if stage.head is not None:
            output = cross_entropy(output, batch.targets[0])
        edge = torch.autograd.graph.get_gradient_edge(output)
        shape, dtype = output.shape, output.dtype
        del output
        after_forward = watch.live_bytes()
        gradient = torch.ones(shape, dtype=dtype)  # which the last layer's weight work keeps
        if queue is None:
            torch.autograd.backward(edge, gradient)
            after_input_grad = 0
            del edge, x, gradient
        else:
            with queue.collecting() as work:
                torch.autograd.backward(edge, gradient)
            del edge, x, gradient
            after_input_grad = watch.live_bytes()
            while work:
                work.pop().run()
        assert watch.live_bytes() == 0
    return Kept(after_forward, after_input_grad)
