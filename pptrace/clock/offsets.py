"""Offsets of clocks from their bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pptrace.clock.bounds import UNBOUNDED, Matrix, is_bounded, offset_ranges
from pptrace.clock.ends import clamp_offset
from pptrace.clock.result import Clock, ClockMethod


def from_bounds(ranks: Sequence[int], low: Matrix, likely: Mapping[int, int]) -> Clock:
    """Offsets against the first rank, the ``likely`` one or the middle of what all chains of messages allow."""
    offsets: dict[int, int] = {}
    uncertainty = 0
    warnings = []
    unrelated: set[int] = set()
    for rank, (lower, upper) in zip(ranks, offset_ranges(low), strict=True):
        if is_bounded(lower, upper):
            offsets[rank], width = clamp_offset(likely.get(rank), lower, upper)
            uncertainty = max(uncertainty, width)
        elif lower > -UNBOUNDED // 2 or upper < UNBOUNDED // 2:
            offsets[rank] = lower if lower > -UNBOUNDED // 2 else upper
            warnings.append(
                f"rank {rank}: messages bound its clock from one side only: the bound is taken as its offset, and "
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
