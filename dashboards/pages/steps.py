"""The steps page: how long steps take over the run, which ones stand out, and what differs in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, html
from dash.exceptions import PreventUpdate

from dashboards.answers import Answers
from dashboards.components import Node, panel, tile
from dashboards.parts import chart, data_table, guarded, no_steps
from dashboards.store import Loaded, Store
from pptrace.analysis.result import Finding, Report, StepReport
from pptrace.analysis.whole_run import StepSeries
from pptrace.model.units import counted, milliseconds
from pptrace.report.charts.steps import steps_chart
from pptrace.report.tables import Amount
from pptrace.report.tables.step_series import NO_LENGTH, differences_table, step_line
from pptrace.report.tables.steps import steps_table

_FOR_OUTLIERS, _FOR_CHANGES = 5, 10
"""Fewest steps of which outliers and changes of level are known."""


def layout(_loaded: Loaded, _answers: Answers) -> Node:
    return html.Div(id="steps-body")


def register(app: Dash, store: Store, _answers: Answers) -> None:
    @app.callback(Output("steps-body", "children"), Input("step", "value"))
    def show(step: int | None) -> Any:
        loaded = store.get()
        if loaded.analysis is None or (step is None and loaded.steps):
            raise PreventUpdate
        return guarded(lambda: body(loaded, step), "Steps", "steps-failed")

    choose: Any = app.clientside_callback
    choose(
        ClientsideFunction("pptrace", "clickedStep"),
        Output("step", "value", allow_duplicate=True),
        Input("steps-chart", "clickData"),
        prevent_initial_call=True,
    )


def body(loaded: Loaded, number: int | None) -> list[Node]:
    """The page with one step chosen."""
    assert loaded.analysis is not None
    report = loaded.analysis.report
    step = loaded.step(number) if number is not None else None
    if step is None:
        advice = "pptrace run records steps, and pptrace.mark marks those of any program."
        return [no_steps("No steps in these traces", report, advice)]
    series = report.step_series
    help_line = html.P("Click a step to choose it: the other pages then show it too.", className="help")
    picture = chart("Length of every step", steps_chart(report, step.step), "steps-chart", NO_LENGTH)
    picture.children.append(help_line)
    return [
        *([_tiles(series)] if series is not None else []),
        picture,
        _chosen(step, report),
        *_differences(series),
        *_findings(report),
        data_table(steps_table(report, step, Amount.WHOLE, "chosen"), "steps"),
    ]


def _tiles(series: StepSeries) -> Node:
    most = f"{milliseconds(series.p90_ns)} ms"
    extremes = f"{milliseconds(series.min_ns)} to {milliseconds(series.max_ns)} ms"
    left_out = f"{counted(len(series.evaluations), 'evaluation')} left out" if series.evaluations else "training steps"
    typical, outliers, changes = f"{milliseconds(series.median_ns)} ms", len(series.outliers), len(series.changes)
    tiles = (
        ("Steps", str(series.num_steps), left_out, "steps whose length is known", "steps-number"),
        ("Typical step", typical, "median", "the step in the middle by length", "steps-median"),
        ("Nine in ten at most", most, f"all: {extremes}", "the ninetieth percentile, and the extremes", "steps-most"),
        (
            "Outliers",
            _count(outliers, series, _FOR_OUTLIERS),
            _rule(series, _FOR_OUTLIERS),
            "a tenth and three scaled deviations above",
            "steps-out",
        ),
        (
            "Changes of level",
            _count(changes, series, _FOR_CHANGES),
            _rule(series, _FOR_CHANGES),
            "Pettitt's test at 0.5 %",
            "steps-changes",
        ),
    )
    return html.Div([tile(*entry) for entry in tiles], className="tiles")


def _count(number: int, series: StepSeries, least: int) -> str:
    """The number that was found; "–" where the steps are too few to find any."""
    return str(number) if number or series.num_steps >= least else "–"


def _rule(series: StepSeries, least: int) -> str:
    return "" if series.num_steps >= least else f"not known with fewer than {least} steps"


def _chosen(step: StepReport, report: Report) -> Node:
    series = report.step_series
    table = None if series is None else differences_table(series, step.step)
    details = [data_table(table, "step-differences")] if table is not None and table.rows else []
    return html.Div([panel(f"Step {step.step}", html.P(step_line(step, series)), id="chosen-step"), *details])


def _differences(series: StepSeries | None) -> Sequence[Node]:
    if series is None or not (series.outliers or series.changes):
        return []
    note = "what they have more of than the usual step"
    return [data_table(differences_table(series), "step-differences", note=note)]


def _findings(report: Report) -> Sequence[Node]:
    """The findings that are about some steps."""
    found: list[Finding] = [entry for entry in report.findings if {"step", "steps"} & set(entry.evidence)]
    if not found:
        return []
    cards = [html.Div([html.Strong(entry.title), html.P(entry.detail)], className="finding") for entry in found]
    return [panel("Findings about steps", *cards, id="step-findings")]
