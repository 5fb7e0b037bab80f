"""The page of bubbles and what-if: why a step took as long as it did, what would get it back, and changes to try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import Dash, Input, html, no_update

from dashboards.address import NOTHING, Query
from dashboards.answers import Answers
from dashboards.components import Node, lines, panel
from dashboards.exports import whole_files
from dashboards.pages import try_change
from dashboards.parts import (
    body_of_step,
    chart,
    data_table,
    empty,
    fill_in_parts,
    guarded,
    made_in_parts,
    no_steps,
    of_parts,
    with_files,
)
from dashboards.predicting import Progress
from dashboards.store import Loaded, Store
from dashboards.wishes import ASSUMED, wishes_of
from pptrace.errors import PptraceError
from pptrace.model.report_table import Amount
from pptrace.model.wording import counted
from pptrace.report.charts.changes import changes_chart
from pptrace.report.charts.steps import blame_chart, causes_chart
from pptrace.report.summary_figures import waterfall
from pptrace.report.tables.ranks import bounds_table
from pptrace.report.tables.waterfall import blame_table, causes_table
from pptrace.report.whatif import headline, replay_line, whatif_tables

_NOT_EXPLAINED = (
    "The trace lacks ops of the plan or ranks of the pipeline, there is no plan to compare with, or the "
    "ranks' times do not compare. The warnings of the overview say which."
)
_BASIS = "predicted from the measured costs of ops and messages"
_EVERY_MS = 700
_STOP = "stops after the change that is being predicted, and goes on from there"


def layout(loaded: Loaded, answers: Answers, query: Query = NOTHING) -> Node:
    """The place of the step, and below it, where there are steps, the gains of changes and the controls to try one."""
    parts: list[Node] = [html.Div(id="bubbles-body")]
    if loaded.steps and (reason := answers.why_no_prediction()):
        parts.append(empty("What another schedule would gain cannot be predicted", reason, "no-prediction"))
    elif loaded.steps:
        parts += [*try_change.layout(loaded, _BASIS, query)]
        parts += made_in_parts("whatif", "Predicted changes", "Predicting …", _STOP, _EVERY_MS)
    return html.Div(parts)


def register(app: Dash, store: Store, answers: Answers) -> None:
    body_of_step(app, store, "bubbles", body)
    try_change.register(app, answers)

    def show(is_paused: bool, shown: str | None, *assumed: Any) -> tuple[Any, ...]:
        return _answer(answers, dict(zip(ASSUMED, assumed, strict=True)), shown, is_paused=is_paused)

    fill_in_parts(app, "whatif", [Input(try_change.field(name), "value") for name in ASSUMED], show)


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


def _answer(answers: Answers, assumed: Mapping[str, object], shown: str | None, *, is_paused: bool) -> tuple[Any, ...]:
    """All that the page shows of the predictions; ``shown`` is the state of them that it has."""
    try:
        predicting = answers.predicting(wishes_of(assumed))
        if is_paused:
            predicting.pause()
        else:
            predicting.go_on()
        progress = predicting.progress()
    except PptraceError as err:
        return of_parts([empty("No prediction", str(err), "whatif-refused")], 0, 0, "", is_paused, "")
    state = f"{progress.done} of {progress.num_changes} {sorted(assumed.items())}"
    body = (
        no_update if state == shown else guarded(lambda: changes(progress, assumed), "No prediction", "whatif-refused")
    )
    count = "Finding out what can be changed …"
    if progress.num_changes is not None:
        count = f"{progress.done} of {counted(progress.num_changes, 'change')} predicted"
    return of_parts(body, progress.done, progress.num_changes, count, is_paused, state)


def changes(progress: Progress, assumed: Mapping[str, object]) -> list[Node]:
    """The predictions so far, the best first: the sentence, the front of gain and memory, and the tables."""
    if progress.predictions is None or not (progress.done or progress.is_over):
        return []
    result = progress.predictions.result
    best = headline(result)
    if not progress.is_over:
        best = f"So far: {best}" if result.advice is not None else "So far nothing that is sure to help."
    head = panel(
        "What would get it back",
        html.P(best, className="verdict", id="whatif-headline"),
        html.P(replay_line(result), className="note"),
        *([lines(result.warnings, "whatif-warnings")] if result.warnings else []),
    )
    with_files(head, whole_files("whatif.html"))
    if not result.scenarios:
        return [head]
    front = chart(
        "Gain and memory",
        changes_chart(result),
        "whatif-front",
        "No change that can be had was predicted.",
        note="up: more gained; left: less memory",
    )
    return [head, front, *(data_table(table, "whatif", options=assumed) for table in whatif_tables(result))]
