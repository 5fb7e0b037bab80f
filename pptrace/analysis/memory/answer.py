"""The ``memory`` block of a report: for each rank its measured peak, microbatches in flight, and what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pptrace.analysis.memory.types import InFlight, MemoryReport, PredictedMemory, RankMemory, StageActivations
from pptrace.analysis.result import RankStep, StepReport
from pptrace.model.mesh import MeshInfo
from pptrace.model.predicted import MemoryParts, RankPrediction, predictions_of, why_unpredicted
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.schedule.plan import Plan
from pptrace.simulator import peak_inflight

if TYPE_CHECKING:
    from pptrace.analysis.questions import QuestionInputs


def answer(inputs: QuestionInputs) -> Mapping[str, Any]:
    """The memory of all ranks."""
    run, facts = inputs.run, inputs.run.facts
    predicted, unpredicted = predictions_of(facts, run.schedule), why_unpredicted(facts, run.schedule)
    return {"memory": report_memory(inputs.report.steps, run.mesh, run.schedule, predicted, unpredicted)}


def report_memory(
    steps: Sequence[StepReport],
    mesh: MeshInfo,
    schedule: ScheduleInfo,
    predicted: Mapping[int, RankPrediction],
    unpredicted: str,
) -> MemoryReport | None:
    """The memory of all ranks in steps; None without any.

    Args:
        predicted: the predictions of each rank.
        unpredicted: the reason why a run has none.
    """
    by_rank: dict[int, list[tuple[StepReport, RankStep]]] = {}
    for step in steps:
        for rank in step.ranks:
            by_rank.setdefault(rank.rank, []).append((step, rank))
    if not by_rank:
        return None
    peaks: dict[int, tuple[Plan, tuple[int, ...]]] = {}  # by the plan's identity: to compare plans takes long
    ranks = []
    for number, entries in sorted(by_rank.items()):
        step, rank = max(entries, key=lambda entry: -1 if (peak := entry[1].peak_memory_bytes) is None else peak)
        plan, pp_rank, in_flight = schedule.plan_of(step.step), mesh.pp_rank(number), None
        if plan is None or pp_rank is None or pp_rank >= plan.pp or plan.pp != mesh.pp:
            plan = None
        else:
            if id(plan) not in peaks:
                peaks[id(plan)] = plan, peak_inflight(plan)
            in_flight = peaks[id(plan)][1][pp_rank]
        measured = max((each.peak_in_flight for _, each in entries if each.peak_in_flight is not None), default=None)
        ranks.append(_rank_memory(step.step, rank, plan, InFlight(in_flight, measured), predicted.get(number)))
    return MemoryReport(tuple(ranks), _reasons(ranks, predicted, unpredicted))


def _rank_memory(
    step: int, rank: RankStep, plan: Plan | None, in_flight: InFlight, prediction: RankPrediction | None
) -> RankMemory:
    """The memory of a rank in the step with its highest peak."""
    if plan is not None and rank.pp_rank is not None:
        stages: tuple[int, ...] = tuple(plan.stages_of(rank.pp_rank))
    else:
        stages = () if rank.stage is None else (rank.stage,)
    is_known = rank.peak_memory_bytes is not None
    return RankMemory(
        rank=rank.rank,
        pp_rank=rank.pp_rank,
        stages=stages,
        step=step if is_known else None,
        peak_bytes=rank.peak_memory_bytes,
        kind=rank.peak_memory_kind,
        start_bytes=rank.start_memory_bytes,
        reserved_bytes=rank.peak_reserved_bytes,
        in_flight=in_flight,
        predicted=None if prediction is None else _predicted(prediction.memory),
    )


def _predicted(parts: MemoryParts) -> PredictedMemory:
    known = parts.weights + parts.gradients + parts.optimizer
    return PredictedMemory(
        parts.weights,
        parts.gradients,
        parts.optimizer,
        parts.activations,
        None if parts.activations is None else known + parts.activations,
        tuple(
            StageActivations(
                stage, num_bytes, *(parts.by_recompute.get(how, {}).get(stage) for how in ("none", "full"))
            )
            for stage, num_bytes in parts.of_stage.items()
        ),
    )


def _reasons(ranks: Sequence[RankMemory], predicted: Mapping[int, RankPrediction], unpredicted: str) -> tuple[str, ...]:
    """Reasons why figures are null, a sentence each."""
    reasons = []
    if any(rank.peak_bytes is None for rank in ranks):
        reasons.append(
            "peak_bytes: no memory events, and nothing measured the memory of steps; record with pptrace run"
        )
    if any(rank.predicted is None for rank in ranks):
        reasons.append(f"predicted: {unpredicted}")
    unknown = {predicted[rank.rank].memory.reason for rank in ranks if rank.rank in predicted} - {None}
    reasons += [f"activations_bytes and total_bytes: {reason}" for reason in sorted(map(str, unknown))]
    if any(rank.pp_rank is not None and rank.in_flight.planned is None for rank in ranks):
        reasons.append("in_flight.planned: there is no plan of all ranks of the pipeline")
    if any(rank.pp_rank is not None and rank.in_flight.measured is None for rank in ranks):
        reasons.append("in_flight.measured: steps have forwards without backwards, or the other way around")
    return tuple(reasons)
