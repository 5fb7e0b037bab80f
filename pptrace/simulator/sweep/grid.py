"""The grid of a sweep: every combination of schedules, sizes and costs."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import product

from msgspec import Struct

from pptrace.errors import UsageError
from pptrace.schedule.plan import Plan
from pptrace.simulator.simulation import Costs, uniform
from pptrace.simulator.sweep.values import Microbatches

MOST_POINTS = 100_000


class CostsOf(StrEnum):
    """Unit that the costs of a sweep are of."""

    RANK = "rank"  # all layers of a rank: a chunk of v costs 1/v
    MODEL = "model"  # all layers of the model: a stage of p · v costs 1/(p · v)
    ACTION = "action"  # one action, however many stages there are

    def num_parts(self, plan: Plan) -> int:
        """The number of equal parts into which a cost is divided, of which an action costs one."""
        if self is CostsOf.MODEL:
            return plan.chain_length
        return plan.chain_length // plan.pp if self is CostsOf.RANK else 1


class SweepCosts(Struct, frozen=True):
    """Costs of one microbatch, ns: F, full B, W as a part of B, and one message."""

    forward_ns: int
    backward_ns: int
    wgrad_ns: int
    p2p_ns: int = 0

    def in_parts(self, num_parts: int) -> Costs:
        """Costs of one of equal parts, in units of 1/``num_parts`` ns, so that nothing is rounded; a message is not divided."""
        return uniform(self.forward_ns, self.backward_ns, self.wgrad_ns, self.p2p_ns * num_parts)


class SweepPoint(Struct, frozen=True):
    """One combination; None is the schedule's default."""

    schedule: str
    pp: int
    microbatches: Microbatches
    num_chunks: int | None
    group_size: int | None
    costs: SweepCosts

    @property
    def num_microbatches(self) -> int:
        return self.microbatches.of(self.pp)


class Grid(Struct, frozen=True):
    """The values of each axis. ``num_chunks`` and ``group_sizes`` of None are the schedule's default."""

    schedules: tuple[str, ...]
    pp: tuple[int, ...]
    microbatches: tuple[Microbatches, ...]
    num_chunks: tuple[int | None, ...]
    group_sizes: tuple[int | None, ...]
    costs: tuple[SweepCosts, ...]
    costs_of: CostsOf = CostsOf.RANK
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        if self.num_points > MOST_POINTS:
            raise UsageError(
                f"the sweep has {self.num_points:,} combinations; expected at most {MOST_POINTS:,}: give fewer values"
            )

    @property
    def num_points(self) -> int:
        num = len(self.schedules) * len(self.pp) * len(self.microbatches)
        return num * len(self.num_chunks) * len(self.group_sizes) * len(self.costs)

    def plans(self) -> Iterator[tuple[SweepPoint, ...]]:
        """The points, those that differ in costs alone together: they have one plan."""
        axes = product(self.schedules, self.pp, self.num_chunks, self.group_sizes, self.microbatches)
        for schedule, pp, chunks, group_size, microbatches in axes:
            yield tuple(SweepPoint(schedule, pp, microbatches, chunks, group_size, costs) for costs in self.costs)
