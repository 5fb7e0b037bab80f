"""A GPT on one pipeline rank: stages, communicator, gradient sums, and the runtime that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instrument.collectives import AxisGroup
from instrument.graphed import GraphedStage
from instrument.mesh import Mesh, MeshShape
from instrument.models.gpt import HEAD, GptStage, cross_entropy, make_stages, tied_weight
from instrument.models.gpt_config import GptConfig
from instrument.models.parallel import Parallel, ParallelOptions, make_parallel
from instrument.optim.buckets import BUCKET_BYTES
from instrument.optim.gradient_sync import Averaging, GradientSync, Reduce
from instrument.optim.main_parameters import Zero, accumulate_in
from instrument.pipeline.boundary import Boundary
from instrument.pipeline.megatron_calls import Calls
from instrument.pipeline.order import Posting
from instrument.pipeline.p2p import Communicator, Shape, TensorSpec
from instrument.pipeline.runtime import PipelineRuntime
from instrument.pipeline.step import RankProgram
from instrument.pipeline.transport import Mode, make_transport
from instrument.recorder import Recorder
from instrument.route import Route
from pptrace.errors import UsageError
from pptrace.marks import Axis
from pptrace.schedule.actions import Cell
from pptrace.schedule.outstanding import in_flight_by_stage, recomputed_cells
from pptrace.schedule.plan import Plan
from pptrace.sizes.gpt_facts import passed_lengths


@dataclass(frozen=True, slots=True)
class Wiring:
    """Transport and sharding of a run.

    With ``negotiated``, every message is preceded by its shape. ``prefetch_depth``, ``calls`` and ``synchronised`` are those of
    :class:`instrument.pipeline.order.Posting`. ``parallel`` has the options of tp and cp. Gradients are averaged
    ``bucket_bytes`` at a time, and ``zero`` is what is sharded over replicas; ``reduce`` and ``overlaps_gathers`` are those of
    :class:`instrument.optim.gradient_sync.Averaging`. With ``scatters`` each rank of tp sends a part of an activation, of
    ``sent_dtype``, None: the model's (:mod:`instrument.pipeline.boundary`).
    """

    device: torch.device
    mode: Mode = Mode.BATCHED
    route: Route = Route.DIRECT
    negotiated: bool = False
    prefetch_depth: int = 0
    parallel: ParallelOptions = ParallelOptions()  # noqa: RUF009 — frozen
    bucket_bytes: int = BUCKET_BYTES
    zero: Zero = Zero.NONE
    calls: Calls = Calls.PLAN
    synchronised: bool = False
    reduce: Reduce = Reduce.OVERLAP
    overlaps_gathers: bool = False
    scatters: bool = False
    sent_dtype: torch.dtype | None = None

    def posting(self, plan: Plan, *, tagged: bool) -> Posting:
        """Posting of transfers, and waits for them, on a backend with tags or without.

        Raises:
            UsageError: settings that exclude each other.
        """
        blocking, even_odd = self.mode is Mode.BLOCKING, self.mode is Mode.EVEN_ODD
        if self.negotiated and self.calls is not Calls.PLAN and plan.num_chunks > 1:
            raise UsageError(
                f"{self.calls} calls of chunks receive before they send, and ranks that negotiate each shape first would wait in "
                "a ring; use --p2p-calls plan"
            )
        return Posting(self.prefetch_depth, blocking, tagged, even_odd, self.calls, self.synchronised)


def _as_it_is(stage: GptStage) -> nn.Module:
    return stage


@dataclass(frozen=True, slots=True)
class GptPipeline:
    """A GPT, and how a pipeline runs it.

    Args:
        plan: lowered.
        config: the whole model; messages have (microbatch_size, config.sequence, config.hidden), with an encoder those of
            :func:`pptrace.sizes.gpt_facts.passed_lengths`, the sequence sharded over cp and with SP over tp, unless negotiated.
        layer_partition: layers of every stage of the model (:func:`instrument.pipeline.partition.partition`).
        wrap: wraps each stage's module, to extend it.
        num_unrecomputed: outstanding microbatches that recompute by ``config.recompute`` while all others do fully
            (:func:`pptrace.schedule.outstanding.recomputed_cells`); None: all by ``config.recompute``.
        captures: stages are captured as CUDA graphs (:mod:`instrument.graphed`), which not every setting allows
            (:func:`instrument.examples.gpt_checks.check_graphs`).
    """

    plan: Plan
    config: GptConfig
    layer_partition: Sequence[Sequence[int]]
    microbatch_size: int
    wrap: Callable[[GptStage], nn.Module] = _as_it_is
    num_unrecomputed: int | None = None
    captures: bool = False

    def shapes(self, parallel: Parallel) -> Callable[[int], list[Shape]]:
        """The shapes of the tensors that a stage of the plan passes on, of this rank's share."""
        config, size, ends = self.config, self.microbatch_size, list(accumulate(map(len, self.layer_partition)))

        def of_stage(stage: int) -> list[Shape]:
            of_model = (config.layers, config.encoder_layers, config.sequence, config.source_length)
            lengths = passed_lengths(ends[self.plan.model_stage(stage)], *of_model)
            return [(size, parallel.activation_length(length), config.hidden) for length in lengths]

        return of_stage

    def sample_input(self, stage: int, parallel: Parallel, device: torch.device) -> Tensor:
        """An input of a stage of the plan as each microbatch has one: tokens of the first, else activations."""
        preceding = self.plan.previous_stage(stage)
        if preceding is None:
            return torch.zeros(self.microbatch_size, self.config.sequence, dtype=torch.int64, device=device)
        return torch.zeros(self.shapes(parallel)(preceding)[0], dtype=self.config.dtype, device=device).requires_grad_()

    def begins_decoder(self, stage: int) -> bool:
        """Return whether a stage of the plan has the first layer of a decoder that has an encoder."""
        first = self.config.encoder_layers
        return first > 0 and first in self.layer_partition[self.plan.model_stage(stage)]


