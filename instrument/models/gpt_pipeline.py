"""A GPT on one pipeline rank: its stages, their communicator and gradient sums, and the runtime that drives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from instrument.mesh import Mesh
from instrument.models.gpt import GptConfig, GptStage, cross_entropy, make_stages, tied_weight
from instrument.models.parallel import Parallel, ParallelOptions, make_parallel
from instrument.pipeline.gradients import GradientSync
from instrument.pipeline.order import Posting
from instrument.pipeline.outstanding import recomputed_cells
from instrument.pipeline.p2p import Cell, Communicator, TensorSpec
from instrument.pipeline.runtime import PipelineRuntime
from instrument.pipeline.transport import Mode, Route, make_transport
from instrument.recorder import Recorder
from pptrace.errors import UsageError
from pptrace.marks import Axis
from pptrace.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class Wiring:
    """How stages talk to each other.

    With ``negotiated``, every message is preceded by its shape. ``ahead`` is the prefetch depth
    (:class:`instrument.pipeline.order.Posting`). ``parallel`` says how layers work together along tp and cp.
    """

    device: torch.device
    mode: Mode = Mode.BATCHED
    route: Route = Route.DIRECT
    negotiated: bool = False
    ahead: int = 0
    parallel: ParallelOptions = ParallelOptions()  # noqa: RUF009 — frozen


def make_gpt_runtime(
    mesh: Mesh,
    plan: Plan,
    config: GptConfig,
    cut: Sequence[Sequence[int]],
    microbatch_size: int,
    wiring: Wiring,
    recorder: Recorder,
    wrap: Callable[[GptStage], nn.Module] = lambda stage: stage,
    keep: int | None = None,
    parallel: Parallel | None = None,
) -> PipelineRuntime:
    """This rank's runtime.

    Args:
        mesh: where this rank stands.
        plan: lowered.
        config: the whole model; messages have (microbatch_size, config.sequence, config.hidden), the sequence shared out
            over cp and with SP over tp, unless negotiated.
        cut: layers of every stage of the model (:func:`instrument.pipeline.partition.partition`).
        microbatch_size: sequences in a microbatch.
        wiring: device and transport.
        recorder: writes the ranges.
        wrap: put around each stage's module, to add to what it does.
        keep: how many outstanding microbatches recompute as ``config`` says while all others recompute fully
            (:func:`instrument.pipeline.outstanding.recomputed_cells`); None: all as ``config`` says.
        parallel: this rank's share of the layers; left out, it is made as ``wiring`` says, by every rank of the world.

    Raises:
        UsageError: a tied embedding whose two ends are neither on one rank nor on the first and the last, or a plan
            with copies of its stages on a mesh without mirror groups.
    """
    if plan.num_chains > 1 and mesh.mirror is None:
        raise UsageError(f"{plan.name}: every stage is on two ranks; make the mesh with its mirror groups")
    ends = {plan.placement[0], plan.placement[-1]}
    if config.tied and len(ends) == 2 and ends != {0, plan.pp - 1}:
        raise UsageError(
            f"{plan.name}: the embedding is on pipeline rank {plan.placement[0]} and the head on {plan.placement[-1]}; "
            f"a tied weight needs both on one rank, or on ranks 0 and {plan.pp - 1}"
        )
    held = {plan.model_stage(stage): stage for stage in plan.stages_of(mesh.pp_rank)}
    # In the model's order, which the ranks of a mirrored pair share: their gradients are summed one by one.
    parallel = parallel or make_parallel(mesh, wiring.parallel, recorder, wiring.route, config.seed)
    made = make_stages(config, cut, sorted(held), parallel)
    stages = {held[model_stage]: module.to(wiring.device) for model_stage, module in made.items()}
    shape = (
        None
        if wiring.negotiated
        else (
            microbatch_size,
            parallel.activation_length(config.sequence),
            config.hidden,
        )
    )
    spec = TensorSpec(shape, config.dtype, wiring.device)
    tagged = dist.get_backend(mesh.groups[Axis.PP]) == "gloo"
    posting = Posting(wiring.ahead, wiring.mode is Mode.BLOCKING, tagged)
    transport = make_transport(mesh, wiring.mode, wiring.route)
    communicator = Communicator(mesh, plan, spec, transport, recorder, posting)
    tied = tied_weight(made) if config.tied else None
    gradients = GradientSync(mesh, list(made.values()), tied, parallel.region.group, wiring.route)
    modules = {stage: wrap(module) for stage, module in stages.items()}
    recomputed = frozenset[Cell]() if keep is None else recomputed_cells(plan, mesh.pp_rank, keep)
    return PipelineRuntime(
        plan,
        mesh.pp_rank,
        modules,
        lambda logits, targets: cross_entropy(logits, targets, parallel.region.group),
        communicator,
        gradients,
        recorder,
        posting,
        recomputed=recomputed,
        numbered=config.dropout > 0,
    )
