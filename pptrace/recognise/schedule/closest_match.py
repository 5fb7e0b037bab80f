"""The schedule of the registry that a run followed most closely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pptrace.errors import ScheduleError
from pptrace.schedule import registry
from pptrace.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class ClosestSchedule:
    """A plan, and the share of measured ops at their planned index."""

    plan: Plan
    share: float


MIN_SHARE = 0.6
"""A run is named after a plan only if at least this share of its ops is in the plan's order."""


def closest_schedule(
    rows: Sequence[Sequence[str]], pp_ranks: Sequence[int], pp: int, num_microbatches: int, num_chunks: int
) -> ClosestSchedule | None:
    """The schedule with the largest share of measured ops in its order; None where no schedule has this shape.

    Args:
        rows: cells of compute actions in time order, such as ``0F0``, for each rank that is in the trace.
        places: the pipeline ranks of the rows.
        pp, num_microbatches, num_chunks: the shape.
    """
    best: ClosestSchedule | None = None
    for entry in registry.SCHEDULES.values():
        try:
            plan = registry.build(entry.name, pp, num_microbatches, num_chunks)
        except ScheduleError:
            continue
        planned = [[str(action) for action in plan.compute_actions(rank)] for rank in range(pp)]
        share = _share(rows, [planned[pp_rank] for pp_rank in pp_ranks if pp_rank < pp])
        if best is None or share > best.share:
            best = ClosestSchedule(plan, share)
    return best


def _share(rows: Sequence[Sequence[str]], planned: Sequence[Sequence[str]]) -> float:
    """The mean of the ranks' shares of ops at their planned position; an order that ends early is compared as far as it goes."""
    if len(rows) != len(planned) or not all(rows):
        return 0.0
    shares = []
    for actual, wanted in zip(rows, planned, strict=True):
        same = sum(actual_cell == planned_cell for actual_cell, planned_cell in zip(actual, wanted, strict=False))
        shares.append(same / len(actual))
    return sum(shares) / len(shares)