def make_gpt_runtime(
    mesh: Mesh, gpt: GptPipeline, wiring: Wiring, recorder: Recorder, parallel: Parallel | None = None
) -> PipelineRuntime:
    """Make this rank's runtime.

    Args:
        parallel: this rank's share of the layers; None: made from ``wiring.parallel``, by every rank of the world.

    Raises:
        UsageError: a tied embedding whose two ends are neither on one rank nor on the first and the last, or a plan
            with copies of its stages on a mesh without mirror groups, or experts on one without theirs, or what
            :func:`check_zero` refuses.
    """
    plan, config = gpt.plan, gpt.config
    _check(mesh, plan, config, wiring)
    parallel = parallel or make_parallel(mesh, wiring.parallel, recorder, wiring.route, config.seed)
    parallel = parallel.with_microbatches(plan.num_microbatches, mesh.dp_rank)
    stages = _make_stages(mesh, gpt, parallel, wiring.device)
    tagged = dist.get_backend(mesh.groups[Axis.PP]) == "gloo"
    posting = wiring.posting(plan, tagged=tagged)
    parts = parallel.region.group if wiring.scatters else None
    boundary = Boundary(gpt.shapes(parallel), config.dtype, wiring.sent_dtype or config.dtype, parts)
    spec = TensorSpec(boundary.message_shapes, boundary.sent_dtype, wiring.device, wiring.negotiated)
    transport = make_transport(mesh, wiring.mode, wiring.route, plan, wiring.device)
    communicator = Communicator(mesh, plan, spec, transport, recorder, posting)
    gradients = _gradient_sync(mesh, stages, config.tied, parallel, wiring, recorder)
    modules = {stage: gpt.wrap(module) for stage, module in stages.items()}
    if gpt.captures:
        num_slots = in_flight_by_stage(plan, mesh.pp_rank)
        modules = {
            stage: GraphedStage(module, gpt.sample_input(stage, parallel, wiring.device), num_slots[stage])
            for stage, module in modules.items()
        }
    recomputed = frozenset[Cell]()
    if gpt.num_unrecomputed is not None:
        recomputed = recomputed_cells(plan, mesh.pp_rank, gpt.num_unrecomputed)
    loss = partial(_marked_loss, group=parallel.region.group, vocabulary=config.vocabulary)
    pass_key = config.dropout > 0 or (config.experts is not None and config.experts.is_random)
    in_pieces = plan.has_pairs and config.experts is not None and config.experts.overlap
    reads_tokens = frozenset(filter(gpt.begins_decoder, modules))
    how = (recomputed, pass_key, in_pieces, reads_tokens)
    program = RankProgram(plan, mesh.pp_rank, modules, loss, communicator, recorder, *how)
    if parts is not None or boundary.sent_dtype != config.dtype:
        program = replace(program, boundary=boundary)
    return PipelineRuntime(program, gradients, posting)


