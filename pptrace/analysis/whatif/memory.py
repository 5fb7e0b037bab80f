"""Predicted peak memory of a plan, from the measured peaks of the run's ranks; under another split, from that of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.memory.types import MemoryReport
from pptrace.analysis.whatif.change import Change
from pptrace.analysis.whatif.stage_map import end_shares
from pptrace.model.known import all_known
from pptrace.model.step_memory import MemoryKind
from pptrace.model.tables import Bool, Floats, Int64
from pptrace.schedule.plan import Plan
from pptrace.simulator import peak_inflight

_RESERVED = MemoryKind.DEVICE_RESERVED
Fits = Callable[[int, Int64, int], Bool]
"""Returns whether a rank has room for the layers from each of some to before another one."""


class RankUse(Struct, frozen=True):
    """Memory of a pipeline rank, bytes: ``start`` before a step, ``per_activation`` for one microbatch of all of its chunks.

    ``base`` is the part of ``start`` that is there whatever layers the rank has, None where that is not known.
    """

    start: int
    per_activation: float
    base: float | None = None


def rank_uses(memory: MemoryReport | None, plan: Plan) -> Mapping[int, RankUse]:
    """The use of each pipeline rank (of several replicas, the largest); {} where it is not known of all of them.

    What a step's peak has beyond its start is shared out over the activations in flight. What an allocator has reserved stays
    from one step to the next, so that it does not tell them.
    """
    uses: dict[int, RankUse] = {}
    planned = peak_inflight(plan)
    for rank in memory.ranks if memory is not None else ():
        if rank.pp_rank is None or rank.peak_bytes is None or rank.start_bytes is None or rank.kind == _RESERVED:
            return {}
        in_flight = planned[rank.pp_rank] / plan.num_chunks
        per_activation = max(rank.peak_bytes - rank.start_bytes, 0) / in_flight
        base = 0.0 if rank.kind == MemoryKind.DEVICE_ALLOCATED else None  # no weights and no optimizer state
        if rank.kind == MemoryKind.PROCESS_RESIDENT and rank.predicted is not None:
            base = max(0.0, float(rank.start_bytes - rank.predicted.weights_bytes - rank.predicted.optimizer_bytes))
        use = RankUse(rank.start_bytes, per_activation, base)
        if rank.pp_rank not in uses or _total(use, in_flight) > _total(uses[rank.pp_rank], in_flight):
            uses[rank.pp_rank] = use
    return uses if len(uses) == plan.pp else {}


def uses_with_recompute(
    uses: Mapping[int, RankUse], memory: MemoryReport | None, plan: Plan, layers: Sequence[int], parts: Floats
) -> Mapping[int, RankUse]:
    """The uses of ranks where other ``parts`` of the layers of each stage of the model recompute; {} where it is not known what
    these keep. While a layer recomputes, all that its forward keeps is there once more.
    """
    found: dict[int, RankUse] = {}
    for rank in memory.ranks if memory is not None else ():
        if rank.pp_rank is None or rank.pp_rank not in uses or rank.pp_rank in found or rank.predicted is None:
            continue
        if not rank.predicted.stages:
            return {}
        kept, again_before, again_after = 0.0, 0.0, 0.0
        for of_stage in rank.predicted.stages:
            none, full = of_stage.without_recompute_bytes, of_stage.full_recompute_bytes
            if none is None or full is None:
                return {}
            at, before = plan.model_stage(of_stage.stage), of_stage.bytes_per_microbatch
            after, of_layer = none + (full - none) * float(parts[at]), (none - full) / max(layers[at], 1)
            kept += after - before
            again_before = max(again_before, of_layer * (before < none))
            again_after = max(again_after, of_layer * (after < none))
        use = uses[rank.pp_rank]
        start = round(use.start + again_after - again_before)
        found[rank.pp_rank] = replace(use, start=start, per_activation=use.per_activation + kept)
    return found if found.keys() == uses.keys() else {}


def _total(use: RankUse, in_flight: float) -> float:
    return use.start + use.per_activation * in_flight


def predicted_peak(uses: Mapping[int, RankUse], measured: Plan, plan: Plan, change: Change) -> int | None:
    """The largest peak of a rank with a plan, bytes.

    None where it is not known: after another split (``peak_of_layers``), and with other copies of every stage (a bidirectional
    plan has two) where it is not known what a rank has besides.
    """
    if not uses or change.split is not None:
        return None
    copies = plan.num_chains / measured.num_chains
    if copies != 1 and any(use.base is None for use in uses.values()):
        return None
    peaks = []
    for rank, held in enumerate(peak_inflight(plan)):
        use = uses[rank]
        base = use.base or 0.0
        activations = use.per_activation * change.microbatch_size * held / plan.num_chunks
        peaks.append(base + copies * (use.start - base + activations))
    return round(max(peaks))


class LayerMemory(Struct, frozen=True, eq=False):
    """Bytes of each layer, between those of the embedding and of the head: two more than there are layers.

    ``base`` is what each rank has whatever its layers, ``state`` is there before a step (weights, optimizer), and one microbatch
    keeps ``activations`` from its forward to its backward.
    """

    base: Floats
    state: Floats
    activations: Floats

    def fits(self, most: int, activations: Sequence[float], rank: int, begins: Int64, end: int) -> Bool:
        """Return whether a rank has room for the layers from each of ``begins`` to before ``end``, of ``most`` bytes and with so
        many activations on each rank.
        """
        first, last = rank == 0, rank == len(self.base) - 1
        state, kept = (np.concatenate(([0.0], np.cumsum(part))) for part in (self.state, self.activations))
        begins, end = np.where(first, 0, begins + 1), end + 2 if last else end + 1
        peaks = self.base[rank] + state[end] - state[begins] + activations[rank] * (kept[end] - kept[begins])
        has_room: Bool = peaks <= most
        return has_room

    def peaks_of(self, plan: Plan, split: Sequence[float], activations: Sequence[float]) -> Floats:
        """The peak of each rank of a plan whose stages have the layers of a split; ``activations`` are those of one stage that
        each rank holds, which are shared out over its stages.
        """
        bounds = np.concatenate(([0.0], 1 + np.cumsum(split)))
        bounds[-1] += 1  # the head
        state, kept = (
            np.diff(np.interp(bounds, np.arange(len(part) + 1), np.concatenate(([0.0], np.cumsum(part)))))
            for part in (self.state, self.activations)
        )
        peaks = self.base.copy()
        for stage, rank in enumerate(plan.placement):
            at = stage % plan.chain_length
            peaks[rank] += state[at] + activations[rank] / plan.num_chunks * kept[at]
        return peaks


def layer_memory(uses: Mapping[int, RankUse], layers: Sequence[int] | None) -> LayerMemory | None:
    """The memory of layers from that of ranks with one stage each; None where it is not known which part of it is of layers.

    Layers of a rank are alike; of three ranks or more, what the ends have beyond as many layers of those between them is the
    embedding's and the head's.
    """
    in_order = [uses[rank] for rank in sorted(uses)]
    bases = all_known(use.base for use in in_order)
    if layers is None or bases is None or len(bases) != len(layers):
        return None
    base = np.array(bases)
    whole = np.array([(use.start, use.per_activation) for use in in_order], dtype=np.float64)
    whole[:, 0] -= base
    of_ends, counts = end_shares(whole, layers) * whole[[0, -1]], np.array(layers)
    of_stages = whole.copy()
    of_stages[0] -= of_ends[0]
    of_stages[-1] -= of_ends[1]
    of_layers = np.repeat(of_stages / np.maximum(counts, 1)[:, np.newaxis], counts, axis=0)
    by_layer = np.concatenate((of_ends[:1], of_layers, of_ends[1:])).T
    return LayerMemory(base, *by_layer)


def peak_of_layers(memory: LayerMemory, plan: Plan, layers: Sequence[float], microbatch_size: float) -> int:
    """The largest peak of a rank with a plan and so many layers in each stage of the model, bytes."""
    held = [microbatch_size * count for count in peak_inflight(plan)]
    return round(float(memory.peaks_of(plan, layers, held).max()))
