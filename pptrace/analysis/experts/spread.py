"""Figures of layers with experts, over the layers of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pptrace.analysis.experts.types import LayerLoad, LayerSpread

FIGURES = (
    "expert_ratio",
    "least_ratio",
    "deviation_ratio",
    "idle_experts",
    "dropped_share",
    "dropped_tokens_share",
    "rank_ratio",
    "worst_rank_ratio",
)


def spread_over_layers(layers: Sequence[LayerLoad]) -> tuple[LayerSpread, ...]:
    """The spread of each of :data:`FIGURES` that two or more layers have."""
    known = {name: [value for layer in layers if (value := getattr(layer, name)) is not None] for name in FIGURES}
    return tuple(_spread(name, values) for name, values in known.items() if len(values) > 1)


def _spread(figure: str, values: Sequence[float]) -> LayerSpread:
    """Each percentile is the value of a layer."""
    low, p50, p75, p90, p95, high = map(float, np.percentile(values, (0, 50, 75, 90, 95, 100), method="nearest"))
    return LayerSpread(figure, len(values), low, p50, p75, p90, p95, high)
