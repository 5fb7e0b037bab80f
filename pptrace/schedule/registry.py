"""The catalogue of schedules: every name that the command line takes, and its builder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pptrace.errors import UsageError
from pptrace.schedule import gpipe, interleaved, one_f_one_b
from pptrace.schedule.plan import Plan
from pptrace.schedule.shape import Shape


@dataclass(frozen=True, slots=True)
class Schedule:
    """A catalogue entry. ``bubble`` is the closed form of the ideal bubble ratio, for people."""

    name: str
    summary: str
    bubble: str
    in_flight: str
    source: str
    build: Callable[[Shape], Plan]
    default_chunks: int = 1


SCHEDULES: dict[str, Schedule] = {
    entry.name: entry
    for entry in (
        Schedule(
            gpipe.NAME,
            "all forwards, then all backwards",
            "(p−1)/m",
            "m",
            "GPipe, arXiv 1811.06965",
            gpipe.build,
        ),
        Schedule(
            one_f_one_b.NAME,
            "one forward, one backward (PipeDream-flush)",
            "(p−1)/m",
            "min(p−r, m)",
            "Megatron-LM, arXiv 2104.04473",
            one_f_one_b.build,
        ),
        Schedule(
            interleaved.NAME,
            "1F1B over v virtual stages per rank (VPP), depth-first",
            "(p−1)/(v·m)",
            "min(2(p−r−1)+(v−1)·N+1, v·m)",
            "Megatron-LM, arXiv 2104.04473",
            interleaved.build,
            default_chunks=2,
        ),
    )
}


def get(name: str) -> Schedule:
    """The entry of a name.

    Raises:
        UsageError: no schedule has that name.
    """
    try:
        return SCHEDULES[name]
    except KeyError:
        raise UsageError(f"schedule {name!r} is not known; expected one of {', '.join(SCHEDULES)}") from None


def build(
    name: str,
    pp: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    group_size: int | None = None,
    lean: bool = False,
) -> Plan:
    """The plan of a named schedule; ``num_chunks`` None means the schedule's own default.

    Raises:
        UsageError: no schedule has that name.
        ShapeError: the shape is illegal for it; the message says what is legal.
    """
    entry = get(name)
    chunks = entry.default_chunks if num_chunks is None else num_chunks
    return entry.build(Shape(pp, num_microbatches, chunks, group_size, lean))
