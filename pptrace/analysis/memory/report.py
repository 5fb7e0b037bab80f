"""The ``memory`` block of a report: for each rank its measured peak, microbatches in flight, and what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pptrace.analysis.result import RankStep, StepReport
from pptrace.analysis.volume.memory import MemoryPrediction
from pptrace.analysis.volume.step import StepVolume
from pptrace.analysis.whole_run import InFlight, MemoryReport, PredictedMemory, RankMemory, StageActivations
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.schedule.plan import Plan
from pptrace.simulator import peak_inflight


def report_memory(
    steps: Sequence[StepReport],
    mesh: MeshInfo,
    schedule: ScheduleInfo,
    volume: StepVolume | None,
    facts: Mapping[int, Mapping[str, Any]],
) -> MemoryReport | None:
    """The memory of all ranks in steps; None without any.

    Args:
        volume: predicts the run, None where its sizes are not known.
        facts: what the recorder of each rank wrote.
    """
    by_rank: dict[int, list[tuple[StepReport, RankStep]]] = {}
    for step in steps:
        for rank in step.ranks:
            by_rank.setdefault(rank.rank, []).append((step, rank))
    if not by_rank:
        return None
    prediction = None if volume is None else _prediction(volume, facts)
    planned = _Planned(schedule, mesh)
    ranks = tuple(_rank_memory(number, entries, planned, prediction) for number, entries in sorted(by_rank.items()))
    return MemoryReport(ranks, _reasons(ranks, volume, prediction))


def _prediction(volume: StepVolume, facts: Mapping[int, Mapping[str, Any]]) -> MemoryPrediction:
    of_rank = next((known for known in facts.values() if isinstance(known.get("model"), Mapping)), {})
    on_device = str(of_rank.get("device") or "").startswith("cuda")
    return MemoryPrediction(volume, of_rank.get("model") or {}, on_device=on_device)


class _Planned:
    """Microbatches in flight by the plans of the steps."""

    def __init__(self, schedule: ScheduleInfo, mesh: MeshInfo) -> None:
        self._schedule = schedule
        self._mesh = mesh
        self._peaks = cache(lambda plan_id: peak_inflight(self._plans[plan_id]))
        self._plans: dict[int, Plan] = {}

    def of(self, rank: int, step: int) -> tuple[Plan | None, int | None]:
        """(plan, planned peak) of a rank in a step; None where unknown."""
        plan, pp_rank = self._schedule.plan_of(step), self._mesh.pp_rank(rank)
        if plan is None or pp_rank is None or pp_rank >= plan.pp or plan.pp != self._mesh.pp:
            return None, None
        self._plans[id(plan)] = plan
        return plan, self._peaks(id(plan))[pp_rank]


def _rank_memory(
    number: int,
    entries: Sequence[tuple[StepReport, RankStep]],
    planned: _Planned,
    prediction: MemoryPrediction | None,
) -> RankMemory:
    step, rank = max(
        entries, key=lambda entry: -1 if entry[1].peak_memory_bytes is None else entry[1].peak_memory_bytes
    )
    plan, planned_in_flight = planned.of(number, step.step)
    measured = [entry.peak_in_flight for _, entry in entries if entry.peak_in_flight is not None]
    if plan is not None and rank.pp_rank is not None:
        stages: tuple[int, ...] = tuple(plan.stages_of(rank.pp_rank))
    else:
        stages = () if rank.stage is None else (rank.stage,)
    is_known = rank.peak_memory_bytes is not None
    return RankMemory(
        rank=number,
        pp_rank=rank.pp_rank,
        stages=stages,
        step=step.step if is_known else None,
        peak_bytes=rank.peak_memory_bytes,
        kind=rank.peak_memory_kind,
        start_bytes=rank.start_memory_bytes,
        reserved_bytes=rank.peak_reserved_bytes,
        in_flight=InFlight(planned_in_flight, max(measured, default=None)),
        predicted=_predicted(number, prediction),
    )


def _predicted(number: int, prediction: MemoryPrediction | None) -> PredictedMemory | None:
    parts = None if prediction is None else prediction.of_rank(number)
    if parts is None:
        return None
    known = parts.weights + parts.gradients + parts.optimizer
    return PredictedMemory(
        parts.weights,
        parts.gradients,
        parts.optimizer,
        parts.activations,
        None if parts.activations is None else known + parts.activations,
        tuple(StageActivations(stage, num_bytes) for stage, num_bytes in parts.activations_of_stage.items()),
    )


def _reasons(
    ranks: Sequence[RankMemory], volume: StepVolume | None, prediction: MemoryPrediction | None
) -> tuple[str, ...]:
    """Reasons why figures are null, a sentence each."""
    reasons = []
    if any(rank.peak_bytes is None for rank in ranks):
        reasons.append(
            "peak_bytes: no memory events, and nothing measured the memory of steps; record with pptrace run"
        )
    if volume is None:
        reasons.append("predicted: the sizes and options of the model are not among the facts of these traces")
    elif prediction is not None and prediction.reason is not None:
        reasons.append(f"activations_bytes and total_bytes: {prediction.reason}")
    elif any(rank.predicted is not None and rank.predicted.activations_bytes is None for rank in ranks):
        reasons.append("activations_bytes and total_bytes: what experts keep depends on routes that were not counted")
    if any(rank.pp_rank is not None and rank.in_flight.planned is None for rank in ranks):
        reasons.append("in_flight.planned: there is no plan of all ranks of the pipeline")
    if any(rank.pp_rank is not None and rank.in_flight.measured is None for rank in ranks):
        reasons.append("in_flight.measured: steps have forwards without backwards, or the other way around")
    return tuple(reasons)
