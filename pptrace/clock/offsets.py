"""Offsets of clocks from their bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pptrace.clock.bounds import UNBOUNDED, Matrix, is_bounded, offset_ranges
from pptrace.clock.ends import CommonEnd, clamp_offset
from pptrace.clock.nearest import nearest_offsets, placed
from pptrace.clock.result import Clock, ClockMethod


def from_bounds(ranks: Sequence[int], low: Matrix, likely: Mapping[int, CommonEnd]) -> Clock:
    """Offsets against the first rank: the recorded clocks as far as all bounds and common ends of kernels allow them.

    Where the bounds contradict each other, each rank is placed by itself.
    """
    nearest = nearest_offsets(ranks, low, likely)
    offsets: dict[int, int] = {}
    uncertainty = 0
    warnings = []
    unrelated: set[int] = set()
    for index, (rank, (lower, upper)) in enumerate(zip(ranks, offset_ranges(low), strict=True)):
        ordered = (min(lower, upper), max(lower, upper))
        alone = placed(ordered, upper - lower, (), likely.get(rank)) if nearest is None else nearest[index]
        if is_bounded(lower, upper):
            offsets[rank], width = clamp_offset(alone, lower, upper)
            uncertainty = max(uncertainty, width)
        elif lower > -UNBOUNDED // 2 or upper < UNBOUNDED // 2:
            offsets[rank] = alone
            warnings.append(
                f"rank {rank}: messages bound its clock from one side only: it is moved no further than they demand, and "
                "the uncertainty is null"
            )
        else:
            offsets[rank] = 0
            unrelated.add(rank)
            warnings.append(
                f"rank {rank}: no message relates its clock to rank {ranks[0]}'s: its times are left unchanged, and "
                "figures that compare it with other ranks are null"
            )
    return Clock(ClockMethod.BOUNDS, offsets, None if warnings else uncertainty, tuple(warnings), frozenset(unrelated))
