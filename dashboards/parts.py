"""Parts of pages that several have: charts and tables with their files, empty states, and pages that never fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate
from msgspec.structs import replace

from dashboards.components import Node, graph, in_browser, lines, panel, report_table
from dashboards.exports import picture_files, table_files
from dashboards.store import Loaded, Store
from pptrace.analysis.report import Report
from pptrace.errors import PptraceError, mistake_of
from pptrace.model.report_table import ReportTable
from pptrace.report.tables import warning_lines

_log = logging.getLogger(__name__)
_MOST_HEIGHT = 640
"""px of a picture, as the style of pictures has it."""
MOST_ROWS = 400
"""Rows of a table that a page shows; its files have all of them."""


def chart(title: str, figure: Any | None, id: str, why_not: str, note: str = "") -> Node:
    """A figure in a panel with its files, or the reason why there is none."""
    if figure is None:
        return panel(title, html.P(why_not, className="empty", id=id))
    height = min(figure.layout.height, _MOST_HEIGHT)
    names: Any = {"aria-label": title}
    box = html.Div(
        graph(figure, id), className="picture-box", role="figure", style={"minHeight": f"{height}px"}, **names
    )
    return with_files(panel(title, box, note=note), picture_files(id))


def data_table(content: ReportTable, file: str, note: str = "", options: Mapping[str, object] | None = None) -> Node:
    """A table of the report in a panel with the files of all its rows."""
    return with_files(report_table(shortened(content), note), table_files(file, options))


def shortened(content: ReportTable) -> ReportTable:
    """The first rows of a long table, with a line that says how many more its files have."""
    notes = tuple(note.replace("--all shows them", "in the files") for note in content.notes)
    left = len(content.rows) - MOST_ROWS
    if left <= 0:
        return replace(content, notes=notes)
    return replace(content, rows=content.rows[:MOST_ROWS], notes=(f"… {left:,} more: in the files", *notes))


def with_files(box: Node, files: Node) -> Node:
    """The panel with links to files in its head."""
    box.children[0].children.append(files)
    return box


def empty(title: str, reason: str, id: str, *advice: str) -> Node:
    """The state of a page that has nothing to show, with the reason."""
    texts = [html.P(reason), *(html.P(line, className="note") for line in advice)]
    return html.Section([html.H2(title), *texts], className="panel problem quiet", id=id)


def no_steps(title: str, report: Report, *advice: str) -> Node:
    """The state of a page of traces in which no step was recognised, with what the report says about them."""
    box = empty(
        title, "Neither ops of a microbatch nor marked steps were recognised in these traces.", "no-steps", *advice
    )
    items = warning_lines(report)
    box.children += [lines(items, "no-steps-why")] if items else []
    return box


def guarded(make: Callable[[], Sequence[Node]], title: str, id: str) -> list[Node]:
    """Parts of a page, or the reason in place of them: one line, never a traceback."""
    try:
        return list(make())
    except PptraceError as err:
        return [empty(title, str(err), id)]
    except Exception as err:  # a page that says so serves its reader better than an empty one
        _log.exception("%s failed", title)
        return [empty(title, mistake_of(err), id)]


def waiting(*children: Node, id: str) -> Node:
    """A place that is filled later, with a spinner of its own while it is."""
    return dcc.Loading(
        html.Div(list(children), id=id),
        type="dot",
        color="#2C7A8C",
        delay_show=200,
        parent_className="filled-later",
        overlay_style={"visibility": "visible", "opacity": 0.5},
    )


def made_in_parts(id: str, label: str, begins: str, stop: str, every_ms: int) -> list[Node]:
    """A bar that tells how much there is of what takes long, with a button that stops it, and the place of what there is."""
    names: Any = {"aria-label": label}
    bar = html.Progress(id=f"{id}-progress", **names)
    button = html.Button("Stop", id=f"{id}-stop", type="button", className="tool", title=stop)
    count = html.Span(begins, id=f"{id}-count", role="status")
    return [
        html.Div([bar, count, button], className="predicting", id=f"{id}-bar"),
        html.Div(id=f"{id}-body"),
        dcc.Store(id=f"{id}-shown"),
        dcc.Interval(id=f"{id}-tick", interval=every_ms),
    ]


def fill_in_parts(app: Dash, id: str, given: Sequence[Any], answer: Callable[..., tuple[Any, ...]]) -> None:
    """Fill it: ``answer`` takes whether it is stopped, the state that the page shows and the values ``given``; it makes some more
    and returns what :func:`of_parts` does.
    """

    @app.callback(
        Output(f"{id}-body", "children"),
        Output(f"{id}-bar", "className"),
        Output(f"{id}-progress", "value"),
        Output(f"{id}-progress", "max"),
        Output(f"{id}-count", "children"),
        Output(f"{id}-stop", "children"),
        Output(f"{id}-tick", "disabled"),
        Output(f"{id}-shown", "data"),
        Input(f"{id}-tick", "n_intervals"),
        Input(f"{id}-stop", "n_clicks"),
        State(f"{id}-shown", "data"),
        *given,
        running=[(Output(f"{id}-tick", "max_intervals"), 0, -1)],  # a question drops the answer of the one before
    )
    def show(_tick: int | None, clicks: int | None, shown: str | None, *values: Any) -> Any:
        return answer(bool((clicks or 0) % 2), shown, *values)


def of_parts(body: Any, done: int, total: int | None, count: str, is_paused: bool, state: str) -> tuple[Any, ...]:
    """All that a page shows of what is made in parts, of which so many are done; ``total`` is None while it is not known."""
    is_over = done == total
    place, button = "gone" if is_over else "predicting", "Go on" if is_paused else "Stop"
    return (body, place, f"{done}", f"{total or 1}", count, button, is_paused or is_over, state)


def body_of_step(app: Dash, store: Store, page: str, make: Callable[[Loaded, int | None], Sequence[Node]]) -> None:
    """Fill ``PAGE-body`` with what the chosen step has, and again when another one is chosen."""

    @app.callback(Output(f"{page}-body", "children"), Input("step", "value"))
    def show(step: int | None) -> Any:
        loaded = store.get()
        if loaded.analysis is None or (step is None and loaded.steps):
            raise PreventUpdate
        return guarded(lambda: make(loaded, step), page.capitalize(), f"{page}-failed")


def choose_step_on(app: Dash, picture: str) -> None:
    """Choose the step that is clicked on a picture of steps (``assets/controls.js``)."""
    step = Output("step", "value", allow_duplicate=True)
    in_browser(app, "pptrace", "clickedStep", step, Input(picture, "clickData"), prevent_initial_call=True)


def reasons_panel(reasons: Sequence[str], id: str) -> list[Node]:
    """A note on what is not known, and why; nothing without reasons."""
    return [panel("What is not known, and why", lines(reasons, id))] if reasons else []
