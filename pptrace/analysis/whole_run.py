"""Figures of a run over all its steps, as types; each field is the JSON field of the same name, and None is its ``null``.

Parts of a step's time, as types; each field is the JSON field of the same name, and None is its ``null``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


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


@dataclass(frozen=True, slots=True)
class StepOutlier:
    """A step far above the usual length: ``usual_step`` is the typical one of its time, with ``usual_ns``.

    ``differences`` are what it has more of, by cause and place, and sum to ``excess_ns``; None where a step is not explained.
    ``ops`` has the op that is to blame for most of its bubble, if one is.
    """

    step: int
    span_ns: int
    usual_step: int
    usual_ns: int
    differences: tuple[Cause, ...] | None
    ops: tuple[BlamedOp, ...]

    @property
    def excess_ns(self) -> int:
        return self.span_ns - self.usual_ns


@dataclass(frozen=True, slots=True)
class StepChange:
    """From ``step`` on, steps take as long as ``after_step``; until then as long as ``before_step``.

    ``differences`` are what they have more or less of, by cause and place; None where a step is not explained.
    """

    step: int
    before_step: int
    before_ns: int
    after_step: int
    after_ns: int
    differences: tuple[Cause, ...] | None


@dataclass(frozen=True, slots=True)
class StepSeries:
    """Lengths of a run's training steps, ns: percentiles, the outliers, the longest first, and where the level changes.

    ``evaluations`` are the numbers of the steps without backwards, which are left out. Lengths are periods where those of all
    steps are known, else spans (``measure``).
    """

    num_steps: int
    min_ns: int
    p10_ns: int
    median_ns: int
    p90_ns: int
    max_ns: int
    outliers: tuple[StepOutlier, ...]
    changes: tuple[StepChange, ...]
    evaluations: tuple[int, ...] = ()
    measure: str = "period"


@dataclass(frozen=True, slots=True)
class WorkerSlowdown:
    rank: int
    slowdown: float


@dataclass(frozen=True, slots=True)
class StageSlowdown:
    stage: int
    slowdown: float


@dataclass(frozen=True, slots=True)
class KindSlowdown:
    kind: str
    slowdown: float


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The what-if study of all whole steps (:mod:`pptrace.analysis.stragglers.slowdowns`).

    ``m_w`` and ``m_s`` are None where the slowdown is too small to divide by. ``num_steps`` is how many steps were replayed;
    ``covers`` is ``step`` where that is with what ranks do before and after their ops, else ``pipeline``.
    """

    slowdown: float
    m_w: float | None
    m_s: float | None
    workers: tuple[WorkerSlowdown, ...]
    stages: tuple[StageSlowdown, ...]
    op_kinds: tuple[KindSlowdown, ...]
    num_steps: int
    covers: str


@dataclass(frozen=True, slots=True)
class CoreWait:
    """For which share of the recorded time the threads of a rank were ready to run and had no processor core, all together.

    With several threads that wait it may be more than 1.
    """

    rank: int
    share: float


@dataclass(frozen=True, slots=True)
class RootCause:
    """Cause of several findings: their evidence has its ``name`` as ``follows_from``; ``ranks`` are those concerned.

    ``title`` says what it is, ``detail`` what it does, ``advice`` what to do about it; ``gain`` why no gain is known, ""
    where the gains of its findings tell.
    """

    name: str
    ranks: tuple[int, ...]
    title: str
    detail: str
    advice: str
    gain: str = ""


class InDoubt(StrEnum):
    """Thing in doubt: how the clocks of ranks relate, or what ops take on a device that several ranks have."""

    CLOCK = "clock"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Doubt:
    """A doubt, and the line of the report's warnings that tells of it."""

    cause: InDoubt
    line: str


CLOCKS_OFF = "the clocks may be off by"
"""Beginning of the line that says by how much, and where that is much."""
