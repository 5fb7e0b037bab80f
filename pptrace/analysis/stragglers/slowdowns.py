"""Slowdowns of ByteDance's what-if study ("Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI'25).

A step is replayed with what every op and message cost, and with what its kind typically costs (:mod:`~.typical`); T is the mean
over steps of what the slowest pipeline takes. ``slowdown`` is T / T_ideal. That of a stage or of a kind is T / T_ideal where it
alone costs what it did; that of a worker is the smaller of those of its pipeline and of its place in it, so that as few replays
do as a pipeline has ranks (the study's approximation, with a pipeline for the ranks of one dp rank). ``m_w`` and ``m_s`` are the
shares of T − T_ideal that go away where the slowest 3 % of workers, or the last stage, cost what is typical.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pptrace.analysis.result import KindSlowdown, StageSlowdown, Stragglers, WorkerSlowdown
from pptrace.analysis.stragglers.costs import Bool, MeasuredCosts, longest_of_steps
from pptrace.analysis.stragglers.typical import IdealCosts, Typical
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import PlanTable
from pptrace.simulator import makespans
from pptrace.slices import group_sums

LEAST_SLOWDOWN = 1.03
"""Of a smaller slowdown no shares are given, as in the study (its ``decompose_threshold``)."""
SLOWEST_PERCENT = 3


def slowdowns(plans: Sequence[MeasuredCosts]) -> Stragglers | None:
    """The slowdowns in some steps, of at least one plan; None where they took no time."""
    typical = Typical.of(plans)
    replays = [_Replays(costs, typical.costs(costs)) for costs in plans]
    lengths = _total([of_plan.lengths(typical.codes) for of_plan in replays])
    if not lengths.ideal:
        return None
    workers, slowdown = _workers(lengths), lengths.measured / lengths.ideal
    m_w = m_s = None
    if slowdown >= LEAST_SLOWDOWN:
        by_slowdown = sorted(workers, key=lambda worker: (-worker.slowdown, worker.rank))
        slowest = np.array([worker.rank for worker in by_slowdown[: -(-len(workers) * SLOWEST_PERCENT // 100)]])
        lost = lengths.measured - lengths.ideal
        m_w = (lengths.measured - sum(of_plan.without_workers(slowest) for of_plan in replays)) / lost
        m_s = (lengths.measured - sum(of_plan.without_last_stage() for of_plan in replays)) / lost
    names = [str(kind) for kind in Kind]
    return Stragglers(
        slowdown,
        m_w,
        m_s,
        workers,
        tuple(StageSlowdown(stage, ns / lengths.ideal) for stage, ns in sorted(lengths.stages.items())),
        tuple(KindSlowdown(names[code], ns / lengths.ideal) for code, ns in sorted(lengths.kinds.items())),
        lengths.num_steps,
    )


def _workers(lengths: _Lengths) -> tuple[WorkerSlowdown, ...]:
    """The slowdown of each worker, in the order of the ranks."""
    slowdowns_of = {
        rank: min(ns, lengths.places[place]) / lengths.ideal
        for pipeline, ns in lengths.pipelines.items()
        for place, rank in enumerate(pipeline)
    }
    return tuple(WorkerSlowdown(rank, slowdown) for rank, slowdown in sorted(slowdowns_of.items()))


@dataclass(frozen=True, slots=True)
class _Lengths:
    """What ``num_steps`` steps take together, ns: as measured, with typical costs, and with typical costs but for one key.

    ``places`` are pipeline ranks, ``kinds`` codes, and ``pipelines`` the global ranks of each.
    """

    num_steps: int
    measured: int
    ideal: int
    stages: Mapping[int, int]
    places: Mapping[int, int]
    kinds: Mapping[int, int]
    pipelines: Mapping[tuple[int, ...], int]


def _total(plans: Sequence[_Lengths]) -> _Lengths:
    """What the steps of all plans take together; a key that a plan lacks changes nothing about its steps."""
    stages, places, kinds, pipelines = (
        {
            key: sum(getattr(part, name).get(key, part.ideal) for part in plans)
            for key in dict.fromkeys(key for part in plans for key in getattr(part, name))
        }
        for name in ("stages", "places", "kinds", "pipelines")
    )
    num_steps, measured, ideal = (
        sum(getattr(part, name) for part in plans) for name in ("num_steps", "measured", "ideal")
    )
    return _Lengths(num_steps, measured, ideal, stages, places, kinds, pipelines)


@dataclass(frozen=True, slots=True, eq=False)
class _Replays:
    """Replays of one plan's steps where some rows and messages cost what was measured, and the others what is typical.

    A replay of a step is as long as that of its slowest pipeline.
    """

    costs: MeasuredCosts
    ideal: IdealCosts

    def lengths(self, codes: Iterable[int]) -> _Lengths:
        """What all steps take together in each scenario, ns."""
        costs, table = self.costs, self.costs.table
        spans = self._spans(np.ones(len(table), np.bool_), np.ones(table.num_messages, np.bool_))
        ideal, steps = self.ideal.makespan(), np.unique(costs.step)
        beyond = np.maximum(spans - ideal, 0)
        pipelines, of_window = np.unique(costs.ranks, axis=0, return_inverse=True)
        (of_pipeline,) = group_sums(beyond[np.newaxis], of_window.ravel(), len(pipelines)) + ideal * len(steps)
        stages = {stage: self._length(table.stage == stage) for stage in range(table.num_stages)}
        stage_of = _only_stages(table)
        return _Lengths(
            num_steps=len(steps),
            measured=int(longest_of_steps(costs.step, spans).sum()),
            ideal=ideal * len(steps),
            stages=stages,
            places={
                place: stages[stage_of[place]] if stage_of else self._length(table.rank == place)
                for place in range(table.pp)
            },
            kinds={code: self._length(table.kind == code, costs.message_kind == code) for code in codes},
            pipelines={
                tuple(ranks): int(ns) for ranks, ns in zip(pipelines.tolist(), of_pipeline.tolist(), strict=True)
            },
        )

    def without_workers(self, ranks: Int64) -> int:
        """What all steps take together where some global ranks cost what is typical, ns."""
        return self._length(~np.isin(self.costs.ranks, ranks)[:, self.costs.table.rank])

    def without_last_stage(self) -> int:
        """What all steps take together where the last stage costs what is typical, ns."""
        return self._length(self.costs.table.stage != self.costs.table.num_stages - 1)

    def _length(self, rows: Bool, messages: Bool | None = None) -> int:
        """What all steps take together where some rows and messages, if not told those that the rows read, are measured, ns."""
        if messages is None:
            messages = rows[..., self.costs.reader]
        return int(longest_of_steps(self.costs.step, self._spans(rows, messages)).sum())

    def _spans(self, rows: Bool, messages: Bool) -> Int64:
        """The length of each window where some rows and messages cost what was measured, ns."""
        costs, ideal = self.costs, self.ideal
        spans = np.empty(len(costs.step), dtype=np.int64)
        for part in costs.parts():
            of_rows, of_messages = (mask if mask.ndim == 1 else mask[part] for mask in (rows, messages))
            of_messages = of_messages & (costs.transfers[part] >= 0)
            spans[part] = makespans(
                costs.table,
                np.where(of_rows, costs.durations[part], ideal.durations),
                np.where(of_messages, costs.transfers[part], ideal.transfers),
            )
        return spans


def _only_stages(table: PlanTable) -> list[int]:
    """The stage of each pipeline rank; [] where one has several."""
    stages = [np.unique(table.stage[table.rank == place]).tolist() for place in range(table.pp)]
    is_one_each = table.num_stages == table.pp and all(len(of_place) == 1 for of_place in stages)
    return [of_place[0] for of_place in stages] if is_one_each else []
