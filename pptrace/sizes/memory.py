"""Memory that every rank of a GPT run holds: parameters, gradients, optimizer state and activations.

Temporaries inside of ops, messages in transit, parameters that ``fully_shard`` has gathered and what an allocator rounds up are
not counted. Sources: ZeRO, arXiv 1910.02054, section 3.1; activations, :mod:`pptrace.sizes.activations`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pptrace.schedule.actions import Kind, iter_halves
from pptrace.sizes.activations import ActivationSizes
from pptrace.sizes.expert_step import ExpertVolume
from pptrace.sizes.gradients import GradientVolume
from pptrace.sizes.step import StepVolume

_MOMENTS = 2
"""Moments of AdamW, each as large as the parameters that the optimizer updates."""
_SCORES_STORED = "math"


@dataclass(frozen=True, slots=True)
class PredictedParts:
    """Bytes of one rank. ``weights`` and ``optimizer`` are there between steps, ``gradients`` is the most of a step.

    ``activations`` is the most along the plan, with what is kept from I to W where it splits backwards.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int | None
    activations_of_stage: Mapping[int, int]
    """Bytes of one microbatch from its forward to its backward, by stage of the plan."""
    by_recompute: Mapping[str, Mapping[int, int]]
    """The same if no layer recomputed (none), or all of them each by itself (full)."""