def _marked_loss(logits: Tensor, targets: Tensor, group: AxisGroup, vocabulary: int) -> Tensor:
    with group.recorder.part(HEAD):
        return cross_entropy(logits, targets, group, vocabulary)


def _make_stages(mesh: Mesh, gpt: GptPipeline, parallel: Parallel, device: torch.device) -> dict[int, GptStage]:
    """The modules of this rank's stages, by the plan's stage, on the device.

    They are in the model's order, which the ranks of a mirrored pair share: their gradients are summed one by one.
    """
    plan_stage = {gpt.plan.model_stage(stage): stage for stage in gpt.plan.stages_of(mesh.pp_rank)}
    made = make_stages(gpt.config, gpt.layer_partition, sorted(plan_stage), parallel)
    return {plan_stage[model_stage]: module.to(device) for model_stage, module in made.items()}


def _check(mesh: Mesh, plan: Plan, config: GptConfig, wiring: Wiring) -> None:
    """Raise the UsageErrors of :func:`make_gpt_runtime`."""
    check_zero(wiring.zero, mesh.shape, plan, config)
    if config.experts is not None and Axis.EP not in mesh.groups:
        raise UsageError(
            f"the model has {config.experts.num} experts in a layer; make the mesh with its groups of experts"
        )
    if plan.num_chains > 1 and mesh.mirror is None:
        raise UsageError(f"{plan.name}: every stage is on two ranks; make the mesh with its mirror groups")
    ends = {plan.placement[0], plan.placement[-1]}
    if config.tied and len(ends) == 2 and ends != {0, plan.pp - 1}:
        raise UsageError(
            f"{plan.name}: the embedding is on pipeline rank {plan.placement[0]} and the head on {plan.placement[-1]}; "
            f"a tied weight needs both on one rank, or on ranks 0 and {plan.pp - 1}"
        )


def _gradient_sync(
    mesh: Mesh,
    stages: dict[int, GptStage],
    is_tied: bool,
    parallel: Parallel,
    wiring: Wiring,
    recorder: Recorder,
) -> GradientSync:
    """Make the gradient sums and averages of a rank's stages."""
    fully_sharded = None
    if wiring.zero >= Zero.GRADIENTS:
        from instrument.optim.fully_sharded import FullySharded  # torch takes a second to import what it needs

        replicas = AxisGroup(mesh.groups[mesh.replicas], mesh.replicas, recorder, wiring.route)
        fully_sharded = FullySharded(stages, replicas, keeps_parameters=wiring.zero is Zero.GRADIENTS)
    else:
        for module in stages.values():
            accumulate_in(module.parameters(), torch.float32)
    tied = tied_weight(stages) if is_tied else None  # after the sharding, which replaces the parameters
    when = (wiring.reduce, wiring.overlaps_gathers)
    averaging = Averaging(wiring.route, wiring.bucket_bytes, wiring.zero, fully_sharded, *when)
    return GradientSync(mesh, stages, tied, parallel.region.group, averaging)


def check_zero(zero: Zero, shape: MeshShape, plan: Plan, config: GptConfig) -> None:
    """Refuse what cannot be sharded over replicas.

    Raises:
        UsageError: there is only one replica; or, with gradients or parameters sharded, a plan that splits the backward
            or has stages twice, KV heads that are copied, experts, or a tied embedding in two stages of one rank.
    """
    if zero is Zero.NONE:
        return
    if shape.dp * shape.cp == 1:
        raise UsageError(f"ZeRO-{zero:d} shards over dp × cp, which has one rank; give it more, or use ZeRO-0")
    if zero is Zero.OPTIMIZER:
        return
    if plan.splits_backward or plan.num_chains > 1:
        raise UsageError(
            f"ZeRO-{zero:d} frees weights after a backward, and {plan.name} needs them again for its W; use ZeRO-1, "
            "or a schedule with whole backwards"
        )
    if config.experts is not None:
        raise UsageError(
            f"ZeRO-{zero:d} shards all parameters over the same replicas, and experts have others; use ZeRO-1"
        )
    if config.num_kv_heads < shape.tp:
        raise UsageError(
            f"ZeRO-{zero:d} cuts rows of {config.num_kv_heads} KV heads that tp={shape.tp} copies; use ZeRO-1, or more KV heads"
        )
    if config.tied and plan.chain_length > 1 and plan.placement[0] == plan.placement[-1]:
        raise UsageError(f"ZeRO-{zero:d} does not take a tied embedding in two stages of one rank; use ZeRO-1")
