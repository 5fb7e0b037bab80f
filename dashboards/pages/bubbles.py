"""The page of bubbles and what-if: why a step took as long as it did, what would get it back, and changes to try."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, html
from dash.exceptions import PreventUpdate

from dashboards.address import NOTHING, Query
from dashboards.answers import Answers
from dashboards.components import Node
from dashboards.pages import predictions, try_change
from dashboards.parts import chart, data_table, empty, guarded, no_steps
from dashboards.store import Loaded, Store
from pptrace.analysis.result import StepReport
from pptrace.report.charts.causes import blame_chart, causes_chart
from pptrace.report.figures import waterfall
from pptrace.report.tables import Amount
from pptrace.report.tables.blame import blame_table
from pptrace.report.tables.ranks import bounds_table
from pptrace.report.tables.waterfall import causes_table

_NOT_EXPLAINED = (
    "The trace lacks ops of the plan or ranks of the pipeline, there is no plan to compare with, or the "
    "ranks' times do not compare. The warnings of the overview say which."
)
_BASIS = "predicted from the measured costs of ops and messages"


def layout(loaded: Loaded, answers: Answers, query: Query = NOTHING) -> Node:
    return html.Div([html.Div(id="bubbles-body"), *(_whatif(loaded, answers, query) if loaded.steps else [])])


def _whatif(loaded: Loaded, answers: Answers, query: Query) -> list[Node]:
    """The gains of changes, and the controls to try one; the reason in their place where nothing can be predicted."""
    if reason := answers.why_no_prediction():
        return [empty("What another schedule would gain cannot be predicted", reason, "no-prediction")]
    return [
        *try_change.layout(loaded, _BASIS, query),
        *predictions.layout(),
    ]


def register(app: Dash, store: Store, answers: Answers) -> None:
    @app.callback(Output("bubbles-body", "children"), Input("step", "value"))
    def show(step: int | None) -> Any:
        loaded = store.get()
        if loaded.analysis is None or (step is None and loaded.steps):
            raise PreventUpdate
        return guarded(lambda: body(loaded, step), "Bubbles", "bubbles-failed")

    predictions.register(app, answers)
    try_change.register(app, answers)


def body(loaded: Loaded, number: int | None) -> list[Node]:
    """The parts and causes of the chosen step, and to what its bubble is charged."""
    assert loaded.analysis is not None
    step = loaded.step(number) if number is not None else None
    if step is None:
        return [no_steps("No steps in these traces, so no bubbles", loaded.analysis.report)]
    if not step.has_pipeline:
        reason = "These steps are not of a pipeline: each rank's window is its own step, and the overview has what it did in it."
        return [empty("No pipeline, so no bubbles of one", reason, "no-pipeline")]
    if step.span_parts is None and step.causes is None and step.blame is None:
        return [empty(f"Where step {step.step} went is not known", _NOT_EXPLAINED, "not-explained"), *_bounds(step)]
    of_step = {"step": step.step}
    pictures = [
        chart(f"Where step {step.step} went", _waterfall(step), "bubbles-waterfall", _NOT_EXPLAINED),
        chart("Causes and their places", causes_chart(step), "bubbles-causes", _NOT_EXPLAINED),
    ]
    tables = [data_table(causes_table(step), "causes", options=of_step)] if step.causes else []
    tables += [data_table(blame_table(step, Amount.WHOLE), "blame", options=of_step)] if _has_blame(step) else []
    note = "what took longer than usual, walked back from every bubble of every rank"
    return [
        html.Div(pictures, className="columns ragged"),
        chart("Who causes the bubble", blame_chart(step), "bubbles-blame", _NOT_EXPLAINED, note=note),
        html.Div(tables, className="columns ragged") if tables else html.Div(),
    ]


def _bounds(step: StepReport) -> list[Node]:
    """Bounds of the bubble, where the other sides of messages have no trace."""
    if all(rank.bubble_low_ns is None or rank.bubble_ns is not None for rank in step.ranks):
        return []
    return [data_table(bounds_table(step, Amount.WHOLE), "ranks")]


def _waterfall(step: StepReport) -> Any:
    return None if step.span_parts is None or step.span_ns is None else waterfall(step)


def _has_blame(step: StepReport) -> bool:
    return step.blame is not None and step.blame.total_ns > 0