class MemoryPrediction:
    """Predicts the memory of a run's ranks.

    Args:
        volume: of the run.
        on_device: it ran on a GPU.
    """

    def __init__(self, volume: StepVolume, *, on_device: bool) -> None:
        self._volume = volume
        facts, mesh, plan = volume.facts, volume.mesh, volume.plan
        self.sizes = ActivationSizes(facts, mesh.tp, mesh.cp, on_device)
        has_pairs = not (facts.sleeps or facts.offloads) and plan.has_pairs
        options, experts = facts.experts, volume.experts
        self._is_in_pieces = (
            has_pairs and options is not None and options.overlap and experts is not None and experts.has_journeys
        )

    @property
    def reason(self) -> str | None:
        """Reason why activations are not predicted; None where they are, as far as routes to experts are known."""
        facts = self._volume.facts
        if facts.shortest_sequence is not None:
            return f"sequences have {facts.shortest_sequence} to {facts.sequence} tokens, and what a step keeps varies with them"
        if facts.offloads:
            return "activations wait on the host, where each tensor is as often as operators saved it"
        if facts.graphs:
            return "captured graphs hold activations from the capture on, as many as are in flight at most"
        if facts.attention_kernel == _SCORES_STORED:
            return "the attention ran without a fused kernel, and what it stores is not known"
        if facts.encoder_layers:
            return "what an encoder and its decoder keep, each of its own length, is not predicted"
        if facts.experts is not None and facts.experts.jitter > 0:
            return "the router sees noise, and what that keeps is not predicted"
        return None

    def of_rank(self, rank: int) -> PredictedParts:
        gradients, pp_rank = self._volume.gradients_of(rank), self._volume.pp_rank(rank)
        numbers = sum(parameter.numel for parameter in gradients.parameters())
        is_known = self.reason is None
        stages = self._volume.plan.stages_of(pp_rank)
        of_stage = {stage: self._of_stage(rank, stage) for stage in stages}
        return PredictedParts(
            self._weights(gradients),
            numbers * gradients.facts.sum_bytes,
            self._optimizer(gradients),
            self._activations(rank, pp_rank) if is_known else None,
            _known(of_stage) if is_known else {},
            {
                how: _known({stage: self._of_stage(rank, stage, every=how) for stage in stages})
                for how in ("none", "full")
                if is_known
            },
        )

    def forwards_at_peak(self, rank: int) -> Sequence[tuple[int, bool]]:
        """(stage of the model, whether it recomputes fully whatever the options say) of the forwards whose B or I has not run,
        when they keep most; without what an I leaves to its W.
        """
        plan, pp_rank = self._volume.plan, self._volume.pp_rank(rank)
        recomputed, held, peak = (
            self._volume.fully_recomputed(pp_rank),
            list[tuple[int, bool]](),
            list[tuple[int, bool]](),
        )
        of_stage = cache(lambda stage, fully: self._of_stage(rank, stage, fully=fully) or 0)
        for half in iter_halves(plan.ranks[pp_rank]):
            forward = half.stage, (half.stage, half.microbatch) in recomputed
            if half.kind is Kind.F:
                held.append(forward)
                peak = max(peak, list(held), key=lambda forwards: sum(itertools.starmap(of_stage, forwards)))
            elif half.kind in (Kind.B, Kind.I):
                held.remove(forward)
        return [(plan.model_stage(stage), fully) for stage, fully in peak]

    @staticmethod
    def _weights(gradients: GradientVolume) -> int:
        facts = gradients.facts
        if facts.zero < 2:
            return sum(parameter.numel * facts.bytes_of_each(parameter) for parameter in gradients.parameters())
        shards = sum(parameter.padded_numel(gradients.replicas) for parameter in gradients.parameters())
        return (
            shards // gradients.replicas * facts.sum_bytes
        )  # fully_shard's shards are those that the optimizer updates

    @staticmethod
    def _optimizer(gradients: GradientVolume) -> int:
        """Two moments, and copies of the parameters where these have fewer bits or belong to several replicas' optimizers."""
        facts = gradients.facts
        if facts.zero == 1:
            return (_MOMENTS + 1) * sum(bucket.shard for bucket in gradients.buckets()) * facts.sum_bytes
        if facts.zero >= 2:
            local = sum(p.local_numel(gradients.replica_rank, gradients.replicas) for p in gradients.parameters())
            return _MOMENTS * local * facts.sum_bytes
        copies = sum(p.numel for p in gradients.parameters() if facts.bytes_of_each(p) < facts.sum_bytes)
        return (_MOMENTS * sum(p.numel for p in gradients.parameters()) + copies) * facts.sum_bytes

    def _of_stage(self, rank: int, stage: int, *, fully: bool = False, every: str | None = None) -> int | None:
        """Bytes of one microbatch of a stage; None where those of experts are not known. ``every``: what all layers recompute."""
        facts, model_stage = self._volume.facts, self._volume.plan.model_stage(stage)
        how = facts.recompute_of(model_stage, fully=fully)
        how = how if every is None else (every,) * len(how)
        first, in_pieces = facts.layers_of(model_stage).start, self._is_in_pieces
        of_experts = self._of_layers(
            stage, lambda experts, layer: experts.kept_bytes(rank, layer, how[layer - first], in_pieces=in_pieces)
        )
        return None if of_experts is None else self.sizes.stage(of_experts, *self._ends(stage), how)

    def _weight_work(self, rank: int, stage: int) -> int | None:
        """Bytes of one microbatch of a stage from its I to its W; None where those of experts are not known."""
        of_experts = self._of_layers(stage, lambda experts, layer: experts.weight_work(rank, layer))
        return None if of_experts is None else self.sizes.weight_work(of_experts, *self._ends(stage))

    def _of_layers(self, stage: int, of_layer: Callable[[ExpertVolume, int], int | None]) -> list[int | None] | None:
        """Bytes of the experts of each layer of a stage, None of one with an MLP; None where some are not known."""
        found: list[int | None] = []
        for layer in self._volume.facts.layers_of(self._volume.plan.model_stage(stage)):
            has_experts, experts = bool(self._volume.facts.experts_of(layer)), self._volume.experts
            found.append(None if experts is None or not has_experts else of_layer(experts, layer))
            if has_experts and found[-1] is None:
                return None
        return found

    def _ends(self, stage: int) -> tuple[bool, bool]:
        """Two facts of a stage: it has the embedding, it has the head."""
        index = self._volume.plan.model_stage(stage)
        return index == 0, index == len(self._volume.facts.layers_per_stage) - 1

    def _activations(self, rank: int, pp_rank: int) -> int | None:
        """The most along the plan, of forwards whose backward has not run and of I whose W has not; None where that of a stage is
        not known.
        """
        recomputed = self._volume.fully_recomputed(pp_rank)
        of_forward = cache(lambda stage, fully: self._of_stage(rank, stage, fully=fully))
        of_work = cache(lambda stage: self._weight_work(rank, stage))
        held = most = 0
        for half in iter_halves(self._volume.plan.ranks[pp_rank]):
            if half.kind not in (Kind.F, Kind.B, Kind.I, Kind.W):
                continue
            forward = of_forward(half.stage, (half.stage, half.microbatch) in recomputed)
            work = of_work(half.stage) if half.kind in (Kind.I, Kind.W) else 0
            if forward is None or work is None:
                return None
            held += {Kind.F: forward, Kind.B: -forward, Kind.I: work - forward, Kind.W: -work}[half.kind]
            most = max(most, held)
        return most


def _known(of_stages: Mapping[int, int | None]) -> dict[int, int]:
    return {stage: num_bytes for stage, num_bytes in of_stages.items() if num_bytes is not None}
