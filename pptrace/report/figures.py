"""The timeline of a step: ranks as rows, time to the right.

One function draws measured, simulated and planned ops, since all have the schema OPS. A figure has a few traces however long
the step is: bars are arrays with a base and a width, one trace per kind of op and chunk, so that 50,000 ops stay fluent. From the
back to the front, each row holds its phases as bands, its bubbles, its ops, over them the gaps in which their device computed
nothing and the transfers that nothing hides, and below the ops two thin lines, receives and then sends, each split into waiting
and transferring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from pptrace.analysis.result import StepReport
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.report.blocks import MOST_BARS, WIDTH_PX, with_blocks
from pptrace.report.charts.base import lay_out, names_axis
from pptrace.report.summary_figures import note, overview, rank_label, waterfall
from pptrace.report.timeline_traces import (
    OPS_ABOVE_COMMS,
    OPS_ALONE,
    Rows,
    block_traces,
    bubble_traces,
    comm_traces,
    gap_traces,
    op_traces,
    phase_traces,
)
from pptrace.slices import slice_of
from pptrace.timeline.lanes import Lane
from pptrace.timeline.phases import phase_spans
from pptrace.timeline.windows import StepWindow
from pptrace.workflow.analyse import Analysis

CONFIG: Mapping[str, Any] = {
    "displaylogo": False,
    "scrollZoom": True,
    "responsive": True,
    "modeBarButtons": [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "autoScale2d"], ["toImage"]],
    "toImageButtonOptions": {"format": "svg", "filename": "pptrace"},
    "doubleClick": "autosize",
}
"""plotly.js options for a timeline: the wheel zooms time, dragging selects a range, a double click shows the whole step."""


MOST_ROWS = 64
"""Most ranks of a step on paper that are drawn, every so many of more."""


def timeline(
    ops: pd.DataFrame,
    comms: pd.DataFrame | None = None,
    windows: Sequence[StepWindow] | None = None,
    lanes: Mapping[int, Lane] | None = None,
    extent_ns: int | None = None,
    *,
    merge_thin: bool = False,
) -> go.Figure:
    """Draw one step.

    Args:
        ops: schema OPS with phases filled; rows outside the windows' step and ranks are left out.
        comms: schema COMMS on the same clock, with transfer starts; None draws the ops alone.
        windows: the step's windows, one per pipeline; None takes all of ``ops`` as one pipeline in one step.
        lanes: what each rank did, to distinguish bubbles from communication; None takes all time without ops as bubble.
        extent_ns: how much of time to show, so that two pictures can be compared; None shows the longest window.
        merge_thin: of steps of more than 6,000 ops, draw those that are too short to be seen as blocks.

    Times of the picture are ms from the earliest window's start.
    """
    shown = tuple(windows) if windows is not None else _one_window(ops)
    step_ops = _of_windows(ops, shown)
    if step_ops.empty:
        return note("No pipeline ops to draw")
    step_comms = _of_windows(comms, shown) if comms is not None else step_ops.iloc[:0]
    positions: dict[int, float] = {}
    for number, window in enumerate(shown):
        for rank in window.ranks:
            positions.setdefault(rank, len(positions) + 0.35 * number)
    origin_ns = min(window.start_ns for window in shown)
    rows = Rows(positions, origin_ns, OPS_ABOVE_COMMS if len(step_comms) else OPS_ALONE)
    shown_ns = max(window.end_ns for window in shown) - origin_ns if extent_ns is None else extent_ns
    merge_thin = merge_thin and len(step_ops) > MOST_BARS
    pixel_ns = max(shown_ns, 1) / WIDTH_PX if merge_thin else None
    in_pipeline = step_ops[step_ops["kind"].isin(COMPUTE_KINDS)]
    compute = [
        (window, int(str(rank)), rank_ops)
        for window in shown
        for rank, rank_ops in in_pipeline[in_pipeline["rank"].isin(window.ranks)].groupby("rank")
    ]
    phases = {
        rank: tuple(phase_spans(slice_of(rank_ops), window))
        for window, rank, rank_ops in compute
        if (rank_ops["phase"] != "").all()
    }
    drawn, blocks = with_blocks(step_ops, origin_ns, shown_ns) if merge_thin else (step_ops, step_ops.iloc[:0])
    traces = [*phase_traces(phases, rows), *bubble_traces(compute, phases, lanes or {}, rows, pixel_ns or 0.0)]
    traces += [*block_traces(blocks, rows), *op_traces(drawn, rows, num_chunks=int(step_ops["chunk"].max()) + 1)]
    if blocks.empty:
        traces += gap_traces(compute, shown, lanes or {}, rows, pixel_ns)
    if len(step_comms) and not (merge_thin and len(step_comms) > MOST_BARS):
        traces += comm_traces(step_comms, rows)
    last_ns = max(int(table["end_ns"].max()) for table in (step_ops, step_comms) if len(table))
    return _lay_out(go.Figure(traces), rows, row_labels(step_ops), shown, shown_ns, last_ns)


def plan_timeline(ops: pd.DataFrame) -> tuple[go.Figure, str]:
    """Draw a step on paper, of many ranks every so many and the last one, with a sentence that says so; "" where it has all."""
    windows, note = _one_window(ops), ""
    if windows and len(ranks := windows[0].ranks) > MOST_ROWS:
        every = -(-len(ranks) // MOST_ROWS)
        shown = (*ranks[:-1:every], ranks[-1])
        windows = (replace(windows[0], ranks=shown),)
        note = f"{len(shown)} of {len(ranks):,} ranks: every {every}th from rank {ranks[0]}, and the last"
    return timeline(ops, windows=windows), note


def step_timeline(analysis: Analysis, step: StepReport) -> go.Figure:
    """The timeline of a step of a report, with all its pipelines."""
    windows = [window for window in analysis.windows if window.step == step.step]
    return timeline(analysis.data.ops, analysis.data.comms, windows, analysis.data.lanes)


STEP_FIGURES: Mapping[str, Callable[[Analysis, StepReport], go.Figure]] = {
    "timeline": step_timeline,
    "overview": lambda _, step: overview(step),
    "waterfall": lambda _, step: waterfall(step),
}
"""The figures of a step, by their names in the API."""


def row_labels(ops: pd.DataFrame) -> dict[int, str]:
    """The label of each rank's row: the rank and its stages."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    stages = {
        int(str(rank)): sorted(set(rank_ops.loc[rank_ops["stage"] >= 0, "stage"].tolist()))
        for rank, rank_ops in compute.groupby("rank")
    }
    return {rank: rank_label(rank, of_rank) for rank, of_rank in stages.items()}


