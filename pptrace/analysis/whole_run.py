"""Figures of a run over all its steps, as types; each field is the JSON field of the same name, and None is its ``null``.

Parts of a step's time, as types; each field is the JSON field of the same name, and None is its ``null``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace


class Waterfall(Struct, frozen=True):
    """Parts of a step's span, which sum to it exactly, as its causes, each at all of its places; of several pipelines, of the
    longest.
    """

    #: usual time of ops, without the communication inside them, spread evenly over the ranks: the step's ``ideal_ns``
    compute: int
    structural: int  #: fill and drain of the schedule, with every op of a kind at the same cost
    imbalance: int  #: the cause of this name
    straggler: int  #: the cause of this name
    jitter: int  #: the cause of this name
    communication: int  #: the cause of this name
    #: the cause of this name; null where a rank's ``host`` is or, without devices, where it is not known when the inputs of an op
    #: came: it is part of ``unexplained`` then
    host: int | None
    interaction: int  #: the cause of this name
    unexplained: int  #: the cause of this name

    @classmethod
    def of(cls, ideal_ns: int | None, causes: Iterable[Cause] | None, *, knows_host: bool) -> Waterfall | None:
        """The parts of a step with these causes; None where they are not known. With ``knows_host`` no host's part is 0."""
        if ideal_ns is None or causes is None:
            return None
        sums: dict[str, int] = dict.fromkeys(cls.__struct_fields__, 0) | {"compute": ideal_ns}
        for cause in causes:
            sums[cause.cause] += cause.ns
        parts = cls(**sums)
        return parts if knows_host or parts.host else replace(parts, host=None)


class Bubble(Struct, frozen=True):
    """The bubble of a step, over all ranks of all pipelines."""

    #: bubble / compute; null where the bubble of a rank is or a rank of the pipelines has no trace, and without a pipeline
    ratio: float | None
    share: float | None  #: bubble / window; null as ``ratio``
    #: bubble / compute of the plan with F = I = W and free messages; null without a plan of the whole pipeline, or where the step
    #: has other ops than the plan
    ideal_ratio: float | None
    ideal_share: float | None  #: bubble / window of it; null as ``ideal_ratio``
    #: parts of the span; null without a plan, without ``span_ns``, or where the step lacks ops of the plan
    waterfall_ns: Waterfall | None


LATE_OPS = "late ops"
"""Meaning of the cause ``host`` on ranks without a device: ops that begin later than what they need is there."""


UNEQUAL_ROUTES = "unequal routes"
"""The reason of imbalance between ranks of experts: some have more rows than others."""
EARLY_RECEIVES = "early receives"
"""The reason of waits behind receives that were posted before their sender could send."""
INTERACTION = "interaction"
"""The cause of what several causes add together, and none of them alone."""


class Cause(Struct, frozen=True):
    """A part of a step beyond its compute spread evenly; a cause with several places has an entry for each."""

    #: ``structural``, ``imbalance``, ``straggler``, ``jitter``, ``communication``, ``host``, ``interaction`` or ``unexplained``
    cause: str
    #: object with one of ``stage``, ``rank``, ``axis`` and ``link``; empty where the cause has no place
    where: Mapping[str, int | str]
    ns: int  #: its part; 0 or more, but of ``interaction`` and ``unexplained``
    #: name of what more is known, which has a finding of its own: ``late member``, ``pauses``, …; null where no more is known
    #: than the cause
    reason: str | None = None

    @property
    def name(self) -> str:
        """The name of the part that it belongs to: its reason, else its cause."""
        return self.reason or self.cause


OUTSIDE = "outside "
"""Before the name of a part outside the pipeline, among all parts of a step."""


class OutsidePart(Struct, frozen=True):
    """A part of a step's period outside the pipeline (:mod:`pptrace.analysis.steps.outside_pipeline`)."""

    part: str  #: name of the part: ``gradient_sync``, ``optimizer``, ``data``, …
    where: Mapping[str, int | str]  #: object with one of ``rank`` and ``axis``; empty where the part has no place
    ns: int  #: its time


class PathOps(Struct, frozen=True):
    """Time of a stage's ops of one kind on a critical path."""

    stage: int  #: stage; of an overlapped pair that of its forward
    kind: str  #: kind of the ops
    ns: int  #: their time


class CriticalPath(Struct, frozen=True):
    """The chain of ops, transfers and idle times that ends with a step's last op."""

    span_ns: int  #: span of the step
    #: time by kind (``F``, ``B``, …, ``transfer``, ``idle``, on devices ``host``), in the JSON objects with ``kind`` and ``ns``;
    #: sums to the span
    parts: Mapping[str, int]
    #: time by stage that it goes through, in the JSON objects with ``stage`` and ``ns``; sums to the span
    by_stage: Mapping[int, int]
    ops: tuple[PathOps, ...] = ()  #: parts that are ops, by stage and kind


class BlamedOp(Struct, frozen=True):
    """An op, and what is charged to it."""

    rank: int  #: global rank
    kind: str  #: kind of the op
    stage: int  #: its stage
    microbatch: int  #: its microbatch
    ns: int  #: bubble that it is charged with


class Blame(Struct, frozen=True):
    """The bubble of all ranks of all pipelines by what caused it; each list sums to the total."""

    total_ns: int  #: the bubble of all ranks
    by_rank: Mapping[int, int]  #: bubble charged to each rank, in the JSON objects with ``rank`` and ``ns``
    by_stage: Mapping[int, int]  #: bubble charged to each stage, in the JSON objects with ``stage`` and ``ns``
    by_kind: Mapping[str, int]  #: bubble charged to each kind, in the JSON objects with ``kind`` and ``ns``
    ops: tuple[BlamedOp, ...]  #: the ten ops with the largest charges


