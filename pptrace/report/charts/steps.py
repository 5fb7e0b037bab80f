"""Steps of a run as a series over their numbers, and their distribution.

Causes of a step's length with their places, and the bubble by what it is charged to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport, alike_steps
from pptrace.analysis.whole_run import Cause, StepSeries
from pptrace.model.units import milliseconds, percent
from pptrace.report.charts.base import GRID, QUIET, add_bars, add_lines, label_bars, lay_out, names_axis, plain
from pptrace.report.colours import BUBBLE, COMMUNICATION, COMPUTE, GAIN, IDEAL, KIND_COLOURS, OTHER, PART_COLOURS

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
    stretches = zip(starts, starts[1:], heights, strict=False)
    lines = [(begin - 0.5, ns / 1e6, end - 0.5 + (end == starts[-1]), ns / 1e6) for begin, end, ns in stretches]
    name = "typical step of each level" if series.changes else f"median {milliseconds(series.median_ns)} ms"
    add_lines(figure, lines, name=name, line={"color": "#E69F00", "width": 2.5})
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
