"""The part of the bubbles page with what would get the time back: predictions as they are made, the best first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update

from dashboards.answers import Answers
from dashboards.components import Node, lines, panel
from dashboards.exports import whole_files
from dashboards.pages import try_change
from dashboards.parts import chart, data_table, empty, guarded, with_files
from dashboards.predicting import Progress
from dashboards.wishes import ASSUMED, wishes_of
from pptrace.errors import PptraceError
from pptrace.model.wording import counted
from pptrace.report.charts.changes import changes_chart
from pptrace.report.whatif import headline, replay_line, whatif_tables

_EVERY_MS = 700
_STOP = "stops after the change that is being predicted, and goes on from there"


def layout() -> list[Node]:
    """The bar that tells how many changes are predicted, with its button, and the place of the predictions."""
    label: Any = {"aria-label": "Predicted changes"}
    bar = html.Progress(id="whatif-progress", **label)
    stop = html.Button("Stop", id="whatif-stop", type="button", className="tool", title=_STOP)
    count = html.Span("Predicting …", id="whatif-count", role="status")
    return [
        html.Div([bar, count, stop], className="predicting", id="whatif-bar"),
        html.Div(id="whatif-body"),
        dcc.Store(id="whatif-shown"),
        dcc.Interval(id="whatif-tick", interval=_EVERY_MS),
    ]


def register(app: Dash, answers: Answers) -> None:
    @app.callback(
        Output("whatif-body", "children"),
        Output("whatif-bar", "className"),
        Output("whatif-progress", "value"),
        Output("whatif-progress", "max"),
        Output("whatif-count", "children"),
        Output("whatif-stop", "children"),
        Output("whatif-tick", "disabled"),
        Output("whatif-shown", "data"),
        Input("whatif-tick", "n_intervals"),
        Input("whatif-stop", "n_clicks"),
        *(Input(try_change.field(name), "value") for name in ASSUMED),
        State("whatif-shown", "data"),
        running=[(Output("whatif-tick", "max_intervals"), 0, -1)],  # a question drops the answer of the one before
    )
    def show(_tick: int | None, clicks: int | None, *values: Any) -> Any:
        *assumed, shown = values
        return _answer(answers, dict(zip(ASSUMED, assumed, strict=True)), shown, is_paused=bool((clicks or 0) % 2))


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
        return ([empty("No prediction", str(err), "whatif-refused")], "gone", "0", "1", "", "Stop", True, "")
    state = f"{progress.done} of {progress.num_changes} {sorted(assumed.items())}"
    body = (
        no_update if state == shown else guarded(lambda: changes(progress, assumed), "No prediction", "whatif-refused")
    )
    place = "gone" if progress.is_over else "predicting"
    most = "1" if progress.num_changes is None else f"{progress.num_changes}"
    button = "Go on" if is_paused else "Stop"
    count = "Finding out what can be changed …"
    if progress.num_changes is not None:
        count = f"{progress.done} of {counted(progress.num_changes, 'change')} predicted"
    return (body, place, f"{progress.done}", most, count, button, is_paused or progress.is_over, state)


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
