"""The comparison of two runs as types; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")


class ChangeVerdict(StrEnum):
    SLOWER = "slower"
    FASTER = "faster"
    NO_DIFFERENCE = "no difference"


class SpanChange(Struct, frozen=True):
    """The typical (median) step of both runs, ns. ``change`` is b / a − 1, ``low`` to ``high`` its 95 % interval.

    The interval is None with too few steps, ``change`` too where a step of A takes no time. ``is_undisturbed``: the steps are not
    the typical ones, but those without what disturbed them, because ranks waited for cores.
    """

    a_ns: int
    b_ns: int
    change: float | None
    low: float | None
    high: float | None
    is_undisturbed: bool = False


class MeanChange(Struct, frozen=True):
    """The mean step of both runs, ns, which counts for throughput; its change as in :class:`SpanChange`.

    ``is_otherwise``: it changes otherwise than the typical step, by more than chance.
    """

    a_ns: int
    b_ns: int
    change: float | None
    low: float | None
    high: float | None
    is_otherwise: bool = False


class PartChange(Struct, frozen=True):
    """A part of the typical step in both runs, the median over steps, ns; ``where`` names a stage, kind, phase, axis or reason.

    ``significant``: it differs by more than chance, the number of parts allowed for; None with too few steps to tell,
    or where what was recorded differs. Parts that ``adds_up`` sum to the typical step, as means over the half of the steps in
    the middle by length: there are such where a run has no pipeline.
    """

    name: str
    where: Mapping[str, int | str]
    a_ns: int
    b_ns: int
    change_ns: int
    significant: bool | None
    adds_up: bool = False


REMAINDER = "remainder"
"""The part that others leave of the step, or have too much."""


class Work(Struct, frozen=True):
    """The work of a step of both runs: ``is_same``, so that the shorter one is the faster, None where nothing tells, and in
    ``detail`` by what that is known.
    """

    is_same: bool | None
    detail: str = ""


class FactChange(Struct, frozen=True):
    """A fact in which the runs differ, as text; None where a run does not tell it."""

    name: str
    a: str | None
    b: str | None


class OfBoth(Struct, Generic[T], frozen=True):
    """A figure of A and of B."""

    a: T
    b: T


class RecordingOfSide(Struct, frozen=True):
    """The recording of a side. ``figures``: whether its steps are those without the recording, ``unrecorded``, or ``recorded``.

    ``source`` says where the length of its unrecorded step comes from, ``measured`` or ``predicted``, None of a recorded one.
    ``recorded_ns`` is the typical step while recorded, None where it is not known; ``settings`` what was recorded, "" of tables.
    """

    figures: str = "recorded"
    source: str | None = None
    recorded_ns: int | None = None
    settings: str = ""


class Recordings(Struct, frozen=True):
    """The recordings of both sides. ``deviation`` is by how much the change of the step may be off for what is not known of their
    cost, a standard deviation as a share of the step; the interval of the change has it.
    """

    a: RecordingOfSide = RecordingOfSide()
    b: RecordingOfSide = RecordingOfSide()
    deviation: float = 0.0


class Comparison(Struct, frozen=True):
    """``verdict`` says what steps of B are against those of A, which is faster or slower where their ``work`` is the same;
    ``detail`` says both in a sentence. ``parts`` are largest change first.

    ``num_steps`` are the whole steps that are compared, ``run_to_run`` is the standard deviation of the typical step from one run
    of a side to another, as a share of it; None with one run, or with too few steps.
    ``trend`` is the change of the typical step from one run to the next in time, as a share of A's, that was taken out of both
    sides; None where none was. ``mean`` is None where the time from step to step is not known.
    """

    verdict: ChangeVerdict
    detail: str
    span: SpanChange
    num_steps: OfBoth[int]
    parts: tuple[PartChange, ...]
    facts: tuple[FactChange, ...]
    warnings: tuple[str, ...]
    num_runs: OfBoth[int] = OfBoth(1, 1)
    run_to_run: OfBoth[float | None] = OfBoth(None, None)
    trend: float | None = None
    recording: Recordings = Recordings()
    mean: MeanChange | None = None
    work: Work = Work(None)

    def __repr__(self) -> str:
        """The verdict in a sentence, without the parts."""
        return f"<Comparison: {self.detail}>"

    @property
    def has_several_runs(self) -> bool:
        """Return whether there are several runs of A or of B, which show how much runs differ."""
        return self.num_runs.a + self.num_runs.b > 2
