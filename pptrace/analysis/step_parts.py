"""Parts of a step's time, as types; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Parts of a step's span, ns, which sum to it exactly: its compute spread evenly over the ranks, and its causes, each at all
    of its places. ``host`` is None where the trace cannot tell it apart.
    """

    compute: int
    structural: int
    imbalance: int
    straggler: int
    jitter: int
    communication: int
    host: int | None
    interaction: int
    unexplained: int

    @classmethod
    def of(cls, ideal_ns: int | None, causes: Iterable[Cause] | None, *, knows_host: bool) -> Waterfall | None:
        """The parts of a step with these causes; None where they are not known. With ``knows_host`` no host's part is 0."""
        if ideal_ns is None or causes is None:
            return None
        sums: dict[str, int] = dict.fromkeys(cls.__slots__, 0) | {"compute": ideal_ns}
        for cause in causes:
            sums[cause.cause] += cause.ns
        parts = cls(**sums)
        return parts if knows_host or parts.host else replace(parts, host=None)


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


UNEQUAL_ROUTES = "unequal routes"
"""The reason of imbalance between ranks of experts: some have more rows than others."""
EARLY_RECEIVES = "early receives"
"""The reason of waits behind receives that were posted before their sender could send."""
INTERACTION = "interaction"
"""The cause of what several causes add together, and none of them alone."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A part of a step beyond its compute spread evenly; ``where`` names a stage, rank, link, kind or axis, or nothing.

    ``reason`` is what more is known of it, which has a finding of its own, as "late member" or "pauses"; None if nothing.
    """

    cause: str
    where: Mapping[str, int | str]
    ns: int
    reason: str | None = None

    @property
    def name(self) -> str:
        """The name of the part that it belongs to: its reason, else its cause."""
        return self.reason or self.cause


OUTSIDE = "outside "
"""Before the name of a part outside the pipeline, among all parts of a step."""


@dataclass(frozen=True, slots=True)
class OutsidePart:
    """A part outside the pipeline (:mod:`pptrace.analysis.steps.outside_pipeline`); ``where`` names a rank or an axis."""

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
