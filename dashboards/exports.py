"""Files of what the pages show: tables as CSV and JSON, charts as PNG and SVG, and the report of the whole run.

Addresses name a table of a fixed list, never a path: ``/export/links.csv``, ``/export/causes.json?step=4``,
``/export/plan-idle.csv?schedule=1f1b&pp=4&microbatches=8&forward=1&backward=2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from dash import Dash, html
from flask import Response, abort, request

from dashboards.answers import Answers
from dashboards.components import Node
from dashboards.paper import PAPER_TABLES, on_paper
from dashboards.tables import TABLES, TableRequest
from dashboards.wishes import wishes_of
from pptrace.errors import PptraceError, UsageError
from pptrace.report.to_files import csv_of, json_of

_TYPES = {"csv": "text/csv", "json": "application/json"}
_WHOLE: Mapping[str, tuple[str, Callable[[Answers], str]]] = {
    "report.html": ("text/html", lambda answers: answers.run().to_html()),
    "report.json": ("application/json", lambda answers: answers.run().to_json()),
    "perfetto.json": ("application/json", lambda answers: answers.run().to_perfetto()),
    "whatif.html": ("text/html", lambda answers: answers.whatif(wishes_of(request.args)).to_html()),
    "comparison.json": ("application/json", lambda answers: answers.comparison().to_json()),
    "comparison.html": ("text/html", lambda answers: answers.comparison().to_html()),
}


def register(app: Dash, answers: Answers) -> None:
    """Answer ``/export/NAME.FORMAT``."""

    def export(name: str) -> Response:
        table, _, kind = name.rpartition(".")
        try:
            if name in _WHOLE:
                mime, make = _WHOLE[name]
                return _download(make(answers), name, mime)
            if kind not in _TYPES:
                raise LookupError("there is no such file")
            step, options = request.args.get("step"), request.args
            if table in PAPER_TABLES:
                rows = list(PAPER_TABLES[table](on_paper(options)))
            elif table in TABLES:
                rows = list(TABLES[table].rows(TableRequest(answers, None if step is None else _whole(step), options)))
            else:
                raise LookupError("there is no such file")
        except (PptraceError, ValueError) as err:
            abort(400, str(err))
        except LookupError as err:
            abort(404, str(err))
        return _download(csv_of(rows) if kind == "csv" else json_of(rows), name, _TYPES[kind])

    app.server.add_url_rule("/export/<name>", view_func=export, methods=["GET"])


def _whole(step: str) -> int:
    try:
        return int(step)
    except ValueError:
        raise UsageError(f"step={step!r}: expected a whole number") from None


def _download(text: str, name: str, mime: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="pptrace-{name}"', "X-Content-Type-Options": "nosniff"}
    return Response(text, mimetype=mime, headers=headers)


def table_files(name: str, options: Mapping[str, object] | None = None) -> Node:
    """Links to the CSV and the JSON of a table."""
    assert name in TABLES or name in PAPER_TABLES
    query = urlencode({key: value for key, value in (options or {}).items() if value not in (None, "")})
    links = [
        _link(kind.upper(), f"{name}.{kind}", f"this table as {kind.upper()}, unrounded", query) for kind in _TYPES
    ]
    return html.Span(links, className="files")


def _link(label: str, name: str, hint: str, query: str = "") -> Node:
    href = f"/export/{name}" + (f"?{query}" if query else "")
    return html.A(label, href=href, download=f"pptrace-{name}", title=hint)


def picture_files(id: str) -> Node:
    """Buttons that save a chart as PNG and SVG; ``assets/pictures.js`` does it."""
    buttons = []
    for kind in ("png", "svg"):
        data: dict[str, Any] = {"data-picture": id, "data-format": kind}
        buttons.append(html.Button(kind.upper(), type="button", title=f"this chart as {kind.upper()}", **data))
    return html.Span(buttons, className="files")


def whole_files(*names: str) -> Node:
    """Links to files of a whole page."""
    assert set(names) <= set(_WHOLE)
    links = [_link(name.rpartition(".")[2].upper(), name, f"pptrace-{name}") for name in names]
    return html.Span(links, className="files")


def whole_run() -> Node:
    """A button that saves the page as it is shown (``assets/page_file.js``), and links to the report of the whole run."""
    page = html.Button("HTML", id="save-page", type="button", title="as it is shown, one file that loads nothing")
    links = [
        _link("HTML", "report.html", "one file that loads nothing"),
        _link("JSON", "report.json", "pptrace.report/1"),
        _link("Perfetto", "perfetto.json", "for ui.perfetto.dev"),
    ]
    of_page, of_run = html.Span([page], className="files"), html.Span(links, className="files")
    return html.Footer(["This page as a file:", of_page, "This run:", of_run], id="whole-run")
