"""Partition of layers over stages by measured cost, so that the heaviest rank has the least work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pptrace.errors import UsageError
from pptrace.schedule.plan import Plan

_MAX_STATES = 400_000
"""Most states to try, about a second's worth: the beam is narrower where a model and its pipeline are large."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Forward and backward of one microbatch, in ns: of the embedding, of every layer, and of the head with its loss."""

    embedding_ns: int
    layers_ns: tuple[int, ...]
    head_ns: int

    def __post_init__(self) -> None:
        if not self.layers_ns:
            raise UsageError("layer times name no layer; expected at least 1")
        if min(self.embedding_ns, self.head_ns, *self.layers_ns) < 0:
            raise UsageError(f"{self} has a negative time; expected at least 0 ns")


def balance(times: LayerTimes, plan: Plan) -> tuple[int, ...]:
    """Choose the layers of every stage so that the rank with most work, over all its chunks, has the least.

    The embedding goes with the first stage and the head with the last; every stage has at least one layer. Dynamic
    programming over stages: of the ways to assign the first i layers only the heaviest finished rank and the loads of
    unfinished ranks matter. With one stage per rank that is one number, and the result exact (the linear partition
    problem). With chunks there are many loads, and a beam keeps the most even ones for each i: exact where the beam
    holds all of them, as for up to a dozen layers. Otherwise it is the best state of the beam, or an even partition
    from which single layers were moved as long as that helps, which is exact where all layers cost the same.

    Raises:
        UsageError: more stages than layers.
    """
    num_layers, num_stages = len(times.layers_ns), plan.chain_length
    if num_stages > num_layers:
        raise UsageError(f"{num_stages} stages need at least {num_stages} layers and the model has {num_layers}")
    owners = [
        tuple(plan.placement[copy] for copy in range(stage, plan.num_stages, num_stages)) for stage in range(num_stages)
    ]
    share, rest = divmod(num_layers, num_stages)
    even = tuple(share + (stage < rest) for stage in range(num_stages))
    moved = _move_layers(times, plan, even)
    searched = _Search(times, owners, plan.pp).run()
    return min(moved, searched, key=lambda split: max(rank_loads(times, plan, split)))


def rank_loads(times: LayerTimes, plan: Plan, split: Sequence[int]) -> tuple[int, ...]:
    """Compute time of every pipeline rank for one microbatch of each of its stages, in ns."""
    before = list(accumulate(times.layers_ns, initial=0))
    bounds = list(accumulate(split, initial=0))
    loads = [0] * plan.pp
    for stage, rank in enumerate(plan.placement):
        model_stage = plan.model_stage(stage)
        loads[rank] += before[bounds[model_stage + 1]] - before[bounds[model_stage]]
        loads[rank] += times.embedding_ns * (model_stage == 0) + times.head_ns * (model_stage == len(split) - 1)
    return tuple(loads)


def _move_layers(times: LayerTimes, plan: Plan, split: tuple[int, ...]) -> tuple[int, ...]:
    """Move a layer from one stage to another (those between shift) as long as the loads become more even."""

    def loads(counts: tuple[int, ...]) -> list[int]:
        return sorted(rank_loads(times, plan, counts), reverse=True)

    while True:
        others = [
            tuple(count - (stage == source) + (stage == target) for stage, count in enumerate(split))
            for source, num_layers_of in enumerate(split)
            for target in range(len(split))
            if num_layers_of > 1 and target != source
        ]
        best = min(others, key=loads, default=split)
        if loads(best) >= loads(split):
            return split
        split = best


@dataclass(frozen=True, slots=True)
class _State:
    """A partial assignment of layers: load of the heaviest finished rank, loads of the others, layers per stage so far."""

    heaviest: int
    loads: tuple[int, ...]  # 0 for a finished rank
    split: tuple[int, ...]

    @property
    def unevenness(self) -> tuple[int, list[int]]:
        return max(self.heaviest, *self.loads), sorted(self.loads, reverse=True)


class _Search:
    """The search of :func:`balance`; ``owners`` are the ranks that run each stage of the model."""

    def __init__(self, times: LayerTimes, owners: Sequence[tuple[int, ...]], num_ranks: int) -> None:
        self._before = list(accumulate(times.layers_ns, initial=0))
        self._extra = [0] * len(owners)
        self._extra[0] += times.embedding_ns
        self._extra[-1] += times.head_ns
        self._owners = owners
        self._num_ranks = num_ranks
        self._last = {rank: stage for stage, ranks in enumerate(owners) for rank in ranks}
        self._beam = max(4, _MAX_STATES // (len(owners) * len(times.layers_ns) ** 2))

    def run(self) -> tuple[int, ...]:
        beams = {0: [_State(0, (0,) * self._num_ranks, ())]}
        num_layers, num_stages = len(self._before) - 1, len(self._owners)
        for stage in range(num_stages):
            left = num_stages - stage - 1
            ends = range(stage + 1, num_layers - left + 1) if left else range(num_layers, num_layers + 1)
            beams = {end: self._reach(beams, stage, end) for end in ends}
        return beams[num_layers][0].split

    def _reach(self, beams: dict[int, list[_State]], stage: int, end: int) -> list[_State]:
        """The most even assignments of the first ``end`` layers to the stages up to this one."""
        best_by_loads: dict[tuple[int, ...], _State] = {}
        for start, beam in beams.items():
            for state in beam if start < end else ():
                extended = self._extend(state, stage, start, end)
                best = best_by_loads.get(extended.loads)
                if best is None or extended.heaviest < best.heaviest:
                    best_by_loads[extended.loads] = extended
        return sorted(best_by_loads.values(), key=lambda state: state.unevenness)[: self._beam]

    def _extend(self, state: _State, stage: int, start: int, end: int) -> _State:
        cost = self._before[end] - self._before[start] + self._extra[stage]
        loads = list(state.loads)
        heaviest = state.heaviest
        for rank in self._owners[stage]:
            loads[rank] += cost
            if self._last[rank] == stage:
                heaviest = max(heaviest, loads[rank])
                loads[rank] = 0
        return _State(heaviest, tuple(loads), (*state.split, end - start))
