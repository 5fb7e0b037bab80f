"""Predictions that a run wrote of itself: bytes that each rank sends in a step, and the memory that it holds.

They follow from the sizes of our GPT, as the ``model`` facts of a trace have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, MsgspecError, Struct, convert, field

from pptrace.model.schedule_info import PlanSource, ScheduleInfo

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


class ExpertSizes(Struct, frozen=True):
    """The way of tokens to experts, and the width of each expert's inner layer."""

    dispatcher: str
    width: int


class GptSizes(Struct, frozen=True):
    """``layers_per_stage`` are those of the stages of the model; ``experts`` is None of a model without. ``varies``: microbatches
    have sequences of other lengths, of ``sequence`` tokens at most.
    """

    hidden: int
    sequence: int
    microbatch_size: int
    item_bytes: int
    layers_per_stage: tuple[int, ...]
    experts: ExpertSizes | None
    varies: bool = False


def read_gpt_sizes(model: object) -> GptSizes | None:
    """The sizes in a trace's ``model`` object; None where it is not our GPT's, or lacks any of them."""
    if not isinstance(model, Mapping) or model.get("name") != "gpt":
        return None
    layers, item_bytes = model.get("layers_per_stage"), _ITEM_BYTES.get(str(model.get("dtype")))
    sizes = [model.get(name) for name in ("hidden", "sequence", "microbatch_size")]
    experts = _read_experts(model) if model.get("experts") else None
    if not isinstance(layers, Sequence) or not all(_is_count(number) for number in layers) or item_bytes is None:
        return None
    if not all(_is_count(size) and size for size in sizes) or (model.get("experts") and experts is None):
        return None
    hidden, sequence, microbatch_size = sizes
    known = (hidden, sequence, microbatch_size, item_bytes, tuple(layers), experts)
    return GptSizes(*known, varies=model.get("shortest_sequence") is not None)  # type: ignore[arg-type]


def _read_experts(model: Mapping[str, Any]) -> ExpertSizes | None:
    dispatcher, width, hidden = (model.get(name) for name in ("experts_dispatcher", "experts_width", "hidden"))
    if width is None and _is_count(hidden):
        width = 4 * hidden  # type: ignore[operator]
    return ExpertSizes(dispatcher, width) if isinstance(dispatcher, str) and _is_count(width) and width else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


PREDICTED = "predicted"
"""The key of a rank's facts that holds its predictions (:mod:`pptrace.sizes.predicted`)."""

Bytes = Mapping[tuple[str, str], int | None]
"""(axis, kind of call) → bytes in a step, None where they are not known. What is not among them is not sent."""


_Count = Annotated[int, Meta(ge=0)]
_IN_FACTS = {name: f"{name}_bytes" for name in ("weights", "gradients", "optimizer", "activations")} | {
    "of_stage": "stages"
}


class MemoryParts(Struct, frozen=True, rename=_IN_FACTS):
    """Bytes of one rank; ``of_stage``: what one microbatch keeps, by stage of the plan, and ``by_recompute`` the same if no layer
    recomputed (none), or all (full).

    ``activations`` are the most along the plan, None where they are not known: ``reason`` says why.
    """

    weights: _Count
    gradients: _Count
    optimizer: _Count
    activations: _Count | None
    of_stage: Mapping[int, _Count]
    reason: str | None
    by_recompute: Mapping[str, Mapping[int, _Count]] = field(default_factory=dict)


class RankPrediction(Struct, frozen=True):
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
    try:
        read = convert(fact, _Fact, str_keys=True)
    except MsgspecError:
        return None
    communication = (
        (range(*part.steps), {(axis, kind): n for axis, of_axis in part.bytes.items() for kind, n in of_axis.items()})
        for part in read.communication
    )
    return RankPrediction(tuple(communication), read.memory)


class _Steps(Struct):
    steps: tuple[_Count, _Count]
    bytes: dict[str, dict[str, _Count | None]]


class _Fact(Struct):
    communication: list[_Steps]
    memory: MemoryParts
