"""Predictions that a run wrote of itself: bytes that each rank sends in a step, and the memory that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pptrace.model.gpt_sizes import GptSizes, read_gpt_sizes
from pptrace.model.schedule_info import PlanSource, ScheduleInfo

PREDICTED = "predicted"
"""The key of a rank's facts that holds its predictions (:mod:`pptrace.sizes.predicted`)."""

Bytes = Mapping[tuple[str, str], int | None]
"""(axis, kind of call) → bytes in a step, None where they are not known. What is not among them is not sent."""


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes of one rank; ``of_stage``: what one microbatch keeps, by stage of the plan, and ``by_recompute`` the same if no layer
    recomputed (none), or all (full).

    ``activations`` are the most along the plan, None where they are not known: ``reason`` says why.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int | None
    of_stage: Mapping[int, int]
    reason: str | None
    by_recompute: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankPrediction:
    """The predictions of one rank; ``communication`` has bytes for ranges of equal steps."""

    communication: tuple[tuple[range, Bytes], ...]
    memory: MemoryParts

    def of_step(self, step: int) -> Bytes | None:
        """The bytes that the rank sends in a step; None of a step of which nothing is predicted."""
        return next((num_bytes for steps, num_bytes in self.communication if step in steps), None)


def predictions_of(facts: Mapping[int, Mapping[str, Any]], schedule: ScheduleInfo) -> dict[int, RankPrediction]:
    """The predictions of the ranks that wrote some down; none of a run that did not follow the plan that they are of."""
    if not _is_of_recorded_plan(schedule):
        return {}
    read = {rank: read_prediction(of_rank.get(PREDICTED)) for rank, of_rank in facts.items()}
    return {rank: prediction for rank, prediction in read.items() if prediction is not None}


def why_unpredicted(facts: Mapping[int, Mapping[str, Any]], schedule: ScheduleInfo) -> str:
    """The reason why ranks of a run have no predictions."""
    if not any(read_gpt_sizes(of_rank.get("model")) for of_rank in facts.values()):
        return "the sizes and options of the model are not among the facts of these traces"
    if not _is_of_recorded_plan(schedule):
        return "the ops in these traces do not follow the plan that was recorded"
    return "the recorder of these traces wrote down none; record the run anew with this version of pptrace"


def gpt_of_run(facts: Iterable[Mapping[str, Any]], schedule: ScheduleInfo) -> GptSizes | None:
    """The sizes of our GPT in a run of the plan that was recorded; None of other runs, and where they are not known."""
    sizes = next((read for of_rank in facts if (read := read_gpt_sizes(of_rank.get("model"))) is not None), None)
    if sizes is None or schedule.plan is None or not _is_of_recorded_plan(schedule):
        return None
    return sizes if schedule.plan.chain_length == len(sizes.layers_per_stage) else None


def _is_of_recorded_plan(schedule: ScheduleInfo) -> bool:
    return schedule.plan is not None and schedule.source is PlanSource.METADATA and not schedule.mismatches


def read_prediction(fact: object) -> RankPrediction | None:
    """The predictions of a rank; None where it has none, or what stands there is damaged."""
    if not isinstance(fact, Mapping):
        return None
    try:
        communication = tuple(_read_steps(part) for part in fact["communication"])
        return RankPrediction(communication, _read_memory(fact["memory"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _read_steps(part: Any) -> tuple[range, Bytes]:
    first, stop = part["steps"]
    of_kinds = {
        (axis, kind): None if num_bytes is None else _count(num_bytes)
        for axis, of_axis in part["bytes"].items()
        for kind, num_bytes in of_axis.items()
    }
    return range(_count(first), _count(stop)), of_kinds


def _read_memory(memory: Any) -> MemoryParts:
    activations, reason = memory["activations_bytes"], memory["reason"]
    return MemoryParts(
        _count(memory["weights_bytes"]),
        _count(memory["gradients_bytes"]),
        _count(memory["optimizer_bytes"]),
        None if activations is None else _count(activations),
        _of_stages(memory["stages"]),
        None if reason is None else str(reason),
        {str(how): _of_stages(of_stages) for how, of_stages in memory.get("by_recompute", {}).items()},
    )


def _of_stages(stages: Any) -> dict[int, int]:
    return {int(stage): _count(num_bytes) for stage, num_bytes in stages.items()}


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value
