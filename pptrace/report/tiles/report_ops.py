"""The ops that a report lists, read from the tracks of the timeline: the tables that they came from can then be let go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport
from pptrace.analysis.steps.op_rows import OpRows
from pptrace.report.tiles.measured import Table
from pptrace.report.tiles.tracks import Array
from pptrace.slices import Slice, Texts, compact

_COMPUTE_LANE = 0
_NUMBERS, _TEXTS = ("stage", "chunk", "microbatch"), ("kind", "phase", "pair")


@dataclass(frozen=True, slots=True)
class _Times:
    """The starts of some rows, or their ends, on the run's clock; computed when rows are asked for."""

    origin_ns: int
    start: Array
    length: Array | None = None

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, chosen: Array | slice) -> Array:
        start = self.start[chosen] + self.origin_ns
        return start if self.length is None else start + self.length[chosen]


def with_ops_of_tracks(report: Report, ops: Table, position: Mapping[int, int], origin_ns: int) -> Report:
    """The same report, whose ops hold no other memory than the tracks do; those of a rank that overlap are compact copies."""
    slices: dict[int, Slice] = {}
    steps = tuple(_on_tracks(step, slices, ops, position, origin_ns) for step in report.steps)
    return replace(report, steps=steps)


def _on_tracks(
    step: StepReport, slices: dict[int, Slice], ops: Table, position: Mapping[int, int], origin_ns: int
) -> StepReport:
    ranks = []
    for rank in step.ranks:
        rows = rank.ops
        if isinstance(rows, OpRows):
            if rank.rank not in slices:
                slices[rank.rank] = _slice_of(rows.rows, ops, position.get(rank.rank, -1), origin_ns)
            rows = rows.within(slices[rank.rank])
        ranks.append(replace(rank, ops=rows))
    return replace(step, ranks=tuple(ranks))


def _slice_of(rows: Slice, ops: Table, at: int, origin_ns: int) -> Slice:
    """The rows of a rank as views of its track, where that has them in their order; else a compact copy."""
    tracks = ops.tracks
    compute = [track for track in tracks.tracks_of([at]).tolist() if tracks.lane[track] == _COMPUTE_LANE]
    if len(compute) == 1:
        own = slice(int(tracks.ptr[compute[0]]), int(tracks.ptr[compute[0] + 1]))
        start = _Times(origin_ns, tracks.start[own])
        if np.array_equal(start[:], rows["start_ns"]):
            columns: dict[str, Any] = {name: tracks.columns[name][own] for name in _NUMBERS}
            columns |= {name: Texts(tracks.columns[name][own], ops.texts[name]) for name in _TEXTS}
            return Slice(columns | {"start_ns": start, "end_ns": _Times(origin_ns, start.start, tracks.length[own])})
    copied: dict[str, Any] = {name: compact(rows[name]).copy() for name in (*_NUMBERS, "start_ns", "end_ns")}
    for name in _TEXTS:
        codes, texts = rows.codes(name)
        copied[name] = Texts(compact(codes), texts)
    return Slice(copied)
