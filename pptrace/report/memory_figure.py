"""Memory of the ranks over time, as a figure."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from pptrace.model.tables import Int64
from pptrace.report.colours import FONT, HOVER_LABEL

_MOST_POINTS = 2000
_MOST_RANKS = 16
_GRID = "rgba(128, 134, 145, 0.25)"


def memory_over_time(memory: pd.DataFrame) -> go.Figure | None:
    """Allocated memory of each rank, MB over ms; None without memory events. Of many ranks those with the highest peaks.

    Of many events each rank keeps the highest of every short interval, so that no peak is lost.
    """
    if not len(memory):
        return None
    origin = int(memory["t_ns"].min())
    ordered = memory.sort_values("t_ns", kind="stable")
    peaks = ordered.groupby("rank")["allocated_bytes"].max().sort_values(ascending=False, kind="stable")
    figure = go.Figure()
    for rank in sorted(peaks.index[:_MOST_RANKS].tolist()):
        rows = ordered[ordered["rank"] == rank]
        time, level = _highest(rows["t_ns"].to_numpy(dtype=np.int64), rows["allocated_bytes"].to_numpy(dtype=np.int64))
        figure.add_scatter(
            x=(time - origin) / 1e6,
            y=level / 1e6,
            mode="lines",
            name=f"rank {rank}",
            line={"shape": "hv", "width": 1.5},
        )
    axis = {"gridcolor": _GRID, "zeroline": False, "automargin": True}
    figure.update_layout(
        template="none",
        font={"family": FONT},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hoverlabel=dict(HOVER_LABEL),
        height=320,
        margin={"l": 16, "r": 16, "t": 42, "b": 46},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        xaxis={"title": {"text": "ms"}, **axis},
        yaxis={"title": {"text": "MB allocated"}, "rangemode": "tozero", **axis},
        showlegend=True,
    )
    return figure


def _highest(time: Int64, level: Int64) -> tuple[Int64, Int64]:
    """The highest level of each of at most :data:`_MOST_POINTS` intervals of equal length, and the last level."""
    if len(time) <= _MOST_POINTS:
        return time, level
    length = max(int(time[-1] - time[0]) // (_MOST_POINTS - 1), 1)
    first = np.flatnonzero(np.diff((time - time[0]) // length, prepend=-1))
    return np.append(time[first], time[-1]), np.append(np.maximum.reduceat(level, first), level[-1])
