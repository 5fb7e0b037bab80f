"""Sizes of our GPT that the figures of an analysis need, from the ``model`` facts of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The way of tokens to experts, and the width of each expert's inner layer."""

    dispatcher: str
    width: int


@dataclass(frozen=True, slots=True)
class GptSizes:
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
