"""Communication of every rank of a GPT run in one step, predicted from its sizes and options.

The calls of the runtime in ``instrument/``, one after another: the batch along tp, then for each action of the plan the
layers of its stage and the transfers to its neighbours, then gradients, loss, clipping and the optimizer. An update that is
taken back (post-validation) is not among them. What travels to experts depends on the routes: it is predicted from their counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from pptrace import axes
from pptrace.marks import Axis, Collective
from pptrace.schedule.actions import Cell, Kind, iter_halves
from pptrace.schedule.outstanding import recomputed_cells
from pptrace.schedule.plan import Plan
from pptrace.sizes.expert_step import ExpertVolume, Routes
from pptrace.sizes.gpt_facts import FULLY, ITEM_BYTES, GptFacts, modules_of, stage_parameters
from pptrace.sizes.gradients import GradientVolume, ShardedUnits
from pptrace.sizes.mesh import MeshAxes
from pptrace.sizes.transformer import (
    AttentionSizes,
    BothWays,
    TensorSizes,
    Volume,
    attention_again_volume,
    attention_volume,
    collective,
    column_volume,
    cross_entropy_volume,
    messages,
    pair_volume,
    row_volume,
    times,
    total,
    vocabulary_volume,
)

_TOKEN_BYTES = 8
_CONTROL_BYTES = 8


class StepVolume:
    """Predicts a run's steps.

    Args:
        facts: of the model and the options.
        mesh: sizes and order of the axes.
        plan: the run's own, with sends and receives or without.
        routes: of each rank's tokens to experts, as they were counted.
        lengths: the tokens of a sequence by step and microbatch of all pipelines, numbered one after the other; None: all have
            ``facts.sequence``.
    """

    def __init__(
        self,
        facts: GptFacts,
        mesh: MeshAxes,
        plan: Plan,
        routes: Routes | None = None,
        lengths: Callable[[int, int], int] | None = None,
    ) -> None:
        self.facts = facts
        self._lengths = lengths
        self._of_length = {facts.sequence: self}
        self.mesh = mesh
        self.plan = plan
        self.experts = None if facts.experts is None else ExpertVolume(facts, mesh, routes or {})
        self._of_layers: dict[int, BothWays] = {}
        self._again: dict[int, Mapping[int, Sequence[bool]]] = {}
        self._every_step: dict[int, Volume] = {}

    def of_rank(self, rank: int, step: int) -> Volume:
        """Communication of a global rank in a step."""
        pp_rank, lengths = self.pp_rank(rank), self.lengths_of(rank, step)
        if rank not in self._every_step:
            gradients, actions = self.gradients_of(rank), self._actions(pp_rank) if self._lengths is None else ()
            every = (*self._batch(pp_rank), *actions, *gradients.volumes(), *self._loss(pp_rank))
            self._every_step[rank] = total(every)
        varying = () if lengths is None else self._actions(pp_rank, lengths)
        every_step = self._every_step[rank]
        return total((every_step, *varying, *self._clipping(pp_rank, step), *self._routed(rank, pp_rank, step)))

    def lengths_of(self, rank: int, step: int) -> Sequence[int] | None:
        """The tokens of a sequence of each microbatch of a rank's pipeline in a step; None where they do not vary."""
        if self._lengths is None:
            return None
        first, number = self.mesh.coordinates_of(rank)[1] * self.plan.num_microbatches, self.plan.num_microbatches
        return [self._lengths(step, microbatch) for microbatch in range(first, first + number)]

    def at(self, sequence: int) -> StepVolume:
        """The same of sequences of another length."""
        if sequence not in self._of_length:
            num_positions = self.facts.num_positions or self.facts.sequence
            facts = replace(self.facts, sequence=sequence, num_positions=num_positions)
            self._of_length[sequence] = StepVolume(facts, self.mesh, self.plan)
        return self._of_length[sequence]

    def pp_rank(self, rank: int) -> int:
        """The pipeline rank of a global rank."""
        return self.mesh.coordinates_of(rank)[0]

    @property
    def _replicas(self) -> int:
        return self.mesh.cp * self.mesh.dp

    @property
    def _replica_axis(self) -> Axis:
        """Axis of equal parameters and different tokens (:attr:`instrument.mesh.Mesh.replicas`)."""
        if self.mesh.cp == 1:
            return Axis.DP
        return Axis.CP if self.mesh.cp == self._replicas else Axis.DP_CP

    @cached_property
    def _tensor(self) -> TensorSizes:
        return self._tensor_of(self.facts.sequence)

    @cached_property
    def _source(self) -> TensorSizes:
        """The activations of an encoder."""
        return self._tensor_of(self.facts.source_length)

    def _tensor_of(self, sequence: int) -> TensorSizes:
        facts = self.facts
        num_bytes = facts.microbatch_size * sequence // self.mesh.cp * facts.hidden * facts.item_bytes
        return TensorSizes(self.mesh.tp, num_bytes, facts.sequence_parallel, facts.overlap)

    @cached_property
    def _attention(self) -> AttentionSizes:
        facts, tp = self.facts, self.mesh.tp
        return AttentionSizes(
            facts.microbatch_size,
            facts.sequence,
            facts.heads // tp,
            facts.kv_heads // tp if facts.kv_heads % tp == 0 else 1,
            facts.head_dim,
            facts.item_bytes,
            self.mesh.cp // facts.ulysses,
            facts.ulysses,
            facts.cp_comm_type == "all_gather",
            facts.value_dim,
        )

    def _batch(self, pp_rank: int) -> Iterator[Volume]:
        """Tokens for the first stage and targets for the last, from the first rank of tp; with an encoder the source for the
        first, and tokens for the one where the decoder begins.
        """
        plan, facts = self.plan, self.facts
        stages = [plan.model_stage(stage) for stage in plan.stages_of(pp_rank)]
        reads_source, reads_tokens = map(any, zip(*map(self._embeds, stages), strict=True))
        reads = reads_tokens + (plan.chain_length - 1 in stages)
        for number, length in ((int(reads_source), facts.source_length), (reads, facts.sequence)):
            num_bytes = number * plan.num_microbatches * facts.microbatch_size * length // self.mesh.cp * _TOKEN_BYTES
            yield collective(Axis.TP, Collective.BROADCAST, self.mesh.tp, num_bytes, count=1 if number else 0)

    def _actions(self, pp_rank: int, lengths: Sequence[int] | None = None) -> Iterator[Volume]:
        recomputed = self.fully_recomputed(pp_rank)
        forwards: Counter[tuple[int, int]] = Counter()
        backwards: Counter[tuple[int, int, bool]] = Counter()
        for half in iter_halves(self.plan.ranks[pp_rank]):
            sequence = self.facts.sequence if lengths is None else lengths[half.microbatch or 0]
            if half.kind is Kind.F:
                forwards[sequence, half.stage] += 1
            elif half.kind in (Kind.B, Kind.I):
                backwards[sequence, half.stage, (half.stage, half.microbatch) in recomputed] += 1
        for (sequence, stage), count in forwards.items():
            yield times(self.at(sequence).forward(stage), count)
        for (sequence, stage, fully_recomputed), count in backwards.items():
            yield times(self.at(sequence).backward(stage, fully_recomputed), count)

    def forward(self, stage: int) -> Volume:
        """Communication of one F of a stage of the plan, but for rows to experts."""
        model_stage_index, plan = self.plan.model_stage(stage), self.plan
        parts = [self._layers(model_stage_index).forward]
        if self.experts is not None:  # what recomputation leaves out of layers with experts
            with_experts = filter(self.facts.experts_of, self.facts.layers_of(model_stage_index))
            parts += [self.experts.unrepeated(layer, self._tensor) for layer in with_experts]
        parts.append(self._transfers(stage, plan.next_stage(stage), plan.previous_stage(stage)))
        parts += [both.forward for both in self._embedding_volumes(model_stage_index)]
        if model_stage_index == plan.chain_length - 1:
            parts.append(column_volume(self._tensor).forward)
            tokens = self.facts.microbatch_size * self.facts.sequence // self.mesh.cp
            parts.append(cross_entropy_volume(self.mesh.tp, tokens, self.facts.sum_bytes))
        return total((*parts, self._gathered_units(model_stage_index)))

    def backward(self, stage: int, fully_recomputed: bool) -> Volume:
        """Communication of one B or I of a stage of the plan, but for rows to experts: a W communicates nothing."""
        model_stage_index, plan = self.plan.model_stage(stage), self.plan
        parts = [self._layers(model_stage_index).backward]
        hows = self.facts.recompute_of(model_stage_index, fully=fully_recomputed)
        for layer, how in zip(self.facts.layers_of(model_stage_index), hows, strict=True):
            parts += self._repeated(layer, how)
        parts.append(self._transfers(stage, plan.previous_stage(stage), plan.next_stage(stage)))
        parts += [both.backward for both in self._embedding_volumes(model_stage_index)]
        if model_stage_index == plan.chain_length - 1:
            parts.append(column_volume(self._tensor).backward)
        return total((*parts, self._gathered_units(model_stage_index)))

    def _embeds(self, model_stage: int) -> tuple[bool, bool]:
        """Two facts of a stage of the model: it embeds an encoder's source, it embeds the tokens of the model or its decoder."""
        first = self.facts.encoder_layers
        if not first:
            return False, model_stage == 0
        return model_stage == 0, first in self.facts.layers_of(model_stage)

    def _embedding_volumes(self, model_stage: int) -> Iterator[BothWays]:
        for embeds, sizes in zip(self._embeds(model_stage), (self._source, self._tensor), strict=True):
            if embeds:
                yield vocabulary_volume(sizes)

    def _layers(self, model_stage: int) -> BothWays:
        """The layers of a stage of the model, but for what their experts make of routes."""
        if model_stage not in self._of_layers:
            parts = [part for layer in self.facts.layers_of(model_stage) for part in self._parts_of(layer)]
            self._of_layers[model_stage] = BothWays(
                total(part.forward for part in parts), total(part.backward for part in parts)
            )
        return self._of_layers[model_stage]

    def _parts_of(self, layer: int) -> tuple[BothWays, BothWays]:
        """The attention of a layer, and its MLP or experts."""
        if self.experts is not None and self.facts.experts_of(layer):
            return self._attention_layer, self.experts.fixed(self._tensor)
        if layer < self.facts.encoder_layers:
            return pair_volume(self._source), pair_volume(self._source)
        return self._attention_layer, pair_volume(self._tensor)

    @cached_property
    def _attention_layer(self) -> BothWays:
        facts, latent, read = self.facts, self.facts.form.latent, [self._tensor]
        if latent is not None:  # what it makes of the layer's input is read by the projections to a rank's heads
            widths = (latent.query_rank or facts.hidden, latent.kv_rank + latent.rotary)
            each = self._tensor.activation_bytes // facts.hidden
            read = [replace(self._tensor, activation_bytes=each * width) for width in widths]
        parts = [*map(column_volume, read), row_volume(self._tensor), attention_volume(self._attention)]
        if self.facts.encoder_layers:  # the decoder's layers attend over what the encoder has made, too
            parts += [pair_volume(self._tensor), column_volume(self._source)]
        return BothWays(total(part.forward for part in parts), total(part.backward for part in parts))

    def _routed(self, rank: int, pp_rank: int, step: int) -> Iterator[Volume]:
        """Communication of rows to experts and back in a step."""
        if self.experts is None:
            return
        for model_stage, again in self._forwards_again(pp_rank).items():
            layers = zip(self.facts.layers_of(model_stage), self.facts.recompute_of(model_stage), strict=True)
            for layer, how in layers:
                if self.facts.experts_of(layer):
                    yield self.experts.routed(rank, step, layer, [fully or how in FULLY for fully in again])

    def _forwards_again(self, pp_rank: int) -> Mapping[int, Sequence[bool]]:
        """Stage of the model → of each forward, in their order, whether it recomputes fully whatever the options say."""
        if pp_rank not in self._again:
            recomputed, by_stage = self.fully_recomputed(pp_rank), defaultdict(list)
            for half in iter_halves(self.plan.ranks[pp_rank]):
                if half.kind is Kind.F:
                    fully = (half.stage, half.microbatch) in recomputed
                    by_stage[self.plan.model_stage(half.stage)].append(fully)
            self._again[pp_rank] = by_stage
        return self._again[pp_rank]

    def _repeated(self, layer: int, how: str) -> Iterator[Volume]:
        """Communication of a layer's forward that its backward repeats (arXiv 2205.05198, section 5)."""
        if how in FULLY:
            yield from (part.forward for part in self._parts_of(layer))
        modules = modules_of(how)
        if "core_attn" in modules:
            yield attention_again_volume(self._attention)
        if "mlp" in modules and not self.facts.experts_of(layer):
            yield self._parts_of(layer)[1].forward

    def fully_recomputed(self, pp_rank: int) -> frozenset[Cell]:
        """The forwards that keep their input alone beyond ``recompute_microbatches_beyond``."""
        num_unrecomputed = self.facts.recompute_microbatches_beyond
        return frozenset() if num_unrecomputed is None else recomputed_cells(self.plan, pp_rank, num_unrecomputed)

    def _transfers(self, stage: int, target: int | None, source: int | None) -> Volume:
        """b · s/(cp · tp if SP or in parts) · h to the stage that reads an action's output, and from the one whose output it
        reads, of each of their tensors, whose parts are gathered.
        """
        facts, tp = self.facts, self.mesh.tp
        sent, received = (self._passed_bytes(stage, other) for other in (target, source))
        num_parts = tp if self._tensor.is_cut or facts.scatter_gather else 1
        each = [messages(Axis.PP, num_bytes // num_parts, 1, 0) for num_bytes in sent]
        each += [messages(Axis.PP, num_bytes // num_parts, 0, 1) for num_bytes in received]
        gathered = received if facts.scatter_gather else []
        return total((*each, *(collective(Axis.TP, Collective.ALL_GATHER, tp, num_bytes) for num_bytes in gathered)))

    def _passed_bytes(self, stage: int, other: int | None) -> list[int]:
        """Bytes of each tensor between two stages of the plan, one behind the other, of all ranks of tp together where they are
        cut; none if these are on one rank.
        """
        if other is None or self.plan.placement[other] == self.plan.placement[stage]:
            return []
        facts = self.facts
        lengths = facts.passed_lengths(min(self.plan.model_stage(stage), self.plan.model_stage(other)))
        item_bytes = ITEM_BYTES[facts.sent_dtype or facts.dtype]
        return [self._tensor_of(length).activation_bytes // facts.item_bytes * item_bytes for length in lengths]

    def _gathered_units(self, model_stage_index: int) -> Volume:
        """ZeRO-3 gathers every unit for each forward and each backward (arXiv 1910.02054, section 7.2.2)."""
        return self._units(model_stage_index).gathered() if self.facts.zero == 3 else {}

    def _units(self, model_stage_index: int) -> ShardedUnits:
        parameters = stage_parameters(self.facts, model_stage_index, self.mesh.tp, self.mesh.ep, self.mesh.etp)
        return ShardedUnits(parameters, self.facts, self._replica_axis, self._replicas, self.plan.chain_length == 1)

    def gradients_of(self, rank: int) -> GradientVolume:
        """The parameters of a global rank and the sums of their gradients."""
        pp_rank = self.pp_rank(rank)
        model_stages = sorted(self.plan.model_stage(stage) for stage in self.plan.stages_of(pp_rank))
        along = (Axis.DP, Axis.CP) if self._replica_axis is Axis.DP_CP else (self._replica_axis,)
        group = axes.group_of(rank, along, self.mesh.sizes, self.mesh.order)
        num_ends = (0 in model_stages) + (self.plan.chain_length - 1 in model_stages)
        # The other end of a tied embedding is on another rank.
        is_tied_apart = self.facts.tied and self.plan.pp > 1 and num_ends == 1
        return GradientVolume(
            self.facts,
            tuple(self._units(model_stage_index) for model_stage_index in model_stages),
            self.mesh.tp,
            self._replica_axis,
            len(group),
            group.index(rank),
            is_tied_apart,
            self._has_mirror(pp_rank),
            self.mesh.edp,
        )

    def _has_mirror(self, pp_rank: int) -> bool:
        return self.plan.num_chains > 1 and 2 * pp_rank != self.plan.pp - 1

    def _loss(self, pp_rank: int) -> Iterator[Volume]:
        """The mean over mirrored ends and over replicas, on ranks that have a last stage."""
        if not any(self.plan.next_stage(stage) is None for stage in self.plan.stages_of(pp_rank)):
            return
        if self._has_mirror(pp_rank):
            yield collective(Axis.MIRROR, Collective.ALL_REDUCE, 2, self.facts.sum_bytes)
        yield collective(self._replica_axis, Collective.ALL_REDUCE, self._replicas, self.facts.sum_bytes)

    def _clipping(self, pp_rank: int, step: int) -> Iterator[Volume]:
        """The norm of the gradient, as single numbers (:mod:`instrument.optim.clipping`)."""
        if not self.facts.clip_grad:
            return
        yield collective(Axis.TP, Collective.ALL_REDUCE, self.mesh.tp, _CONTROL_BYTES)
        if self.facts.zero or self.facts.experts is not None:
            yield collective(self._replica_axis, Collective.ALL_REDUCE, self._replicas, _CONTROL_BYTES)
        if self.facts.optimizer_sync != "post-validation":
            yield collective(Axis.PP, Collective.ALL_REDUCE, self.plan.pp, _CONTROL_BYTES)
            return
        has_previous, has_next = int(pp_rank > 0), int(pp_rank < self.plan.pp - 1)
        yield messages(Axis.PP, _CONTROL_BYTES, sent=has_next, received=has_previous)
        # The sum of all comes back in the next step, and that of the last step after it, under its number.
        validations = (step > 0) + (step == self.facts.steps - 1)
        yield times(messages(Axis.PP, _CONTROL_BYTES, sent=has_previous, received=has_next), validations)
