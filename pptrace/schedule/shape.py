"""What a builder is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from pptrace.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a schedule: p = ``pp`` ranks, m = ``num_microbatches``, v = ``num_chunks`` per rank.

    ``group_size`` is N, the microbatch group size per virtual-pipeline stage of interleaved schedules (None: p). ``lean``
    asks the interleaved schedule for its variant with fewer warmup forwards.
    """

    pp: int
    num_microbatches: int
    num_chunks: int = 1
    group_size: int | None = None
    lean: bool = False

    def __post_init__(self) -> None:
        for name, value in (
            ("pp", self.pp),
            ("num_microbatches", self.num_microbatches),
            ("num_chunks", self.num_chunks),
            ("group_size", self.group_size),
        ):
            if value is not None and value < 1:
                raise ShapeError(f"{name} is {value}; expected at least 1")


def require_one_chunk(name: str, shape: Shape) -> None:
    """Refuse virtual stages and their options for a schedule that has none."""
    if shape.num_chunks != 1:
        raise ShapeError(f"{name}: {shape.num_chunks} chunks per rank; this schedule has 1 (try interleaved-1f1b)")
    if shape.group_size is not None or shape.lean:
        raise ShapeError(f"{name}: microbatch groups and the lean warmup belong to interleaved schedules")
