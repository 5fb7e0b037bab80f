"""A sweep as columns, one row per point: what CSV, JSON and DataFrame hold."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from typing import Any

from pptrace.simulator.sweep.run import Sweep, SweptPoint, SweptStep

SWEEP_SCHEMA = "pptrace.sweep/1"

_ASKED: Mapping[str, Callable[[SweptPoint], Any]] = {
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
    asked = {name: [of(swept) for swept in sweep.points] for name, of in _ASKED.items()}
    found = {
        name: [None if swept.step is None else of(swept.step) for swept in sweep.points] for name, of in _FOUND.items()
    }
    return asked | found | {"refused": [swept.refused for swept in sweep.points]}


def sweep_csv(sweep: Sweep) -> str:
    """The columns as CSV, an empty cell for None."""
    columns = sweep_columns(sweep)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return out.getvalue()


def sweep_object(sweep: Sweep) -> dict[str, Any]:
    """The points as a JSON object."""
    columns = sweep_columns(sweep)
    points = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {"schema": SWEEP_SCHEMA, "costs_of": str(sweep.grid.costs_of), "points": points}
