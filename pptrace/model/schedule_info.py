"""The plan that a run followed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Protocol

from msgspec import Struct, field

from pptrace.model.mesh import MeshInfo
from pptrace.schedule.plan import Plan


class PlanSource(StrEnum):
    METADATA = "metadata"
    RECOGNISED = "recognised"
    OPTION = "option"
    NONE = "none"


class Candidate(Struct, frozen=True):
    """A schedule that fits the ranks with a trace, where other ranks have none; ``pp_ranks``: pipeline rank by global rank."""

    name: str
    pp: int
    num_microbatches: int
    num_stages: int
    num_chunks: int
    pp_ranks: Mapping[int, int]


class ScheduleInfo(Struct, frozen=True):
    """The plan of a run: its name, its source, and where the run differs from it, a sentence each.

    ``plan_by_step``: plans of the steps with another number of microbatches (batch size ramp-up), by step: the same schedule,
    or None where it cannot be built. ``candidates``: all schedules that fit, where ranks without a trace leave several
    possible or had to be left out of the comparison. ``runs``: names of the schedules that most steps run one after another,
    where steps run several, as they do to accumulate gradients over calls of a schedule. ``has_phases``: whether the order of
    ops gives the phases of ops without one.
    """

    plan: Plan | None
    name: str
    source: PlanSource
    mismatches: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    plan_by_step: Mapping[int, Plan | None] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    runs: tuple[str, ...] = ()
    has_phases: bool = True

    def plan_of(self, step: int) -> Plan | None:
        """The plan of one step."""
        return self.plan_by_step.get(step, self.plan)

    def usual_num_microbatches(self, steps: Iterable[int]) -> int | None:
        """Number of microbatches in most of these steps, of as many the larger number; that of the plan where none has one."""
        plans = list(filter(None, map(self.plan_of, steps))) or list(filter(None, (self.plan,)))
        numbers = Counter(plan.num_microbatches for plan in plans)
        return max(numbers, key=lambda number: (numbers[number], number), default=None)


class WithPlan(Protocol):
    """A run whose plan and mesh are known, recognised or analysed."""

    @property
    def schedule(self) -> ScheduleInfo: ...
    @property
    def mesh(self) -> MeshInfo: ...
