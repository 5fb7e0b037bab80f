"""Memory of the ranks: predicted parts and measured peaks, microbatches in flight, and what was allocated over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from pptrace.analysis.memory.show import fullest_of_stages
from pptrace.analysis.memory.types import MemoryReport, RankMemory
from pptrace.model.tables import Int64
from pptrace.model.units import num_bytes
from pptrace.report.charts.base import MOST_NAMED, columns_axis, lay_out, matrix_columns
from pptrace.report.colours import COMPUTE, IDEAL

MOST_RANKS = 48
"""Most ranks that are shown one by one; of more, that of each stage with the highest peak."""
_MOST_TICKS = 8
_PARTS = (
    ("weights_bytes", "weights", "#0072B2"),
    ("gradients_bytes", "gradients", "#D55E00"),
    ("optimizer_bytes", "optimizer state", "#66717F"),
    ("activations_bytes", "activations", "#E69F00"),
)


_MOST_STAGES = 3
_MOST_LINES = 16
_MOST_POINTS = 2000


def shown_ranks(memory: MemoryReport) -> Sequence[RankMemory]:
    """Each rank; of many, that of each stage with the highest peak."""
    return memory.ranks if len(memory.ranks) <= MOST_RANKS else fullest_of_stages(memory.ranks)


def memory_chart(memory: MemoryReport) -> go.Figure | None:
    """Predicted parts of each rank's memory as a stack, the measured peak and its level before the step as marks, MB.

    None where neither is known.
    """
    ranks = shown_ranks(memory)
    names = _names(ranks)
    figure = go.Figure()
    for field, label, colour in _PARTS:
        values = [None if rank.predicted is None else getattr(rank.predicted, field) for rank in ranks]
        if any(value is not None for value in values):
            figure.add_bar(
                x=names,
                y=[None if value is None else value / 1e6 for value in values],
                name=f"{label}, predicted",
                marker={"color": colour, "line": {"width": 0}},
                customdata=[num_bytes(value) for value in values],
                hovertemplate=f"{label}, predicted: %{{customdata}}<extra></extra>",
            )
    _marks(figure, names, [rank.start_bytes for rank in ranks], "measured at the start of the step", "#FFFFFF")
    _marks(figure, names, [rank.peak_bytes for rank in ranks], "measured peak", IDEAL)
    if not figure.data:
        return None
    return lay_out(
        figure,
        360,
        "",
        "MB",
        barmode="stack",
        hovermode="x unified",  # small parts cannot be pointed at
        xaxis=_columns(names, showspikes=False),
        yaxis={"rangemode": "tozero"},
        showlegend=True,  # of a lone mark too
    )


def unseen_parts(memory: MemoryReport) -> Sequence[str]:
    """Predicted parts that are known and too small to be seen in :func:`memory_chart` on any rank."""
    ranks = [rank for rank in shown_ranks(memory) if rank.predicted is not None]
    sizes = {label: [getattr(rank.predicted, field) or 0 for rank in ranks] for field, label, _ in _PARTS}
    stacks = [sum(parts) for parts in zip(*sizes.values(), strict=True)]
    measured = (size or 0 for rank in shown_ranks(memory) for size in (rank.peak_bytes, rank.start_bytes))
    least = max((*stacks, *measured), default=0) * _SEEN_PART
    return [label for label, of_ranks in sizes.items() if 0 < max(of_ranks, default=0) < least]


_SEEN_PART = 1 / 240
"""Smallest part of the axis that can be seen: a pixel."""
_ABOVE_MOST = 1.06
"""The top of an axis over its largest value: marks there are whole."""


def in_flight_chart(memory: MemoryReport) -> go.Figure | None:
    """Most microbatches in flight on each rank, measured as bars and planned as marks; None where neither is known."""
    ranks = shown_ranks(memory)
    planned, measured = ([getattr(rank.in_flight, name) for rank in ranks] for name in ("planned", "measured"))
    if not any(value is not None for value in (*planned, *measured)):
        return None
    names = _names(ranks)
    figure = go.Figure(
        go.Bar(
            x=names, y=measured, name="measured", marker={"color": COMPUTE}, hovertemplate="%{x}: %{y}<extra></extra>"
        )
    )
    figure.add_scatter(
        x=names,
        y=planned,
        name="planned",
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 22, "color": "#E69F00", "line": {"width": 3}},
        hovertemplate="%{x}: %{y} planned<extra></extra>",
    )
    most = max(value for value in (*planned, *measured) if value is not None)
    axis = {"range": [0, (most or 1) * _ABOVE_MOST], "tickformat": "d", "dtick": max(math.ceil(most / _MOST_TICKS), 1)}
    return lay_out(figure, 300, "", "microbatches in flight", xaxis=_columns(names), yaxis=axis)


def _names(ranks: Sequence[RankMemory]) -> list[str]:
    """The names of columns; of many, below which are numbers alone, in one line each."""
    names = map(rank_name, ranks)
    return list(names) if len(ranks) <= MOST_NAMED else [name.replace("<br>", ", ") for name in names]


def _columns(names: Sequence[str], **options: Any) -> dict[str, Any]:
    title = {} if len(names) <= MOST_NAMED else {"title": {"text": "rank"}}
    return columns_axis(len(names), **title, **matrix_columns(names), **options)


def rank_name(rank: RankMemory) -> str:
    """A rank with its stages; of many the first two and the last."""
    stages = list(map(str, rank.stages))
    if not stages:
        return f"rank {rank.rank}"
    names = ", ".join(stages) if len(stages) <= _MOST_STAGES else f"{stages[0]}, {stages[1]} … {stages[-1]}"
    return f"rank {rank.rank}<br>{'stage' if len(stages) == 1 else 'stages'} {names}"


def _marks(figure: go.Figure, names: Sequence[str], values: Sequence[int | None], label: str, fill: str) -> None:
    if all(value is None for value in values):
        return
    figure.add_scatter(
        x=names,
        y=[None if value is None else value / 1e6 for value in values],
        mode="markers",
        name=label,
        marker={"symbol": "diamond", "size": 11, "color": fill, "line": {"width": 2, "color": IDEAL}},
        customdata=[num_bytes(value) for value in values],
        hovertemplate=f"{label}: %{{customdata}}<extra></extra>",
    )


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
    for rank in sorted(peaks.index[:_MOST_LINES].tolist()):
        rows = ordered[ordered["rank"] == rank]
        time, level = _highest(rows["t_ns"].to_numpy(dtype=np.int64), rows["allocated_bytes"].to_numpy(dtype=np.int64))
        figure.add_scatter(
            x=(time - origin) / 1e6,
            y=level / 1e6,
            mode="lines",
            name=f"rank {rank}",
            line={"shape": "hv", "width": 1.5},
        )
    tozero = {"rangemode": "tozero"}
    return lay_out(figure, 320, "ms", "MB allocated", can_zoom=True, yaxis=tozero, showlegend=True)


def _highest(time: Int64, level: Int64) -> tuple[Int64, Int64]:
    """The highest level of each of at most :data:`_MOST_POINTS` intervals of equal length, and the last level."""
    if len(time) <= _MOST_POINTS:
        return time, level
    length = max(int(time[-1] - time[0]) // (_MOST_POINTS - 1), 1)
    first = np.flatnonzero(np.diff((time - time[0]) // length, prepend=-1))
    return np.append(time[first], time[-1]), np.append(np.maximum.reduceat(level, first), level[-1])
