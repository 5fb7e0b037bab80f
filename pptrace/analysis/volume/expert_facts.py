"""Facts of a model's experts, and the parameters and fixed communication of a layer that has some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isfinite
from typing import Any

DISPATCHERS = ("all-to-all", "padded", "all-gather")
COEFFICIENTS = {"added": 0, "gated": 1, "residual": 2}
"""Ways to join a shared MLP → how many coefficients of a token weigh it."""
DROP_ORDERS = ("choices", "weights")


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """The ``experts…`` entries of a trace's ``model`` facts, by their keys (``instrument/expert/options.py``).

    ``num`` is the number of experts of a layer; ``pyramid`` that of each layer that has some, () where all have ``num``.
    """

    num: int
    top_k: int
    every: int
    width: int | None
    shared_width: int
    shared: str
    pyramid: tuple[int, ...]
    dispatcher: str
    aux_loss: float
    bias_rate: float
    capacity_factor: float | None
    drop_order: str
    scoring: str
    scale: float
    z_loss: float
    jitter: float
    overlap: bool

    def of_layer(self, layer: int) -> int:
        """The experts of a layer of the model, 0 where it has an MLP."""
        if layer % self.every:
            return 0
        return self.pyramid[layer // self.every] if self.pyramid else self.num

    def capacity(self, tokens: int, num_experts: int) -> int | None:
        """Routes of a sequence of ``tokens`` that an expert takes: ⌈factor · k·T/E⌉, at most T; None: all."""
        if self.capacity_factor is None:
            return None
        return min(tokens, ceil(Fraction(str(self.capacity_factor)) * self.top_k * tokens / num_experts))


def read_expert_facts(model: Mapping[str, Any], num_layers: int) -> ExpertFacts | None:
    """The facts of the experts of a model of so many layers; None where any is missing or strange."""
    names = [name for name in ExpertFacts.__dataclass_fields__ if name != "num"]
    if not all(f"experts_{name}" in model for name in names):
        return None
    values: dict[str, Any] = {"num": model.get("experts"), **{name: model[f"experts_{name}"] for name in names}}
    pyramid, width, factor = values["pyramid"], values["width"], values["capacity_factor"]
    legal = (
        all(_is_count(values[name]) for name in ("num", "top_k", "every"))
        and (width is None or _is_count(width))
        and type(values["shared_width"]) is int
        and values["shared_width"] >= 0
        and isinstance(pyramid, Sequence)
        and all(map(_is_count, pyramid))
        and all(_is_number(values[name]) for name in ("aux_loss", "bias_rate", "scale", "z_loss", "jitter"))
        and (factor is None or (_is_number(factor) and factor > 0))
        and values["shared"] in COEFFICIENTS
        and values["dispatcher"] in DISPATCHERS
        and values["drop_order"] in DROP_ORDERS
        and isinstance(values["scoring"], str)
        and isinstance(values["overlap"], bool)
    )
    if not legal or (pyramid and len(pyramid) != len(range(0, num_layers, values["every"]))):
        return None
    return ExpertFacts(**values | {"pyramid": tuple(pyramid)})


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0
