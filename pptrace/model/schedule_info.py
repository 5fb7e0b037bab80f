"""Which plan a run followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pptrace.schedule.plan import Plan


class PlanSource(StrEnum):
    METADATA = "metadata"
    RECOGNISED = "recognised"
    OPTION = "option"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule that the ranks with a trace may have run, where others have none; ``places`` are their pipeline ranks."""

    name: str
    pp: int
    num_microbatches: int
    num_stages: int
    num_chunks: int
    places: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """The plan of a run: its name, where it came from, and each place where the run differs from it, in words.

    ``others`` are the plans of steps with another number of microbatches, as while the batch grows: the same schedule with so
    many; None where there is none. ``candidates`` are all schedules that may have run, where ranks without a trace leave that
    open or had to be left out of the comparison; ``has_phases``: whether order tells the phases of ops that have none.
    """

    plan: Plan | None
    name: str
    source: PlanSource
    mismatches: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    others: Mapping[int, Plan | None] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    has_phases: bool = True

    def plan_of(self, step: int) -> Plan | None:
        """The plan of one step."""
        return self.others.get(step, self.plan)
