"""The part of the bubbles page with what would get the time back: predictions as they are made, the best first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import Dash, Input, html, no_update

from dashboards.answers import Answers
from dashboards.components import Node, lines, panel
from dashboards.exports import whole_files
from dashboards.pages import try_change
from dashboards.parts import chart, data_table, empty, fill_in_parts, guarded, made_in_parts, of_parts, with_files
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
    return made_in_parts("whatif", "Predicted changes", "Predicting …", _STOP, _EVERY_MS)


def register(app: Dash, answers: Answers) -> None:
    def show(is_paused: bool, shown: str | None, *assumed: Any) -> tuple[Any, ...]:
        return _answer(answers, dict(zip(ASSUMED, assumed, strict=True)), shown, is_paused=is_paused)

    fill_in_parts(app, "whatif", [Input(try_change.field(name), "value") for name in ASSUMED], show)


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
