"""Every point of a sweep, simulated: points of one plan are replayed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pptrace.errors import ShapeError
from pptrace.schedule import registry
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay_table import Times, replay_table
from pptrace.schedule.shape import OpCosts
from pptrace.simulator.costs import Costs
from pptrace.simulator.simulation import peak_inflight
from pptrace.simulator.sweep.grid import CostsOf, Grid, SweepCosts, SweepPoint


@dataclass(frozen=True, slots=True)
class SweptStep:
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


@dataclass(frozen=True, slots=True)
class SweptPoint:
    """A point with its step, or the reason why the schedule has none of this size."""

    point: SweepPoint
    step: SweptStep | None
    refused: str = ""

    @property
    def num_chunks(self) -> int:
        """Value that was asked for, else the schedule's default."""
        wanted = self.point.num_chunks
        return registry.get(self.point.schedule).default_chunks if wanted is None else wanted


@dataclass(frozen=True, slots=True)
class Sweep:
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
    for name in grid.schedules:
        registry.get(name)
    swept: list[SweptPoint] = []
    for points in grid.plans():
        swept += _of_one_size(points, grid)
        if on_points is not None:
            on_points(len(swept))
    return Sweep(grid, tuple(swept))


def _of_one_size(points: Sequence[SweepPoint], grid: Grid) -> list[SweptPoint]:
    if registry.get(points[0].schedule).searches:  # its plan depends on the costs
        return [swept for point in points for swept in _of_one_plan([point], grid)]
    return _of_one_plan(points, grid)


def _of_one_plan(points: Sequence[SweepPoint], grid: Grid) -> list[SweptPoint]:
    try:
        plan = _plan(points[0], grid)
    except ShapeError as err:
        return [SweptPoint(point, None, str(err)) for point in points]
    steps = _steps(plan, grid.costs_of.num_parts(plan), [point.costs for point in points])
    return [SweptPoint(point, step) for point, step in zip(points, steps, strict=True)]


def _plan(point: SweepPoint, grid: Grid) -> Plan:
    entry = registry.get(point.schedule)
    costs = _op_costs(point, grid.costs_of) if entry.searches else None
    limit = grid.memory_limit if entry.searches else None
    return registry.build(
        point.schedule, point.pp, point.num_microbatches, point.num_chunks, point.group_size, False, limit, costs
    )


def _op_costs(point: SweepPoint, costs_of: CostsOf) -> OpCosts:
    """Costs for a schedule that is searched; such schedules have one stage per rank."""
    costs = point.costs.in_parts(point.pp if costs_of is CostsOf.MODEL else 1)
    return OpCosts(costs.kinds[Kind.F], costs.kinds[Kind.I], costs.kinds[Kind.W], costs.p2p_latency_ns)


def _steps(plan: Plan, num_parts: int, costs: Sequence[SweepCosts]) -> list[SweptStep]:
    """The steps of one plan with each of the costs; all times until the end are in 1/``num_parts`` ns."""
    in_parts = [of_point.in_parts(num_parts) for of_point in costs]
    durations = np.stack([of_point.durations(plan) for of_point in in_parts])
    replays = replay_table(plan.table, durations, _latencies(plan, in_parts))
    makespans = replays.end.max(axis=1)
    compute = np.add.reduceat(durations, plan.table.rank_ptr[:-1], axis=1)
    first, last = replays.start[:, plan.table.rank_ptr[:-1]], replays.end[:, plan.table.rank_ptr[1:] - 1]
    inner = ((last - first - compute) / compute).max(axis=1)
    held = max(peak_inflight(plan))
    return [
        _step(plan, num_parts, makespan, of_ranks, waits, held)
        for makespan, of_ranks, waits in zip(
            makespans.tolist(), compute.sum(axis=1).tolist(), inner.tolist(), strict=True
        )
    ]


def _latencies(plan: Plan, costs: Sequence[Costs]) -> Times:
    of_points = np.array([of_point.p2p_latency_ns for of_point in costs])
    return np.broadcast_to(of_points[:, np.newaxis], (len(costs), plan.table.num_messages))


def _step(plan: Plan, num_parts: int, makespan: int, compute: int, inner_ratio: float, held: int) -> SweptStep:
    whole = plan.pp * makespan
    return SweptStep(
        num_chunks=plan.num_chunks,
        makespan_ns=makespan / num_parts,
        bubble_ratio=(whole - compute) / compute,
        bubble_share=(whole - compute) / whole,
        inner_bubble_ratio=inner_ratio,
        throughput_per_rank=compute / whole,
        throughput=compute / makespan,
        microbatches_per_s=plan.num_microbatches * num_parts / makespan * 1e9,
        peak_inflight=held,
        peak_activations=held * plan.pp / plan.chain_length,
    )
