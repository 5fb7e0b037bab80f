"""Axes of a sweep: which have several values, and how a value is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pptrace.simulator.sweep.run import Sweep, SweptPoint


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: ``value`` of a point sorts and groups, ``text`` names it."""

    name: str
    value: Callable[[SweptPoint], Any]
    text: Callable[[SweptPoint], str]

    def label(self, swept: SweptPoint) -> str:
        """Name and value: ``p=8``."""
        return f"{self.name}={self.text(swept)}"


def _cost(name: str, field: str) -> Axis:
    def milliseconds(swept: SweptPoint) -> float:
        return float(getattr(swept.point.costs, field) / 1e6)

    return Axis(name, milliseconds, lambda swept: f"{milliseconds(swept):g}")


P = Axis("p", lambda swept: swept.point.pp, lambda swept: str(swept.point.pp))
M = Axis("m", lambda swept: swept.point.microbatches, lambda swept: str(swept.point.microbatches))
N = Axis("N", lambda swept: swept.point.group_size, lambda swept: str(swept.point.group_size or "p"))
COSTS = (
    _cost("F ms", "forward_ns"),
    _cost("B ms", "backward_ns"),
    _cost("W ms", "wgrad_ns"),
    _cost("message ms", "p2p_ns"),
)


def varying(sweep: Sweep, axes: Sequence[Axis]) -> list[Axis]:
    """Axes that have several values in a sweep."""
    return [axis for axis in axes if len({axis.value(swept) for swept in sweep.points}) > 1]


def cost_axes(sweep: Sweep) -> list[Axis]:
    """The costs that vary, without W where it follows B."""
    found = varying(sweep, COSTS)
    follows = all(swept.point.costs.wgrad_ns == swept.point.costs.backward_ns // 2 for swept in sweep.points)
    return [axis for axis in found if not (follows and axis is COSTS[2])]


def row_name(swept: SweptPoint) -> str:
    """Schedule and chunks of a point: ``interleaved-1f1b v=2``."""
    return f"{swept.point.schedule} v={swept.num_chunks}"
