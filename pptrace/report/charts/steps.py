"""Steps of a run as a series over their numbers, with their distribution beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport, alike_steps
from pptrace.analysis.whole_run import StepSeries
from pptrace.model.units import milliseconds
from pptrace.report.charts.base import GRID, QUIET, lay_out
from pptrace.report.colours import COMPUTE, IDEAL, OTHER

_MOST_MARKERS = 3000
_FEW_STEPS = 12
_OF_DISTRIBUTION = 0.8
"""The place on the figure at which the distribution begins, as a share of its width."""


def steps_chart(report: Report, chosen: int | None = None) -> go.Figure | None:
    """The length of every step in ms over its number, outliers, changes of level, and a histogram on the same axis.

    None where no step's length is known. ``chosen`` is the number of a step to mark.
    """
    steps = alike_steps(report.steps)
    if not steps:
        return None
    series = report.step_series
    left_out = set(series.evaluations) if series else set()
    training = [step for step in steps if step.step not in left_out]
    figure = go.Figure()
    if series is not None:
        _levels(figure, series, [step.step for step in steps])
    _points(figure, training, "step", COMPUTE, "circle", 6 if len(training) <= _MOST_MARKERS else 3, line=True)
    _points(figure, [step for step in steps if step.step in left_out], "evaluation", OTHER, "x", 7)
    if series is not None:
        outliers = {outlier.step for outlier in series.outliers}
        _points(figure, [step for step in steps if step.step in outliers], "outlier", IDEAL, "diamond", 10)
    _mark(figure, [step for step in steps if step.step == chosen])
    if len(steps) == 1:
        whole = {"dtick": 1, "tickformat": "d"}
        return lay_out(figure, 240, "step", "ms", xaxis=whole, yaxis={"rangemode": "tozero"})
    _distribution(figure, training or steps)
    numbers = [step.step for step in steps]
    ticks: dict[str, Any] = {"tickvals": numbers} if len(numbers) <= _FEW_STEPS else {"tickformat": "d"}
    return lay_out(
        figure,
        340,
        "step",
        "ms",
        xaxis={"domain": [0, _OF_DISTRIBUTION - 0.02], **ticks},
        xaxis2={
            "gridcolor": GRID,
            "zeroline": False,
            "fixedrange": True,
            "domain": [_OF_DISTRIBUTION, 1],
            "anchor": "y",
            "title": {"text": "number of steps"},
            "dtick": -(-len(steps) // 8),
        },
        yaxis={"rangemode": "normal"},
        bargap=0.06,
    )


def steps_line(report: Report, chosen: int | None = None) -> go.Figure | None:
    """Lengths of all steps as a small line between the shortest and the longest, to choose one from; None of fewer than two."""
    steps = alike_steps(report.steps)
    if len(steps) < 2:
        return None
    figure = go.Figure()
    _points(figure, steps, "step", COMPUTE, "circle", 6 if len(steps) <= _MOST_MARKERS else 3, line=True)
    _mark(figure, [step for step in steps if step.step == chosen])
    ends = sorted({step.length_ns or 0 for step in (min(steps, key=_ms), max(steps, key=_ms))})
    ticks = {"tickvals": [end / 1e6 for end in ends], "ticktext": [f"{milliseconds(end)} ms" for end in ends]}
    lay_out(figure, 84, xaxis={"visible": False}, yaxis={**ticks, "rangemode": "normal"})
    return figure.update_layout(showlegend=False, margin={"l": 84, "r": 8, "t": 12, "b": 12})


def _points(
    figure: go.Figure, steps: Sequence[StepReport], name: str, colour: str, symbol: str, size: int, line: bool = False
) -> None:
    if not steps:
        return
    figure.add_scatter(
        x=[step.step for step in steps],
        y=[_ms(step) for step in steps],
        mode="lines+markers" if line else "markers",
        name=name,
        line={"width": 1, "color": QUIET},
        marker={"color": colour, "symbol": symbol, "size": size},
        customdata=[step.step for step in steps],
        hovertemplate=f"<b>{name} %{{x}}</b><br>%{{y:,.2f}} ms<extra></extra>",
    )


def _mark(figure: go.Figure, steps: Sequence[StepReport]) -> None:
    figure.add_scatter(
        x=[step.step for step in steps],
        y=[_ms(step) for step in steps],
        mode="markers",
        name="chosen",
        marker={"symbol": "circle-open", "size": 17, "color": "#D55E00", "line": {"width": 2.5}},
        customdata=[step.step for step in steps],
        hoverinfo="skip",
        showlegend=bool(steps),
    )


def _levels(figure: go.Figure, series: StepSeries, numbers: Sequence[int]) -> None:
    """The level of each stretch between changes, as a line; without changes the median."""
    starts = [min(numbers), *(change.step for change in series.changes), max(numbers)]
    heights = [change.before_ns for change in series.changes[:1]] or [series.median_ns]
    heights += [change.after_ns for change in series.changes]
    x: list[float | None] = []
    y: list[float | None] = []
    for begin, end, height in zip(starts, starts[1:], heights, strict=False):
        x += [begin - 0.5, end - 0.5 + (end == starts[-1]), None]
        y += [height / 1e6, height / 1e6, None]
    name = "typical step of each level" if series.changes else f"median {milliseconds(series.median_ns)} ms"
    figure.add_scatter(
        x=x, y=y, mode="lines", name=name, line={"color": "#E69F00", "width": 2.5}, hoverinfo="skip",
    )  # fmt: skip
    for change in series.changes:
        figure.add_vline(x=change.step - 0.5, line={"color": QUIET, "width": 1.5, "dash": "dot"})


def _distribution(figure: go.Figure, steps: Sequence[StepReport]) -> None:
    figure.add_histogram(
        y=[_ms(step) for step in steps],
        xaxis="x2",
        nbinsy=min(max(len(steps) // 4, 8), 40),
        marker={"color": COMPUTE, "line": {"width": 0}},
        name="distribution",
        showlegend=False,
        hovertemplate="%{y} ms: %{x} steps<extra></extra>",
    )


def _ms(step: StepReport) -> float:
    assert step.length_ns is not None
    return step.length_ns / 1e6
