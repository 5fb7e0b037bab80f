"""The steps page: how long steps take over the run, which ones stand out, and what differs in them."""

from __future__ import annotations

from dash import Dash, html

from dashboards.components import Node, panel, tile
from dashboards.parts import body_of_step, chart, choose_step_on, data_table, no_steps
from dashboards.store import Loaded, Store
from pptrace.analysis.whole_run import StepSeries
from pptrace.model.report_table import Amount
from pptrace.model.units import counted, milliseconds
from pptrace.report.charts.steps import steps_chart
from pptrace.report.tables.step_series import NO_LENGTH, differences_table, length_of, step_line, steps_table

_FOR_OUTLIERS, _FOR_CHANGES = 5, 10
"""Fewest steps of which outliers and changes of level are known."""


_SPANS = "the whole length of one of them is not known"


def layout(*_: object) -> Node:
    return html.Div(id="steps-body")


def register(app: Dash, store: Store, *_: object) -> None:
    body_of_step(app, store, "steps", body)
    choose_step_on(app, "steps-chart")


def body(loaded: Loaded, number: int | None) -> list[Node]:
    """The page with one step chosen."""
    assert loaded.analysis is not None
    report = loaded.analysis.report
    step = loaded.step(number)
    if step is None:
        advice = "pptrace run records steps, and pptrace.mark marks those of any program."
        return [no_steps("No steps in these traces", report, advice)]
    series = report.step_series
    help_line = html.P("Click a step to choose it: the other pages then show it too.", className="help")
    title, note = (
        ("Pipeline span of every step", _SPANS) if length_of(step, series)[1] else ("Length of every step", "")
    )
    picture = chart(title, steps_chart(report, step.step), "steps-chart", NO_LENGTH, note=note)
    picture.children.append(help_line)
    tiles, differences, findings = [], [], []
    if series is not None:
        tiles = [_tiles(series, " of pipeline spans" if length_of(step, series)[1] else "")]
        if series.outliers or series.changes:
            note = "what they have more of than the usual step"
            differences = [data_table(differences_table(series), "step-differences", note=note)]
    found = [entry for entry in report.findings if {"step", "steps"} & set(entry.evidence)]
    if found:
        cards = [html.Div([html.Strong(entry.title), html.P(entry.detail)], className="finding") for entry in found]
        findings = [panel("Findings about steps", *cards, id="step-findings")]
    chosen = panel(f"Step {step.step}", html.P(step_line(step, series)), id="chosen-step")
    table = None if series is None else differences_table(series, step.step)
    of_chosen = [data_table(table, "step-differences")] if table is not None and table.rows else []
    every = data_table(steps_table(report, step, Amount.WHOLE, "chosen"), "steps")
    return [*tiles, picture, html.Div([chosen, *of_chosen]), *differences, *findings, every]


def _tiles(series: StepSeries, of_spans: str) -> Node:
    most = f"{milliseconds(series.p90_ns)} ms"
    extremes = f"{milliseconds(series.min_ns)} to {milliseconds(series.max_ns)} ms"
    left_out = f"{counted(len(series.evaluations), 'evaluation')} left out" if series.evaluations else "training steps"
    typical, outliers, changes = f"{milliseconds(series.median_ns)} ms", len(series.outliers), len(series.changes)

    def tile_of(label: str, number: int, least: int, hint: str, id: str) -> Node:
        """The findings; "–" where the steps are too few to find any."""
        is_known = series.num_steps >= least
        rule = "" if is_known else f"not known with fewer than {least} steps"
        return tile(label, str(number) if number or is_known else "–", rule, hint, id)

    deviations = "a tenth and three scaled deviations above"
    tiles = (
        tile("Steps", str(series.num_steps), left_out, "steps whose length is known", "steps-number"),
        tile("Typical step", typical, f"median{of_spans}", "the step in the middle by length", "steps-median"),
        tile(
            "Nine in ten at most", most, f"all: {extremes}", "the ninetieth percentile, and the extremes", "steps-most"
        ),
        tile_of("Outliers", outliers, _FOR_OUTLIERS, deviations, "steps-out"),
        tile_of("Changes of level", changes, _FOR_CHANGES, "Pettitt's test at 0.5 %", "steps-changes"),
    )
    return html.Div(list(tiles), className="tiles")
