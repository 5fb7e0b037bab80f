"""Communication of gradients and parameters in one step of the GPT runtime: sums over tp, averages over replicas, ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pptrace.marks import Axis, Collective
from pptrace.sizes.gpt_facts import GptFacts, Parameter, StageParameters
from pptrace.sizes.transformer import Volume, collective, total

_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class ShardedUnits:
    """A stage's parameters, as ``fully_shard`` shares them out over replicas: layer by layer, and all others together."""

    parameters: StageParameters
    facts: GptFacts
    axis: Axis
    replicas: int
    is_whole_model: bool

    @property
    def others(self) -> tuple[Parameter, ...]:
        before, after = self.parameters.before, self.parameters.after
        if self.facts.tied and self.is_whole_model:  # one parameter, which stands where it stood first
            after = tuple(parameter for parameter in after if not parameter.is_embedding)
        return before + after

    def __iter__(self) -> Iterator[Parameter]:
        first = len(self.parameters.before)
        yield from self.others[:first]
        for layer in self.parameters.layers:
            yield from layer
        yield from self.others[first:]

    def gathered(self) -> Volume:
        return self._calls(Collective.ALL_GATHER, self.facts.item_bytes)

    def scattered(self) -> Volume:
        return self._calls(Collective.REDUCE_SCATTER, self.facts.gradient_bytes)

    def _calls(self, kind: Collective, item_bytes: int) -> Volume:
        units = [unit for unit in (*self.parameters.layers, self.others) if unit]
        sizes = [sum(parameter.padded_numel(self.replicas) for parameter in unit) for unit in units]
        return total(collective(self.axis, kind, self.replicas, size * item_bytes) for size in sizes)


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients that travel together: ``is_late`` where they wait for the step to end. ``length`` counts numbers, with padding;
    parameters have ``item_bytes`` each, and ``shard`` of them are updated by this rank.
    """

    is_late: bool
    of_experts: bool
    length: int
    item_bytes: int
    shard: int


@dataclass(frozen=True, slots=True)
class GradientVolume:
    """A rank's gradient sums of one step (:mod:`instrument.optim.gradient_sync`); ``units`` are its stages in the model's
    order. ``tied_apart``: the embedding's other end is on another rank. ``expert_replicas`` hold the same experts (edp)."""

    facts: GptFacts
    units: tuple[ShardedUnits, ...]
    tp: int
    axis: Axis
    replicas: int
    replica_rank: int
    tied_apart: bool
    mirrored: bool
    expert_replicas: int = 1

    def volumes(self) -> Iterator[Volume]:
        # One all-reduce over tp of what each rank has a part of (Megatron-LM ``finalize_model_grads``).
        partial = sum(
            self._held(parameter) if parameter.summed == parameter.numel else parameter.summed
            for parameter in self.parameters()
        )
        num_bytes = partial * self.facts.gradient_bytes
        yield collective(Axis.TP, Collective.ALL_REDUCE, self.tp, num_bytes, 1 if partial else 0)
        if self.tied_apart:
            embedding = next(parameter for parameter in self.parameters() if parameter.is_embedding)
            yield collective(
                Axis.EMBEDDING, Collective.ALL_REDUCE, 2, self._held(embedding) * self.facts.gradient_bytes
            )
        if self.facts.zero >= 2:
            for unit in self.units:
                yield unit.scattered()
                if self.facts.zero == 2:  # kept from the first forward of a step to the last backward
                    yield unit.gathered()
            return
        for bucket in self.buckets():
            yield from self._mean(bucket)
        yield from self._bias_counts()

    def parameters(self) -> list[Parameter]:
        """List each parameter once: a tied embedding with both ends on this rank stands where its first end does."""
        parameters = [parameter for unit in self.units for parameter in unit]
        if not self.facts.tied:
            return parameters
        ends = [index for index, parameter in enumerate(parameters) if parameter.is_embedding]
        return [parameter for index, parameter in enumerate(parameters) if index not in ends[1:]]

    def _held(self, parameter: Parameter) -> int:
        """Numbers of its gradient on this rank."""
        if self.facts.zero < 2:
            return parameter.numel
        return parameter.local_numel(self.replica_rank, self.replicas)

    def _mean(self, bucket: GradientBucket) -> Iterator[Volume]:
        """A bucket over its replicas: an all-reduce; with ZeRO-1 a reduce-scatter, and an all-gather of the parameters
        (arXiv 1910.02054, section 7.2.1: as many bytes on the wire)."""
        axis, size = (Axis.EDP, self.expert_replicas) if bucket.of_experts else (self.axis, self.replicas)
        num_bytes = bucket.length * self.facts.gradient_bytes
        if bucket.is_late and self.mirrored:
            yield collective(Axis.MIRROR, Collective.ALL_REDUCE, 2, num_bytes)
        if self.facts.zero == 0:
            yield collective(axis, Collective.ALL_REDUCE, size, num_bytes)
            return
        yield collective(axis, Collective.REDUCE_SCATTER, size, num_bytes)
        yield collective(axis, Collective.ALL_GATHER, size, bucket.length * bucket.item_bytes)

    def _bias_counts(self) -> Iterator[Volume]:
        """Routes to each expert of the global batch, where routers have a bias (:mod:`instrument.expert.bias`)."""
        experts = self.facts.experts
        if experts is None or not experts.bias_rate:
            return
        numbers = sum(parameter.shape[0] for parameter in self.parameters() if parameter.is_wide)
        groups = ((Axis.TP, self.tp), (self.axis, self.replicas), (Axis.MIRROR, 2 if self.mirrored else 1))
        for axis, size in groups:
            yield collective(axis, Collective.ALL_REDUCE, size, numbers * _COUNT_BYTES, 1 if numbers else 0)

    def buckets(self) -> Iterator[GradientBucket]:
        """Buckets of all parameters but the experts', then those of the experts: of either in reverse order those that leave
        during backward, then those that wait for the step to end.
        """
        parameters = self.parameters()
        for of_experts, replicas in ((False, self.replicas), (True, self.expert_replicas)):
            own = [parameter for parameter in parameters if parameter.is_expert is of_experts]
            late = [parameter for parameter in own if self._is_late(parameter)]
            early = [parameter for parameter in reversed(own) if not self._is_late(parameter)]
            multiple = replicas if self.facts.zero else 1
            for is_late, members in ((False, early), (True, late)):
                for item_bytes, length in self._fill(members):
                    padded = -(-length // multiple) * multiple
                    yield GradientBucket(is_late, of_experts, padded, item_bytes, padded // multiple)

    def _is_late(self, parameter: Parameter) -> bool:
        """Return whether parts of its gradient have to be summed before the mean."""
        return self.mirrored or parameter.summed > 0 or (self.tied_apart and parameter.is_embedding)

    def _fill(self, parameters: list[Parameter]) -> Iterator[tuple[int, int]]:
        """(bytes of a parameter, length) of buckets of one dtype and at most ``bucket_bytes``, or of one parameter
        (:func:`instrument.optim.buckets.make_buckets`).
        """
        limit, length, last = self.facts.bucket_bytes // self.facts.gradient_bytes, 0, 0
        for parameter in parameters:
            item_bytes = self.facts.bytes_of_each(parameter)
            if length and (length + parameter.numel > limit or item_bytes != last):
                yield last, length
                length = 0
            length, last = length + parameter.numel, item_bytes
        if length:
            yield last, length
