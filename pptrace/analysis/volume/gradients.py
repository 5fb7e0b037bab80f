"""Communication of gradients and parameters in one step of the GPT runtime: sums over tp, averages over replicas, ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pptrace.analysis.volume.gpt_facts import GptFacts, Parameter, StageParameters
from pptrace.analysis.volume.transformer import Volume, collective, total
from pptrace.marks import Axis, Collective


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
        return self._calls(Collective.REDUCE_SCATTER, self.facts.sum_bytes)

    def _calls(self, kind: Collective, item_bytes: int) -> Volume:
        units = [unit for unit in (*self.parameters.layers, self.others) if unit]
        sizes = [sum(parameter.padded_numel(self.replicas) for parameter in unit) for unit in units]
        return total(collective(self.axis, kind, self.replicas, size * item_bytes) for size in sizes)


@dataclass(frozen=True, slots=True)
class GradientVolume:
    """A rank's gradient sums of one step (:mod:`instrument.optim.gradient_sync`); ``units`` are its stages in the model's
    order. ``tied_apart``: the embedding's other end is on another rank."""

    facts: GptFacts
    units: tuple[ShardedUnits, ...]
    tp: int
    axis: Axis
    replicas: int
    replica_rank: int
    tied_apart: bool
    mirrored: bool

    def volumes(self) -> Iterator[Volume]:
        yield from self._partial_sums()
        if self.tied_apart:
            embedding = next(parameter for parameter in self.parameters() if parameter.is_embedding)
            yield collective(Axis.EMBEDDING, Collective.ALL_REDUCE, 2, self._held(embedding) * self.facts.sum_bytes)
        if self.facts.zero >= 2:
            for unit in self.units:
                yield unit.scattered()
                if self.facts.zero == 2:  # kept from the first forward of a step to the last backward
                    yield unit.gathered()
            return
        for is_late, length in self.buckets():
            yield from self._mean(length, is_late)

    def parameters(self) -> list[Parameter]:
        """List each parameter once: a tied embedding with both ends on this rank stands where its first end does."""
        parameters = [parameter for unit in self.units for parameter in unit]
        if not self.facts.tied:
            return parameters
        ends = [index for index, parameter in enumerate(parameters) if parameter.is_embedding]
        return [parameter for index, parameter in enumerate(parameters) if index not in ends[1:]]

    def _partial_sums(self) -> Iterator[Volume]:
        """One all-reduce over tp of what each rank has a part of (Megatron-LM ``finalize_model_grads``)."""
        numbers = sum(
            self._held(parameter) if parameter.summed == parameter.numel else parameter.summed
            for parameter in self.parameters()
        )
        count = 1 if numbers else 0
        yield collective(Axis.TP, Collective.ALL_REDUCE, self.tp, numbers * self.facts.sum_bytes, count)

    def _held(self, parameter: Parameter) -> int:
        """Numbers of its gradient on this rank."""
        if self.facts.zero < 2:
            return parameter.numel
        return parameter.local_numel(self.replica_rank, self.replicas)

    def _mean(self, length: int, is_late: bool) -> Iterator[Volume]:
        """A bucket over the replicas: an all-reduce; with ZeRO-1 a reduce-scatter, and an all-gather of the parameters
        (arXiv 1910.02054, section 7.2.1: as many bytes on the wire)."""
        num_bytes = length * self.facts.sum_bytes
        if is_late and self.mirrored:
            yield collective(Axis.MIRROR, Collective.ALL_REDUCE, 2, num_bytes)
        if self.facts.zero == 0:
            yield collective(self.axis, Collective.ALL_REDUCE, self.replicas, num_bytes)
            return
        yield collective(self.axis, Collective.REDUCE_SCATTER, self.replicas, num_bytes)
        yield collective(self.axis, Collective.ALL_GATHER, self.replicas, length * self.facts.item_bytes)

    def buckets(self) -> Iterator[tuple[bool, int]]:
        """(True if it waits for the step to end, numbers) of each bucket: in reverse order those that leave during backward."""
        parameters = self.parameters()
        late = [parameter for parameter in parameters if self._is_late(parameter)]
        early = [parameter for parameter in reversed(parameters) if not self._is_late(parameter)]
        for is_late, members in ((False, early), (True, late)):
            for length in _fill(members, self.facts.bucket_bytes // self.facts.sum_bytes):
                multiple = self.replicas if self.facts.zero else 1
                yield is_late, -(-length // multiple) * multiple

    def _is_late(self, parameter: Parameter) -> bool:
        """Return whether parts of its gradient have to be summed before the mean."""
        return self.mirrored or parameter.summed > 0 or (self.tied_apart and parameter.is_embedding)


def _fill(parameters: list[Parameter], limit: int) -> Iterator[int]:
    """Lengths of buckets of at most ``limit`` numbers, or of one parameter (:func:`instrument.optim.buckets.make_buckets`)."""
    length = 0
    for parameter in parameters:
        if length and length + parameter.numel > limit:
            yield length
            length = 0
        length += parameter.numel
    if length:
        yield length
