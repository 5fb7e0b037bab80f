"""Causes of a step's length with their places, and the bubble by what it is charged to."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from pptrace.analysis.result import StepReport
from pptrace.analysis.whole_run import Cause
from pptrace.model.units import milliseconds, percent
from pptrace.report.charts.base import add_bars, label_bars, lay_out, names_axis, plain
from pptrace.report.colours import BUBBLE, COMMUNICATION, GAIN, KIND_COLOURS, OTHER, PART_COLOURS

_MOST_PLACES = 12
_TEXT_PART = 0.6
"""Room for the texts beyond the ends of bars, in parts of what the bars take."""


def place_of(cause: Cause) -> str:
    """A cause with its place in words: "imbalance, stage 3"."""
    return ", ".join([cause.name, *(f"{kind} {name}" for kind, name in cause.where.items())])


def causes_chart(step: StepReport) -> go.Figure | None:
    """Each cause at each of its places, the largest first, ms; None where the step is not explained."""
    causes = sorted((cause for cause in step.causes or () if cause.ns), key=lambda cause: -abs(cause.ns))
    if not causes or not step.length_ns:
        return None
    shown = causes[:_MOST_PLACES]
    colours = [PART_COLOURS.get(cause.cause, OTHER) if cause.ns > 0 else GAIN for cause in shown]
    texts = [f"{milliseconds(cause.ns)} ms · {percent(cause.ns / step.length_ns)}" for cause in shown]
    values = [cause.ns / 1e6 for cause in shown]
    figure = go.Figure()
    add_bars(figure, values, colour=colours, customdata=texts, hovertemplate="%{customdata}<extra></extra>")
    label_bars(figure, values, texts)
    low, high = min(0, *values), max(0, *values)
    room = _TEXT_PART * (high - low) * (1.3 if low and high else 1)
    return lay_out(
        figure,
        30 * len(shown) + 76,
        "ms of the step",
        showlegend=False,
        margin={"l": 16, "r": 16, "t": 10, "b": 46},
        xaxis_range=[low - room if low else 0, high + room if high else 0],
        yaxis=names_axis([plain(place_of(cause)) for cause in shown]),
    )


def blame_chart(step: StepReport) -> go.Figure | None:
    """The bubble of all ranks by kind and by stage of what it is charged to, as shares; None where that is not known."""
    blame = step.blame
    if blame is None or not blame.total_ns:
        return None
    kinds = sorted(blame.by_kind.items(), key=lambda item: -item[1])
    stages = sorted(blame.by_stage.items())
    figure = go.Figure()
    _stack(figure, 0, {plain(kind): ns for kind, ns in kinds}, blame.total_ns, _COLOURS)
    _stack(figure, 1, {f"stage {stage}": ns for stage, ns in stages}, blame.total_ns, {})
    return lay_out(
        figure,
        186,
        "share of the bubble of all ranks",
        barmode="stack",
        showlegend=False,
        margin={"l": 16, "r": 16, "t": 10, "b": 46},
        xaxis={"tickformat": ".0%", "range": [0, 1.002]},
        yaxis=names_axis(["by kind", "by stage"]),
        uniformtext={"mode": "hide", "minsize": 10},
    )


_SHADES = ("#56708F", "#8D97A5")
_COLOURS: Mapping[str, str] = {
    **KIND_COLOURS,
    "transfer": COMMUNICATION,
    "plan": PART_COLOURS["structural"],
    "host": PART_COLOURS["host"],
    "idle": OTHER,
}


def _stack(figure: go.Figure, row: int, parts: Mapping[str, int], whole: int, colours: Mapping[str, str]) -> None:
    before = ""
    for name, ns in parts.items():
        before = colours.get(name) or next(shade for shade in _SHADES if shade != before)
        figure.add_bar(
            orientation="h",
            y=[row],
            x=[ns / whole],
            name=name,
            width=0.62,
            marker={"color": before, "line": {"width": 1, "color": BUBBLE}},
            text=[name],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": "#ffffff"},
            hovertemplate=f"<b>{name}</b><br>{milliseconds(ns)} ms, {percent(ns / whole)}<extra></extra>",
        )