def _one_window(ops: pd.DataFrame) -> tuple[StepWindow, ...]:
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    if compute.empty:
        return ()
    ranks = tuple(sorted(set(compute["rank"].tolist())))
    return (
        StepWindow(int(compute["step"].iloc[0]), ranks, int(compute["start_ns"].min()), int(compute["end_ns"].max())),
    )


def _of_windows(table: pd.DataFrame, windows: Sequence[StepWindow]) -> pd.DataFrame:
    ranks = {rank for window in windows for rank in window.ranks}
    steps = {window.step for window in windows}
    return table[table["rank"].isin(ranks) & table["step"].isin(steps)]


def _lay_out(
    figure: go.Figure,
    rows: Rows,
    labels: Mapping[int, str],
    windows: Sequence[StepWindow],
    shown_ns: int,
    last_ns: int,
) -> go.Figure:
    """The axes: that of time shows ``shown_ns`` and can be moved to ``last_ns``; a dotted line is the step's end."""
    span_ms = (max(window.end_ns for window in windows) - rows.origin_ns) / 1e6
    shown_ms, last_ms = shown_ns / 1e6, float(rows.ms(last_ns))
    low, high = -0.008 * shown_ms, 1.008 * shown_ms
    row_px = min(max(560 / rows.height, 26), 112)
    names = [labels.get(rank, f"<b>rank {rank}</b>") for rank in rows.position]
    lay_out(
        figure,
        round(row_px * rows.height + 110),
        "ms from the start of the step",
        can_zoom=True,
        barmode="overlay",
        margin={"l": 20, "r": 20, "t": 46, "b": 54},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#8a93a0", "activecolor": "#2C7A8C"},
        uniformtext={"mode": "hide", "minsize": 10},
        xaxis={
            "range": [low, high],
            "autorangeoptions": {"clipmin": low, "clipmax": high, "include": [low, high]},
            "minallowed": -0.05 * shown_ms,
            "maxallowed": 1.05 * max(last_ms, shown_ms),
            "showgrid": True,
            "ticks": "outside",
            "tickcolor": "rgba(128, 134, 145, 0.5)",
        },
        yaxis={
            **names_axis(names),
            "tickvals": list(rows.position.values()),
            "range": [rows.height - 0.5, -0.5],
            "fixedrange": True,
        },
    )
    if last_ms > span_ms:
        figure.add_vline(x=span_ms, line={"color": "rgba(128, 134, 145, 0.9)", "width": 1, "dash": "dot"})
    return figure
