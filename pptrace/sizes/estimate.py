"""Memory, FLOPs and communication of each pipeline rank in a step, from the sizes of a model, a mesh and a plan alone.

All ranks of a stage are equal: experts are taken to get as many tokens each. Static memory is that of ZeRO (arXiv 1910.02054,
section 3.1); activations are those in flight when they are most. Temporaries inside of ops, messages on their way, parameters
that ZeRO-3 has gathered and what an allocator rounds up are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pptrace.axes import Axis
from pptrace.marks import Collective
from pptrace.schedule.actions import Kind, iter_halves
from pptrace.schedule.outstanding import outstanding
from pptrace.schedule.plan import Plan
from pptrace.sizes.expert_step import LayerRoutes, Routes
from pptrace.sizes.flops import rank_flops
from pptrace.sizes.gpt_facts import GptFacts, Parameter, stage_parameters
from pptrace.sizes.memory import MemoryPrediction
from pptrace.sizes.mesh import MeshSizes
from pptrace.sizes.step import StepVolume
from pptrace.sizes.transformer import RECV, SEND, Calls, Volume, bus_factor

OF_TOKENS = frozenset({Axis.PP, Axis.TP, Axis.CP, Axis.EP, Axis.ETP})
"""Axes along which activations go: b·s·h numbers."""
_USUAL_STEP = 1
"""Any step but a run's first and last one."""


