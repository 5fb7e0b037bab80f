"""Slowdowns of ByteDance's what-if study ("Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI'25).

A step is replayed with what every op, message and collective cost, and with what its kind typically costs (:mod:`~.typical`); T
is the mean length of the steps. ``slowdown`` is T / T_ideal. That of a stage or of a kind is T / T_ideal where it alone costs
what it did; that of a worker is the smaller of those of its pipeline and of its pipeline rank: as many replays do as there
are pipelines and pipeline ranks (the study's approximation, with a pipeline for the ranks of one dp rank). ``m_w`` and ``m_s``
are the shares of T − T_ideal that go away where the slowest 3 % of workers, or the last stage, cost what is typical.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.stragglers.replays import Replays, replays_of
from pptrace.analysis.whole_run import KindSlowdown, StageSlowdown, Stragglers, WorkerSlowdown

LEAST_SLOWDOWN = 1.03
"""Least slowdown of which shares are given, as in the study (its ``decompose_threshold``)."""
SLOWEST_PERCENT = 3


def slowdowns(plans: Sequence[StepMatrix]) -> Stragglers | None:
    """The slowdowns in some steps, of at least one plan; None where they took no time."""
    replays, table = replays_of(plans), plans[0].table
    ideal, measured = (sum(getattr(of_plan, name)() for of_plan in replays) for name in ("ideal", "measured"))
    if not ideal:
        return None
    of_stages = zip(*(of_plan.with_each_stage(table.num_stages) for of_plan in replays), strict=True)
    stages = [sum(times) / ideal for times in of_stages]
    with_kinds = [of_plan.with_each_kind() for of_plan in replays]
    kinds = {kind: sum(of_plan[kind] for of_plan in with_kinds) / ideal for kind in replays[0].typical.kinds}
    workers = _workers(replays, ideal)
    m_w = m_s = None
    if measured >= LEAST_SLOWDOWN * ideal:
        by_slowdown = sorted(workers, key=lambda rank: (-workers[rank], rank))
        slowest = np.array(by_slowdown[: -(-len(workers) * SLOWEST_PERCENT // 100)], dtype=np.int64)
        m_w = (measured - sum(of_plan.without_ranks(slowest) for of_plan in replays)) / (measured - ideal)
        m_s = (measured - sum(of_plan.without_last_stage() for of_plan in replays)) / (measured - ideal)
    return Stragglers(
        measured / ideal,
        m_w,
        m_s,
        tuple(WorkerSlowdown(rank, workers[rank]) for rank in sorted(workers)),
        tuple(StageSlowdown(stage, slowdown) for stage, slowdown in enumerate(stages)),
        tuple(KindSlowdown(kind, slowdown) for kind, slowdown in kinds.items()),
        sum(of_plan.num_steps for of_plan in replays),
        "step" if replays[0].has_outside else "pipeline",
    )


def _workers(replays: Sequence[Replays], ideal: int) -> dict[int, float]:
    """The slowdown of each worker by its rank; in the steps of a plan that it is not in it changes nothing."""
    pp = replays[0].costs.table.pp
    by_pp_rank = [sum(times) for times in zip(*(of_plan.with_each_pp_rank(pp) for of_plan in replays), strict=True)]
    of_plans = [of_plan.with_pipelines() for of_plan in replays]
    return {
        rank: min(sum(beyond.get(pipeline, 0) for beyond in of_plans) + ideal, by_pp_rank[pp_rank]) / ideal
        for pipeline in dict.fromkeys(pipeline for of_plan in of_plans for pipeline in of_plan)
        for pp_rank, rank in enumerate(pipeline)
    }
