"""Parts of a step's time, as types; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Parts of a step's span, ns; they sum to it exactly. ``host`` is None where the trace cannot tell it apart."""

    compute: int
    structural: int
    imbalance: int
    jitter: int
    communication: int
    host: int | None
    unexplained: int


@dataclass(frozen=True, slots=True)
class Bubble:
    """``ratio`` is bubble over compute, ``share`` bubble over window; the ideals are those of the plan with F = I = W."""

    ratio: float | None
    share: float | None
    ideal_ratio: float | None
    ideal_share: float | None
    waterfall_ns: Waterfall | None


LATE_OPS = "late ops"
"""Meaning of the cause ``host`` on ranks without a device: ops that begin later than what they need is there."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A part of a step beyond its compute spread evenly; ``where`` names a stage, rank, kind or axis, or nothing."""

    cause: str
    where: Mapping[str, int | str]
    ns: int


OUTSIDE = "outside "
"""Before the name of a part outside the pipeline, among all parts of a step."""
OUTSIDE_NAMES = {
    "gradient_sync": "gradient sums that nothing hides",
    "parameter_gather": "parameter gathers that nothing hides",
    "optimizer": "optimizer",
    "data": "loading of data",
    "barrier": "barrier",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "logging": "logging",
    "garbage_collection": "garbage collection between pipelines",
    "communication": "communication between pipelines",
    "host": "devices waiting for launches between pipelines",
    "compute": "compute between pipelines",
    "unrecorded_ranks": "waiting for ranks that are not recorded",
    "unknown_rank": "waiting for a rank that is not known",
    "other": "time between pipelines that no range names",
    "overlap": "pipelines of two steps at once",
}
"""Names of the parts outside the pipeline."""


@dataclass(frozen=True, slots=True)
class OutsidePart:
    """A part of a step outside its pipeline (:mod:`pptrace.analysis.outside_pipeline`); ``where`` names a rank or an axis."""

    part: str
    where: Mapping[str, int | str]
    ns: int


@dataclass(frozen=True, slots=True)
class PathOps:
    """Time of a stage's ops of one kind on a critical path; of an overlapped pair the stage is that of its forward."""

    stage: int
    kind: str
    ns: int


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The chain of ops, transfers and idle times that ends with a step's last op. ``parts`` by kind sum to the span.

    ``ops`` are those of its parts that are ops, by stage and kind.
    """

    span_ns: int
    parts: Mapping[str, int]
    by_stage: Mapping[int, int]
    ops: tuple[PathOps, ...] = ()


@dataclass(frozen=True, slots=True)
class BlamedOp:
    rank: int
    kind: str
    stage: int
    microbatch: int
    ns: int


@dataclass(frozen=True, slots=True)
class Blame:
    """The bubble of all ranks by what caused it; each mapping sums to the total. ``ops`` are those with the largest charges."""

    total_ns: int
    by_rank: Mapping[int, int]
    by_stage: Mapping[int, int]
    by_kind: Mapping[str, int]
    ops: tuple[BlamedOp, ...]
