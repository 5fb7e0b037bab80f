"""Unequal routes to experts: what steps would get back if all experts had equally many rows, and who has most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pptrace.analysis.step_parts import UNEQUAL_ROUTES
from pptrace.analysis.stragglers.reason import Reason
from pptrace.axes import Axis
from pptrace.model.tables import Int64

CLEARLY = 1.25
"""An expert or rank is named that has so many times the mean."""


@dataclass(frozen=True, slots=True)
class HotSpot:
    """The rank whose experts have most rows compared with its group's, and the expert with most routes over its layer's mean."""

    rank: int
    ratio: float
    expert: int | None
    expert_ratio: float | None
    layer: int | None
    num_layers: int


def unequal_routes(gains: Int64, spot: HotSpot) -> Reason:
    """The reason that ranks of experts have unequally many rows, with what equal ones would gain."""
    at, evidence = _words(spot)
    return Reason(
        UNEQUAL_ROUTES,
        ("imbalance",),
        {"axis": str(Axis.EP), **({"rank": spot.rank} if spot.ratio >= CLEARLY else {})},
        "Unequal routes: {share} is waiting for ranks whose experts have more rows than others" + at,
        "balance the routes (auxiliary loss, bias, capacity), or spread experts that are chosen often over the ranks; "
        "`pptrace whatif --ideal routing` replays the run with equal rows",
        gains,
        evidence,
        is_cause=True,
    )


def _words(spot: HotSpot) -> tuple[str, dict[str, Any]]:
    """(words on who has most, for the title; figures behind it)."""
    evidence: dict[str, Any] = {"rank_ratio": spot.ratio}
    parts = []
    if spot.expert is not None and (spot.expert_ratio or 0) >= CLEARLY:
        of = f"in {spot.num_layers} layers" if spot.num_layers > 1 else f"in layer {spot.layer}"
        parts.append(f"expert {spot.expert} has {spot.expert_ratio:.1f} times the mean {of}")
        evidence |= {"expert": spot.expert, "expert_ratio": spot.expert_ratio, "layer": spot.layer}
    if spot.ratio >= CLEARLY:
        parts.append(f"rank {spot.rank} computes {spot.ratio:.1f} times the rows of its group")
    return (": " + ", ".join(parts) if parts else ""), evidence