class ParameterBytes(NamedTuple):
    """Bytes of one parameter: itself, its gradient, and what the optimizer keeps of it."""

    weights: int
    gradients: int
    optimizer: int

    @classmethod
    def of_adam(cls, item_bytes: int) -> ParameterBytes:
        """AdamW's: gradients of 32 bits at least, two moments, a copy of parameters that have fewer: 18 bytes with 16 bits."""
        wide = max(4, item_bytes)
        return cls(item_bytes, wide, wide * (2 if item_bytes == wide else 3))


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """One rank of a stage of the pipeline. ``in_flight`` counts microbatches, those of each chunk apart, whose activations are
    there at once at most. Bytes are those of the peak, FLOPs (None without a sequence) and ``volume`` those of one step.
    """

    rank: int
    num_layers: int
    num_parameters: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    in_flight: int
    activations_bytes: int
    model_flops: int | None
    hardware_flops: int | None
    volume: Volume

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes at the peak."""
        return self.state_bytes + self.activations_bytes


@dataclass(frozen=True)
class Estimate:
    """A model on a mesh with a plan. ``missing`` are those of hidden and sequence that are not given, where layers are known by
    their numbers alone: ``facts`` has any size then, and what follows from it is None. ``notes`` are lines on what is not
    counted.

    Raises:
        UsageError: the mesh has no such experts.
    """

    facts: GptFacts
    mesh: MeshSizes
    plan: Plan
    bytes_each: ParameterBytes
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def ranks(self) -> tuple[RankEstimate, ...]:
        """The estimate of each pipeline rank."""
        return tuple(map(self._rank, range(self.plan.pp)))

    @property
    def peak_bytes(self) -> int:
        """Bytes of the rank that needs most."""
        return self.fullest.total_bytes

    @property
    def fullest(self) -> RankEstimate:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total_bytes)

    @property
    def kinds_of_layers(self) -> Mapping[bool, int]:
        """The first layer of those with experts (True) and of those with an MLP, as far as there are any."""
        layers = range(sum(self.facts.layers_per_stage))
        return {bool(self.facts.experts_of(layer)): layer for layer in reversed(layers)}

    def layer_bytes(self, layer: int, recompute: str) -> int:
        """Bytes that a layer keeps of a microbatch, with those of its experts."""
        volume, plan, of_experts = self.volume, self.plan, None
        if volume.experts is not None and self.facts.experts_of(layer):
            stages = range(plan.num_stages)
            stage = next(stage for stage in stages if layer in self.facts.layers_of(plan.model_stage(stage)))
            of_experts = volume.experts.kept_bytes(self.first_rank(plan.placement[stage]), layer, recompute)
        return MemoryPrediction(volume, on_device=True).sizes.layer(recompute, of_experts)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that the layer that keeps most without recompute would keep more of a microbatch."""
        how = self.facts.recompute
        layers = self.kinds_of_layers.values() if how != "none" else ()
        return max((self.layer_bytes(layer, "none") - self.layer_bytes(layer, how) for layer in layers), default=0)

    @property
    def layer_tensors(self) -> Mapping[str, int]:
        """:meth:`tensors_of` the first layer."""
        return self.tensors_of(0)

    def tensors_of(self, layer: int) -> Mapping[str, int]:
        """Bytes that a layer keeps of a microbatch by tensor, the largest first, without those of experts; none where a
        sum alone is known: of layers by their numbers, and where scores are stored.
        """
        facts = self.facts
        if facts.form.numbers is not None or facts.form.scores_stored:
            return {}
        recompute = next(how for stage in range(len(facts.layers_per_stage)) for how in facts.recompute_of(stage))
        sizes = MemoryPrediction(self.volume, on_device=True).sizes
        tensors = sizes.layer_tensors(recompute, has_mlp=not facts.experts_of(layer))
        return dict(sorted(tensors.items(), key=lambda tensor: -tensor[1]))

    @property
    def tokens(self) -> int | None:
        """Tokens of a step, of all pipelines; None without a sequence."""
        if "sequence" in self.missing:
            return None
        return self.facts.sequence * self.facts.microbatch_size * self.plan.num_microbatches * self.mesh.dp

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the whole model, each once."""
        stages = range(len(self.facts.layers_per_stage))
        every = [parameter for stage in stages for parameter in stage_parameters(self.facts, stage, 1)]
        again = [parameter.numel for parameter in every if parameter.is_embedding][1:] if self.facts.tied else []
        return sum(parameter.numel for parameter in every) - sum(again)

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters that a token meets: all but those of experts that it does not go to."""
        facts, experts = self.facts, self.facts.experts
        if experts is None:
            return self.num_parameters
        stages = range(len(facts.layers_per_stage))
        of_experts = (each for stage in stages for each in stage_parameters(facts, stage, 1) if each.is_expert)
        return self.num_parameters - sum(
            each.numel // each.shape[0] * (each.shape[0] - experts.top_k) for each in of_experts
        )

    @cached_property
    def volume(self) -> StepVolume:
        """Communication, with as many tokens for each expert."""
        routes = None if self.facts.experts is None else self._routes()
        return StepVolume(self.facts, self.mesh, self.plan, routes)

    def first_rank(self, pp_rank: int) -> int:
        """The global rank that stands for all ranks of a stage."""
        return pp_rank * self.mesh.of_stage

    def group_size(self, axis: str, kind: str) -> int:
        """Ranks of a group along an axis."""
        mesh = self.mesh
        cp = self.facts.ulysses if kind == "all_to_all" else mesh.cp
        if self.facts.cp_comm_type == "all_gather" and kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
            cp //= self.facts.ulysses
        sizes = {Axis.PP: mesh.pp, Axis.TP: mesh.tp, Axis.CP: cp, Axis.DP: mesh.dp, Axis.DP_CP: mesh.dp * mesh.cp}
        sizes |= {Axis.EP: mesh.ep, Axis.ETP: mesh.etp, Axis.EDP: mesh.edp}
        return sizes.get(Axis(axis), 2)  # ends of a tied embedding, mirrored ranks

    def knows_bytes(self, axis: str) -> bool:
        """Return whether the sizes tell how much is sent along an axis."""
        return not self.missing or Axis(axis) not in OF_TOKENS

    def wire_bytes(self, axis: str, kind: str, calls: Calls) -> int:
        """Bytes that a rank sends of some calls, as rings send them; of exchanges those of one direction."""
        return round(calls.bytes * (bus_factor(kind, self.group_size(axis, kind)) or 0))

    def wire_by_axis(self, volume: Volume) -> Mapping[str, int]:
        """The same by axis; what is received is received while as much is sent."""
        by_axis: Counter[str] = Counter()
        for (axis, kind), calls in volume.items():
            by_axis[axis] += self.wire_bytes(axis, kind, calls) if kind not in (SEND, RECV) else 0
        for axis in {axis for axis, _ in volume}:
            by_axis[axis] += max(
                (volume[axis, kind].bytes for kind in (SEND, RECV) if (axis, kind) in volume), default=0
            )
        return by_axis

    def _rank(self, pp_rank: int) -> RankEstimate:
        volume, rank = self.volume, self.first_rank(pp_rank)
        parameters = volume.gradients_of(rank).parameters()
        activations = MemoryPrediction(volume, on_device=True).of_rank(rank).activations
        assert activations is not None
        model, hardware = (None, None) if self.tokens is None else rank_flops(volume, rank)
        weights, gradients, optimizer = (self._static(parameters, which) for which in range(3))
        stages = {self.plan.model_stage(stage) for stage in self.plan.stages_of(pp_rank)}
        return RankEstimate(
            pp_rank,
            sum(self.facts.layers_per_stage[stage] for stage in stages),
            sum(parameter.numel for parameter in parameters),
            weights,
            gradients,
            optimizer,
            outstanding(self.plan, pp_rank).held,
            activations,
            model,
            hardware,
            volume.of_rank(rank, _USUAL_STEP),
        )

    def _static(self, parameters: list[Parameter], which: int) -> int:
        """Bytes of weights (0), gradients (1) or optimizer (2), which replicas share from ZeRO-3, ZeRO-2 or ZeRO-1 on."""
        replicas = self.mesh.dp * self.mesh.cp
        is_shared = self.facts.zero >= 3 - which
        numbers = sum(
            -(-parameter.numel // ((self.mesh.edp if parameter.is_expert else replicas) if is_shared else 1))
            for parameter in parameters
        )
        return numbers * self.bytes_each[which]

    def _routes(self) -> Routes:
        """Routes by which every rank of ep gets as many rows as it sends."""
        facts, mesh, routes = self.facts, self.mesh, dict[tuple[int, int, int], LayerRoutes]()
        assert facts.experts is not None
        own = facts.microbatch_size * facts.sequence // (mesh.cp * mesh.tp) * facts.experts.top_k
        for pp_rank, actions in enumerate(self.plan.ranks):
            halves = [half for half in iter_halves(actions) if half.kind is Kind.F]
            forwards = Counter(self.plan.model_stage(half.stage) for half in halves)
            for stage, count in forwards.items():
                each = LayerRoutes([own] * count, [own] * count, [own * mesh.etp] * count)
                for layer in facts.layers_of(stage):
                    routes[self.first_rank(pp_rank), _USUAL_STEP, layer] = each
        return routes
