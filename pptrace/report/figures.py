"""The timeline of a step: ranks as rows, time to the right.

One function draws measured, simulated and planned ops, since all have the schema OPS. A figure has a few traces however long
the step is: bars are arrays with a base and a width, one trace per kind of op and chunk, so that 50,000 ops stay fluent. From the
back to the front, each row holds its phases as bands, its bubbles, its ops, over them the gaps in which their device computed
nothing and the transfers that nothing hides, and below the ops two thin lines, receives and then sends, each split into waiting
and transferring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from pptrace.analysis.result import StepReport
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.report.colours import FONT, HOVER_LABEL
from pptrace.report.detail import MOST_BARS, View, rows_near, select_detail
from pptrace.report.idle_traces import idle_traces
from pptrace.report.summary_figures import note, overview, rank_label, waterfall
from pptrace.report.timeline_traces import (
    ALONE,
    OPS_BAND,
    Rows,
    block_traces,
    bubble_traces,
    comm_traces,
    compute_by_rank,
    exposed_traces,
    op_traces,
    phase_traces,
)
from pptrace.slices import slice_of
from pptrace.timeline.lanes import Lane
from pptrace.timeline.phases import PhaseSpan, phase_spans
from pptrace.timeline.windows import StepWindow
from pptrace.workflow.analyse import Analysis

__all__ = ["CONFIG", "STEP_FIGURES", "View", "note", "overview", "row_labels", "step_timeline", "timeline", "waterfall"]

CONFIG: Mapping[str, Any] = {
    "displaylogo": False,
    "scrollZoom": True,
    "responsive": True,
    "modeBarButtons": [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "autoScale2d"], ["toImage"]],
    "toImageButtonOptions": {"format": "svg", "filename": "pptrace"},
    "doubleClick": "autosize",
}
"""plotly.js options for a timeline: the wheel zooms time, dragging selects a range, a double click shows the whole step."""


def timeline(
    ops: pd.DataFrame,
    comms: pd.DataFrame | None = None,
    windows: Sequence[StepWindow] | None = None,
    lanes: Mapping[int, Lane] | None = None,
    extent_ns: int | None = None,
    view: View | None = None,
) -> go.Figure:
    """Draw one step.

    Args:
        ops: schema OPS with phases filled; rows outside the windows' step and ranks are left out.
        comms: schema COMMS on the same clock, with transfer starts; None draws the ops alone.
        windows: the step's windows, one per pipeline; None takes all of ``ops`` as one pipeline in one step.
        lanes: what each rank did, to distinguish bubbles from communication; None takes all time without ops as bubble.
        extent_ns: how much of time to show, so that two pictures can be compared; None shows the longest window.
        view: the visible time range, for steps of many thousand ops: ops too short to be seen in it are drawn as blocks,
            and ops far outside of it not at all. None draws every op.

    Times of the picture are ms from the earliest window's start.
    """
    shown = tuple(windows) if windows is not None else _one_window(ops)
    step_ops = _of_windows(ops, shown)
    if step_ops.empty:
        return note("No pipeline ops to draw")
    step_comms = _of_windows(comms, shown) if comms is not None else None
    has_comms = step_comms is not None and len(step_comms) > 0
    rows = Rows(_row_positions(shown), min(window.start_ns for window in shown), OPS_BAND if has_comms else ALONE)
    phases = _phases(step_ops, shown)
    traces = [*phase_traces(phases, rows), *bubble_traces(step_ops, phases, shown, lanes, rows, view)]
    drawn = select_detail(step_ops, view) if view is not None else None
    if drawn is not None:
        traces += block_traces(drawn.blocks, rows)
    traces += op_traces(step_ops if drawn is None else drawn.ops, rows, num_chunks=int(step_ops["chunk"].max()) + 1)
    if drawn is None or drawn.blocks.empty:
        traces += idle_traces(step_ops, shown, lanes, rows, view)
        traces += exposed_traces(shown, lanes, rows, view)
    if step_comms is not None and has_comms:
        shown_comms = step_comms if view is None else rows_near(step_comms, view)
        if view is None or len(shown_comms) <= MOST_BARS:
            traces += comm_traces(shown_comms, rows)
    figure = go.Figure(traces)
    _lay_out(figure, rows, row_labels(step_ops), shown, extent_ns, _last_ms(step_ops, step_comms, rows))
    return figure


def _phases(ops: pd.DataFrame, windows: Sequence[StepWindow]) -> dict[int, tuple[PhaseSpan, ...]]:
    """The phases of each rank whose ops all have one."""
    return {
        rank: tuple(phase_spans(slice_of(rank_ops), window))
        for window in windows
        for rank, rank_ops in compute_by_rank(ops, window).items()
        if (rank_ops["phase"] != "").all()
    }


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


def _row_positions(windows: Sequence[StepWindow]) -> dict[int, float]:
    positions: dict[int, float] = {}
    for number, window in enumerate(windows):
        for rank in window.ranks:
            positions.setdefault(rank, len(positions) + 0.35 * number)
    return positions


def _last_ms(ops: pd.DataFrame, comms: pd.DataFrame | None, rows: Rows) -> float:
    ends = [int(ops["end_ns"].max())]
    if comms is not None and len(comms):
        ends.append(int(comms["end_ns"].max()))
    return float(rows.ms(max(ends)))


def _lay_out(
    figure: go.Figure,
    rows: Rows,
    labels: Mapping[int, str],
    windows: Sequence[StepWindow],
    extent_ns: int | None,
    last_ms: float,
) -> None:
    span_ms = (max(window.end_ns for window in windows) - rows.origin_ns) / 1e6
    row_px = min(max(560 / rows.height, 26), 112)
    figure.update_layout(
        template="none",
        font={"family": FONT},
        barmode="overlay",
        height=round(row_px * rows.height + 110),
        margin={"l": 20, "r": 20, "t": 46, "b": 54},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="closest",
        hoverlabel=dict(HOVER_LABEL),
        dragmode="zoom",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#8a93a0", "activecolor": "#2C7A8C"},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal"},
        uniformtext={"mode": "hide", "minsize": 10},
        xaxis=_time_axis(span_ms if extent_ns is None else extent_ns / 1e6, last_ms),
        yaxis=_rank_axis(rows, labels),
    )
    if last_ms > span_ms:
        figure.add_vline(x=span_ms, line={"color": "rgba(128, 134, 145, 0.9)", "width": 1, "dash": "dot"})


def _time_axis(shown_ms: float, last_ms: float) -> dict[str, Any]:
    """The time axis, which shows ``shown_ms`` and can be moved to ``last_ms``."""
    low, high = -0.008 * shown_ms, 1.008 * shown_ms
    return {
        "title": {"text": "ms from the start of the step", "standoff": 10},
        "range": [low, high],
        "autorangeoptions": {"clipmin": low, "clipmax": high, "include": [low, high]},
        "minallowed": -0.05 * shown_ms,
        "maxallowed": 1.05 * max(last_ms, shown_ms),
        "showgrid": True,
        "gridcolor": "rgba(128, 134, 145, 0.25)",
        "zeroline": False,
        "ticks": "outside",
        "tickcolor": "rgba(128, 134, 145, 0.5)",
    }


def _rank_axis(rows: Rows, labels: Mapping[int, str]) -> dict[str, Any]:
    return {
        "tickmode": "array",
        "tickvals": list(rows.position.values()),
        "ticktext": [labels.get(rank, f"<b>rank {rank}</b>") for rank in rows.position],
        "range": [rows.height - 0.5, -0.5],
        "fixedrange": True,
        "automargin": True,
        "showgrid": False,
        "zeroline": False,
        "ticklabelstandoff": 6,
    }
