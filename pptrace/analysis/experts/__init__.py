"""Experts of a run: their loads, calls, and what unequal routes cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from pptrace.slices import rows_among

EXPERT_AXES = ("ep", "etp-ep")
"""Axes of exchanges with experts; the second is that of Megatron-LM's all-gather dispatcher."""
EXPERT_COUNTS = "experts"
"""The fact of a rank that counted routes to experts."""


def applies(comms: pd.DataFrame, facts: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether a run communicates with experts, or a rank counted what was sent to them."""
    counted_routes = any(of_rank.get(EXPERT_COUNTS) for of_rank in facts.values())
    return counted_routes or bool(rows_among(comms["axis"], EXPERT_AXES).any())
