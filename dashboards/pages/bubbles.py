"""The page of bubbles and what-if: why a step took as long as it did, what would get it back, and changes to try."""

from __future__ import annotations

from dash import Dash, html

from dashboards.address import NOTHING, Query
from dashboards.answers import Answers
from dashboards.components import Node
from dashboards.pages import predictions, try_change
from dashboards.parts import body_of_step, chart, data_table, empty, no_steps
from dashboards.store import Loaded, Store
from pptrace.model.report_table import Amount
from pptrace.report.charts.steps import blame_chart, causes_chart
from pptrace.report.summary_figures import waterfall
from pptrace.report.tables.ranks import bounds_table
from pptrace.report.tables.waterfall import blame_table, causes_table

_NOT_EXPLAINED = (
    "The trace lacks ops of the plan or ranks of the pipeline, there is no plan to compare with, or the "
    "ranks' times do not compare. The warnings of the overview say which."
)
_BASIS = "predicted from the measured costs of ops and messages"


def layout(loaded: Loaded, answers: Answers, query: Query = NOTHING) -> Node:
    """The place of the step, and below it, where there are steps, the gains of changes and the controls to try one."""
    parts: list[Node] = [html.Div(id="bubbles-body")]
    if loaded.steps and (reason := answers.why_no_prediction()):
        parts.append(empty("What another schedule would gain cannot be predicted", reason, "no-prediction"))
    elif loaded.steps:
        parts += [*try_change.layout(loaded, _BASIS, query), *predictions.layout()]
    return html.Div(parts)


def register(app: Dash, store: Store, answers: Answers) -> None:
    body_of_step(app, store, "bubbles", body)
    predictions.register(app, answers)
    try_change.register(app, answers)


def body(loaded: Loaded, number: int | None) -> list[Node]:
    """The parts and causes of the chosen step, and to what its bubble is charged."""
    assert loaded.analysis is not None
    step = loaded.step(number)
    if step is None:
        return [no_steps("No steps in these traces, so no bubbles", loaded.analysis.report)]
    if not step.has_pipeline:
        reason = "These steps are not of a pipeline: each rank's window is its own step, and the overview has what it did in it."
        return [empty("No pipeline, so no bubbles of one", reason, "no-pipeline")]
    if step.span_parts is None and step.causes is None and step.blame is None:
        # The other sides of messages may have no trace: the bubble has bounds then.
        has_bounds = any(rank.bubble_low_ns is not None and rank.bubble_ns is None for rank in step.ranks)
        bounds = [data_table(bounds_table(step, Amount.WHOLE), "ranks")] if has_bounds else []
        return [empty(f"Where step {step.step} went is not known", _NOT_EXPLAINED, "not-explained"), *bounds]
    of_step = {"step": step.step}
    went = None if step.span_parts is None or step.span_ns is None else waterfall(step)
    pictures = [
        chart(f"Where step {step.step} went", went, "bubbles-waterfall", _NOT_EXPLAINED),
        chart("Causes and their places", causes_chart(step), "bubbles-causes", _NOT_EXPLAINED),
    ]
    tables = [data_table(causes_table(step), "causes", options=of_step)] if step.causes else []
    if step.blame is not None and step.blame.total_ns > 0:
        tables.append(data_table(blame_table(step, Amount.WHOLE), "blame", options=of_step))
    note = "what took longer than usual, walked back from every bubble of every rank"
    return [
        html.Div(pictures, className="columns ragged"),
        chart("Who causes the bubble", blame_chart(step), "bubbles-blame", _NOT_EXPLAINED, note=note),
        html.Div(tables, className="columns ragged") if tables else html.Div(),
    ]
