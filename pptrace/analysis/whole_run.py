"""Figures of a run over all its steps, as types; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pptrace.analysis.step_parts import BlamedOp, Cause


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
