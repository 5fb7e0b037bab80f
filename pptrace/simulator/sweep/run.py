"""The grid of a sweep, every combination of schedules, sizes and costs; and its points, simulated: those of one plan are replayed
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import product

import numpy as np
from msgspec import Struct

from pptrace.errors import ShapeError, UsageError
from pptrace.schedule import registry
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay_table import replay_table
from pptrace.simulator.simulation import Costs, peak_inflight, uniform
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


class SweptStep(Struct, frozen=True):
    """A step of one point. Throughputs are relative to one rank that never waits; ``peak_inflight`` counts activations of one
    chunk and one microbatch, ``peak_activations`` those of one microbatch in 1/p of the model.
    """

    num_chunks: int
    makespan_ns: float
    bubble_ratio: float
    bubble_share: float
    inner_bubble_ratio: float
    """The bubble between the first and last action of the rank that waits most, over its compute."""
    throughput_per_rank: float
    throughput: float
    microbatches_per_s: float
    peak_inflight: int
    peak_activations: float


class SweptPoint(Struct, frozen=True):
    """A point with its step, or the reason why the schedule has none of this size."""

    point: SweepPoint
    step: SweptStep | None
    refused: str = ""

    @property
    def num_chunks(self) -> int:
        """Value that was asked for, else the schedule's default."""
        wanted = self.point.num_chunks
        return registry.get(self.point.schedule).default_chunks if wanted is None else wanted


class Sweep(Struct, frozen=True):
    """A whole sweep, in the order of its axes."""

    grid: Grid
    points: tuple[SweptPoint, ...]

    @property
    def simulated(self) -> tuple[SweptPoint, ...]:
        return tuple(point for point in self.points if point.step is not None)

    @property
    def refused(self) -> tuple[SweptPoint, ...]:
        return tuple(point for point in self.points if point.step is None)


OnPoints = Callable[[int], None]
"""Called with the number of points that are done."""


def run_sweep(grid: Grid, on_points: OnPoints | None = None) -> Sweep:
    """Simulate all points of a grid.

    Raises:
        UnknownScheduleError: no schedule has one of the names.
    """
    swept: list[SweptPoint] = []
    for points in sweep_plans(grid):
        swept += points
        if on_points is not None:
            on_points(len(swept))
    return Sweep(grid, tuple(swept))


def sweep_plans(grid: Grid) -> Iterator[list[SweptPoint]]:
    """The points of a grid in their order, those that differ in costs alone together, each simulated when it is asked for."""
    for points in grid.plans():
        searches = registry.get(points[0].schedule).searches  # then its plan depends on the costs
        of_plans = ([point] for point in points) if searches else (points,)
        yield [swept for of_one_plan in of_plans for swept in _of_one_plan(of_one_plan, grid, searches)]


def _of_one_plan(points: Sequence[SweepPoint], grid: Grid, searches: bool) -> list[SweptPoint]:
    point, of_ops, limit = points[0], None, None
    if searches:  # such schedules have one stage per rank
        of_ops = point.costs.in_parts(point.pp if grid.costs_of is CostsOf.MODEL else 1).of_search
        limit = grid.memory_limit
    sizes = (point.pp, point.num_microbatches, point.num_chunks, point.group_size)
    try:
        plan = registry.build(point.schedule, *sizes, False, limit, of_ops)
    except ShapeError as err:
        return [SweptPoint(one, None, str(err)) for one in points]
    steps = _steps(plan, grid.costs_of.num_parts(plan), [one.costs for one in points])
    return [SweptPoint(one, step) for one, step in zip(points, steps, strict=True)]


def _steps(plan: Plan, num_parts: int, costs: Sequence[SweepCosts]) -> Iterator[SweptStep]:
    """The steps of one plan with each of the costs; all times until the end are in 1/``num_parts`` ns."""
    in_parts = [of_point.in_parts(num_parts) for of_point in costs]
    durations = np.stack([of_point.durations(plan) for of_point in in_parts])
    latencies = np.array([of_point.p2p_latency_ns for of_point in in_parts])[:, np.newaxis]
    replays = replay_table(plan.table, durations, np.broadcast_to(latencies, (len(costs), plan.table.num_messages)))
    of_ranks = np.add.reduceat(durations, plan.table.rank_ptr[:-1], axis=1)
    first, last = replays.start[:, plan.table.rank_ptr[:-1]], replays.end[:, plan.table.rank_ptr[1:] - 1]
    inner_ratios = ((last - first - of_ranks) / of_ranks).max(axis=1)
    peak = max(peak_inflight(plan))
    columns = (replays.end.max(axis=1), of_ranks.sum(axis=1), inner_ratios)
    for makespan, compute, inner_ratio in zip(*(column.tolist() for column in columns), strict=True):
        whole = plan.pp * makespan
        yield SweptStep(
            num_chunks=plan.num_chunks,
            makespan_ns=makespan / num_parts,
            bubble_ratio=(whole - compute) / compute,
            bubble_share=(whole - compute) / whole,
            inner_bubble_ratio=inner_ratio,
            throughput_per_rank=compute / whole,
            throughput=compute / makespan,
            microbatches_per_s=plan.num_microbatches * num_parts / makespan * 1e9,
            peak_inflight=peak,
            peak_activations=peak * plan.pp / plan.chain_length,
        )