class StepOutlier(Struct, frozen=True):
    """A step above the median of its level by three scaled median deviations and by a tenth: of its steps with as many
    forwards, or, where these are fewer than five, with no fewer.
    """

    step: int  #: number of the step
    span_ns: int  #: its length
    usual_step: int  #: number of the typical step of its level
    usual_ns: int  #: length of that
    #: causes that it has more of than the usual step, at their places, the most first; they sum to the difference of lengths;
    #: null where a step is not explained
    differences: tuple[Cause, ...] | None
    #: the op that most of its bubble beyond the usual step's is charged to; empty where none is
    ops: tuple[BlamedOp, ...]

    @property
    def excess_ns(self) -> int:
        return self.span_ns - self.usual_ns


class StepChange(Struct, frozen=True):
    """A step from which on the level is another: Pettitt's test at 0.5 %, and at least 3 %."""

    step: int  #: first step of the new level
    before_step: int  #: typical step of the old level
    before_ns: int  #: its length
    after_step: int  #: typical step of the new level
    after_ns: int  #: its length
    #: causes that the one level has more of than the other, as of an outlier; null where a step is not explained
    differences: tuple[Cause, ...] | None


class StepSeries(Struct, frozen=True):
    """Lengths of a run's training steps."""

    num_steps: int  #: training steps whose length is known
    min_ns: int  #: length of the shortest step
    p10_ns: int  #: 10th percentile, the length of a step, as all of these
    median_ns: int  #: median
    p90_ns: int  #: 90th percentile
    max_ns: int  #: length of the longest step
    #: outliers, the largest excess first; empty where there are none, and always with fewer than five steps
    outliers: tuple[StepOutlier, ...]
    #: changes of level, in order; empty where there are none, and always with fewer than ten steps
    changes: tuple[StepChange, ...]
    #: numbers of the steps with forwards alone, which train nothing and are left out; empty without such steps
    evaluations: tuple[int, ...] = ()
    #: ``period`` where the periods of seven steps or more are known, and of more than half, or of all of fewer: they are the
    #: lengths then, and the other steps left out; else ``span``
    measure: str = "period"


class WorkerSlowdown(Struct, frozen=True):
    """Slowdown of a worker: the smaller of those of its pipeline and of its pipeline rank on all replicas, each with all else
    at typical costs.
    """

    rank: int  #: global rank
    slowdown: float  #: T / T_ideal of it


class StageSlowdown(Struct, frozen=True):
    """Slowdown of a stage: T / T_ideal where this stage alone costs what was measured, and all else what is typical."""

    stage: int  #: virtual stage
    slowdown: float  #: T / T_ideal of it


class KindSlowdown(Struct, frozen=True):
    """Slowdown of a kind of work, likewise."""

    #: kind of op; ``RECV_F`` and ``RECV_B`` for messages by their readers; axis and kind of collectives (``dp reduce_scatter``);
    #: range (``OPTIMIZER``)
    kind: str
    slowdown: float  #: T / T_ideal of it


class Stragglers(Struct, frozen=True):
    """The what-if study of all whole steps (:mod:`pptrace.analysis.stragglers.slowdowns`)."""

    slowdown: float  #: T / T_ideal
    #: share of T − T_ideal that goes away where the slowest 3 % of workers (at least one) cost what is typical; null where the
    #: slowdown is below 1.03, too small to divide by (the study's limit)
    m_w: float | None
    #: the same of the last stage; of interleaved schedules, of the last stage of the model, not of the last rank; null as ``m_w``
    m_s: float | None
    workers: tuple[WorkerSlowdown, ...]  #: slowdown of each worker
    stages: tuple[StageSlowdown, ...]  #: slowdown of each stage
    op_kinds: tuple[KindSlowdown, ...]  #: slowdown of each kind of work
    #: steps that were replayed: all that have every op of their plan, or of large runs as many of them, evenly spaced, as take a
    #: few seconds
    num_steps: int
    #: ``step``: with what ranks do before and after their ops, or ``pipeline``: the ops and messages of the pipeline alone
    covers: str


class CoreWait(Struct, frozen=True):
    """Time for which the threads of a rank were ready to run and had no processor core, as Linux counts it."""

    rank: int  #: global rank
    #: part of the recorded time, all threads together: with several threads that wait it may be more than 1
    share: float


class RootCause(Struct, frozen=True):
    """Cause of several findings, whose ``evidence`` has its name as ``follows_from``."""

    name: str  #: ``shared device``, ``clocks`` or ``cores``
    ranks: tuple[int, ...]  #: ranks concerned; empty for all
    title: str  #: headline
    detail: str  #: effect of it
    advice: str  #: measure against it
    gain: str = ""  #: reason why it is not known what that saves; empty where the gains of the findings tell


class InDoubt(StrEnum):
    """Thing in doubt: how the clocks of ranks relate, or what ops take on a device that several ranks have."""

    CLOCK = "clock"
    DEVICE = "device"


class Doubt(Struct, frozen=True):
    """A doubt that all times hang on."""

    #: ``clock``: how the ranks' clocks relate is not known well enough for ops this short; ``device``: ranks share a GPU
    cause: InDoubt
    line: str  #: line of the ``warnings`` that tells of it


CLOCKS_OFF = "the clocks may be off by"
"""Beginning of the line that says by how much, and where that is much."""
