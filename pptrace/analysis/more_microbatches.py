"""Fill and drain of a schedule that more microbatches would save."""

from __future__ import annotations

from functools import lru_cache

from pptrace.analysis.result import ScheduleSummary
from pptrace.errors import PptraceError
from pptrace.schedule.registry import SCHEDULES, build, get
from pptrace.simulator import IDEAL, simulate

_MOST_OPS = 10_000
"""A larger plan is not built for it."""


def part_saved_by_twice(schedule: ScheduleSummary) -> float | None:
    """The part of fill and drain that twice as many microbatches of half the size would save, with F = I = W.

    The work of a step stays what it is, and so the bubble is as long as its ratio to it. None for what the catalogue cannot
    build.
    """
    sizes = (schedule.num_microbatches, schedule.num_stages, schedule.num_chunks)
    if schedule.name not in SCHEDULES or None in sizes or get(schedule.name).searches:
        return None
    microbatches, stages, chunks = (size or 0 for size in sizes)
    if not chunks or stages % chunks or microbatches * stages > _MOST_OPS:
        return None
    try:
        now, then = (
            _ideal_ratio(schedule.name, stages // chunks, number, chunks) for number in (microbatches, 2 * microbatches)
        )
    except PptraceError:
        return None
    return 1 - then / now if now > 0 else None


@lru_cache(maxsize=16)
def _ideal_ratio(name: str, pp: int, microbatches: int, chunks: int) -> float:
    return simulate(build(name, pp, microbatches, chunks), IDEAL).bubble_ratio
