"""Outstanding microbatches of a rank by its plan: their forward has run, their backward has not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from types import MappingProxyType

from pptrace.errors import UsageError
from pptrace.schedule.actions import Cell, Kind, cell_of, iter_halves
from pptrace.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Peak counts of one rank, all its chunks together: ``in_flight`` forwards whose B or I has not run,
    ``deferred_weight_grads`` I whose W has not, and ``held`` of both (the plan's peak of activations)."""

    in_flight: int
    deferred_weight_grads: int
    held: int


def outstanding(plan: Plan, rank: int) -> Outstanding:
    """Count outstanding microbatches along a rank's actions. Of an overlapped pair the forward comes first, as it runs."""
    changes = [(0, 0), *(_CHANGES.get(half.kind, (0, 0)) for half in iter_halves(plan.ranks[rank]))]
    in_flight, deferred = (list(accumulate(of_one)) for of_one in zip(*changes, strict=True))
    return Outstanding(max(in_flight), max(deferred), max(map(add, in_flight, deferred)))


def in_flight_by_stage(plan: Plan, rank: int) -> Mapping[int, int]:
    """The most forwards of each stage of a rank whose B or I has not run."""
    in_flight, peaks = Counter[int](), dict.fromkeys(plan.stages_of(rank), 0)
    for half in iter_halves(plan.ranks[rank]):
        in_flight[half.stage] += _CHANGES.get(half.kind, (0, 0))[0]
        peaks[half.stage] = max(peaks[half.stage], in_flight[half.stage])
    return peaks


def recomputed_cells(plan: Plan, rank: int, num_unrecomputed: int) -> frozenset[Cell]:
    """The microbatches of a rank that recompute fully if only ``num_unrecomputed`` of those outstanding at once need not.

    The i-th forward of a rank (from 0, its chunks counted through) recomputes where i mod window ≥ num_unrecomputed, the window
    being the most forwards that are outstanding on that rank. So late stages, which have few, recompute few or none.
    Where backwards come in the order of their forwards, at most ``num_unrecomputed`` outstanding ones save their activations;
    chunks come back in another order, so that now and then it is one or two more.

    Source: arXiv 2205.05198, appendix C; Megatron-LM ``num_microbatches_with_partial_activation_checkpoints``, whose
    window (warmup forwards + 1) is the same number in its two schedules.

    Raises:
        UsageError: ``num_unrecomputed`` is negative.
    """
    if num_unrecomputed < 0:
        raise UsageError(f"{num_unrecomputed} outstanding microbatches without full recompute; expected 0 or more")
    window = outstanding(plan, rank).in_flight
    forwards = [half for half in iter_halves(plan.ranks[rank]) if half.kind is Kind.F]
    return frozenset(cell_of(action) for index, action in enumerate(forwards) if index % window >= num_unrecomputed)


_CHANGES: Mapping[Kind, tuple[int, int]] = MappingProxyType(
    {Kind.F: (1, 0), Kind.B: (-1, 0), Kind.I: (-1, 1), Kind.W: (0, -1)}
)
