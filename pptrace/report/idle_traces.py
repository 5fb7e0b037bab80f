"""Traces of a timeline: the parts of ops in which the device computed nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from pptrace.intervals import EMPTY, Int64, clip, intersect, merge, subtract, union
from pptrace.report.colours import PART_COLOURS
from pptrace.report.detail import View, visible
from pptrace.report.timeline_traces import Rows, bars, compute_by_rank
from pptrace.timeline.lanes import Lane
from pptrace.timeline.windows import StepWindow

_MOST_BARS = 20_000
"""Most gaps that are drawn: of more, the longest."""
_NOT_LAUNCHED, _NO_COMPUTE = "Idle in an op: not launched", "No compute in an op"
_COLOURS = {_NOT_LAUNCHED: PART_COLOURS["host"], _NO_COMPUTE: "rgba(255, 255, 255, 0.8)"}


def idle_traces(
    ops: pd.DataFrame,
    windows: Sequence[StepWindow],
    lanes: Mapping[int, Lane] | None,
    rows: Rows,
    view: View | None = None,
) -> Iterator[go.Bar]:
    """Bars over the gaps inside ops whose kernels were recorded, where they are wide enough to be seen."""
    gaps: dict[str, list[tuple[int, Int64]]] = {name: [] for name in _COLOURS}
    for window in windows:
        seen = view or View(window.start_ns, window.end_ns)
        for rank, rank_ops in compute_by_rank(ops, window).items():
            lane = lanes.get(rank) if lanes else None
            if lane is None or not lane.on_device:
                continue
            for name, intervals in _gaps_in_ops(rank_ops, window, lane).items():
                gaps[name].append((rank, visible(intervals, seen)))
    for name, parts in gaps.items():
        edges = np.concatenate([part for _, part in parts]) if parts else EMPTY
        if not len(edges):
            continue
        ranks = np.repeat([rank for rank, _ in parts], [len(part) for _, part in parts])
        longest = np.sort(np.argsort(edges[:, 0] - edges[:, 1], kind="stable")[:_MOST_BARS])
        yield _trace(name, ranks[longest], edges[longest], rows)


def _gaps_in_ops(ops: pd.DataFrame, window: StepWindow, lane: Lane) -> dict[str, Int64]:
    busy = clip(merge(lane.compute, lane.exposed), window.start_ns, window.end_ns)
    inside = subtract(union(ops["start_ns"], ops["end_ns"]), busy)
    starved = EMPTY if lane.idle is None else intersect(inside, lane.idle.launch_starved)
    return {_NOT_LAUNCHED: starved, _NO_COMPUTE: subtract(inside, starved)}


def _trace(name: str, ranks: Int64, edges: Int64, rows: Rows) -> go.Bar:
    start, end = rows.ms(edges[:, 0]), rows.ms(edges[:, 1])
    return bars(
        rows.y(pd.Series(ranks), rows.ops),
        rows.ops.height,
        start,
        end,
        name=name,
        marker={"color": _COLOURS[name], "line": {"color": "rgba(128, 134, 145, 0.35)", "width": 0.5}},
        customdata=np.stack((ranks, end - start), axis=1),
        hovertemplate=f"<b>{name}</b> · %{{customdata[1]:.3f}} ms<br>rank %{{customdata[0]:d}}"
        "<br>from %{base:.3f} ms<extra></extra>",
        legendrank=1500,
    )
