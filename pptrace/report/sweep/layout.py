"""Axes of a sweep: which have several values, and how a value is called.

A sweep as columns, one row per point: what CSV, JSON and DataFrame hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from pptrace.report.columns import as_rows
from pptrace.simulator.sweep.run import Sweep, SweptPoint, SweptStep


class Axis(Struct, frozen=True):
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


SWEEP_SCHEMA = "pptrace.sweep/1"

_OPTIONS: Mapping[str, Callable[[SweptPoint], Any]] = {
    "schedule": lambda swept: swept.point.schedule,
    "pp": lambda swept: swept.point.pp,
    "microbatches": lambda swept: swept.point.num_microbatches,
    "chunks": lambda swept: swept.num_chunks,
    "group_size": lambda swept: swept.point.group_size,
    "forward_ms": lambda swept: swept.point.costs.forward_ns / 1e6,
    "backward_ms": lambda swept: swept.point.costs.backward_ns / 1e6,
    "wgrad_ms": lambda swept: swept.point.costs.wgrad_ns / 1e6,
    "p2p_ms": lambda swept: swept.point.costs.p2p_ns / 1e6,
}
_FOUND: Mapping[str, Callable[[SweptStep], Any]] = {
    "makespan_ns": lambda step: round(step.makespan_ns),
    "bubble_ratio": lambda step: step.bubble_ratio,
    "bubble_share": lambda step: step.bubble_share,
    "inner_bubble_ratio": lambda step: step.inner_bubble_ratio,
    "throughput_per_rank": lambda step: step.throughput_per_rank,
    "throughput": lambda step: step.throughput,
    "microbatches_per_s": lambda step: step.microbatches_per_s,
    "peak_inflight": lambda step: step.peak_inflight,
    "peak_activations": lambda step: step.peak_activations,
}

WHOLE_NUMBERS = ("pp", "microbatches", "chunks", "group_size", "makespan_ns", "peak_inflight")
TEXTS = ("schedule", "refused")


def sweep_columns(sweep: Sweep) -> dict[str, list[Any]]:
    """The columns of all points, None for what a refused one does not have; ``refused`` says why, else it is ""."""
    options = {name: [of(swept) for swept in sweep.points] for name, of in _OPTIONS.items()}
    found = {
        name: [None if swept.step is None else of(swept.step) for swept in sweep.points] for name, of in _FOUND.items()
    }
    return options | found | {"refused": [swept.refused for swept in sweep.points]}


def sweep_object(sweep: Sweep) -> dict[str, Any]:
    """The points as a JSON object."""
    return {"schema": SWEEP_SCHEMA, "costs_of": str(sweep.grid.costs_of), "points": as_rows(sweep_columns(sweep))}
