"""Predicted peak memory of a plan, from the measured peaks of the run's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pptrace.analysis.memory.types import MemoryReport, RankMemory
from pptrace.analysis.whatif.change import Change
from pptrace.model.step_memory import MemoryKind
from pptrace.schedule.plan import Plan
from pptrace.simulator import peak_inflight

_RESERVED = MemoryKind.DEVICE_RESERVED


@dataclass(frozen=True, slots=True)
class RankUse:
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
        use = RankUse(rank.start_bytes, per_activation, _base(rank, rank.start_bytes))
        if rank.pp_rank not in uses or _total(use, in_flight) > _total(uses[rank.pp_rank], in_flight):
            uses[rank.pp_rank] = use
    return uses if len(uses) == plan.pp else {}


def _base(rank: RankMemory, start: int) -> float | None:
    """The part of a rank's memory before a step that is no weights and no optimizer state."""
    if rank.kind == MemoryKind.DEVICE_ALLOCATED:
        return 0.0
    if rank.kind == MemoryKind.PROCESS_RESIDENT and rank.predicted is not None:
        return max(0.0, float(start - rank.predicted.weights_bytes - rank.predicted.optimizer_bytes))
    return None


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
