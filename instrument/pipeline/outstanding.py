"""Which microbatches are outstanding on a rank, as its plan says: their forward has run, their backward has not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from instrument.pipeline.p2p import Cell
from pptrace.errors import ScheduleError, UsageError
from pptrace.schedule.actions import Action, Kind, iter_halves
from pptrace.schedule.plan import Plan


@dataclass(frozen=True, slots=True)
class Outstanding:
    """The most that a rank holds at once, all its chunks together: ``in_flight`` forwards whose B or I has not run,
    ``put_aside`` I whose W has not, and ``held`` of both (the plan's peak of activations)."""

    in_flight: int
    put_aside: int
    held: int


def outstanding(plan: Plan, rank: int) -> Outstanding:
    """Count along a rank's actions. Of an overlapped pair the forward comes first, as the runtime runs it."""
    in_flight = put_aside = 0
    peaks = Outstanding(0, 0, 0)
    for half in iter_halves(plan.ranks[rank]):
        flight_change, aside_change = _CHANGES.get(half.kind, (0, 0))
        in_flight += flight_change
        put_aside += aside_change
        peaks = Outstanding(
            max(peaks.in_flight, in_flight), max(peaks.put_aside, put_aside), max(peaks.held, in_flight + put_aside)
        )
    return peaks


def recomputed_cells(plan: Plan, rank: int, keep: int) -> frozenset[Cell]:
    """The microbatches of a rank that recompute fully where only ``keep`` of those outstanding at once need not.

    The i-th forward of a rank (from 0, its chunks counted through) recomputes where i mod window ≥ keep, the window
    being the most forwards that are outstanding on that rank. So late stages, which have few, recompute few or none.
    Where backwards come in the order of their forwards, at most ``keep`` outstanding ones keep their activations;
    chunks come back in another order, so that now and then it is one or two more.

    Source: arXiv 2205.05198, appendix C; Megatron-LM ``num_microbatches_with_partial_activation_checkpoints``, whose
    window (warmup forwards + 1) is the same number in its two schedules.

    Raises:
        UsageError: ``keep`` is negative.
    """
    if keep < 0:
        raise UsageError(f"{keep} outstanding microbatches without full recompute; expected 0 or more")
    window = outstanding(plan, rank).in_flight
    forwards = [half for half in iter_halves(plan.ranks[rank]) if half.kind is Kind.F]
    return frozenset(_cell(action) for index, action in enumerate(forwards) if index % window >= keep)


_CHANGES: Mapping[Kind, tuple[int, int]] = MappingProxyType(
    {Kind.F: (1, 0), Kind.B: (-1, 0), Kind.I: (-1, 1), Kind.W: (0, -1)}
)


def _cell(action: Action) -> Cell:
    if action.microbatch is None:
        raise ScheduleError(f"{action} needs a microbatch")
    return Cell(action.stage, action.microbatch)
