"""Files of what the pages show: tables as CSV and JSON, charts as PNG and SVG, and the report of the whole run.

Addresses name a table of a fixed list, never a path: ``/export/links.csv``, ``/export/causes.json?step=4``,
``/export/plan-idle.csv?schedule=1f1b&pp=4&microbatches=8&forward=1&backward=2``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

from dash import Dash, html
from flask import Response, abort, request

from dashboards.answers import Answers
from dashboards.components import Node
from dashboards.paper import PAPER_TABLES, on_paper
from dashboards.tables import TABLES, Asked
from dashboards.wishes import wishes_of
from pptrace.errors import PptraceError, UsageError
from pptrace.report.rows import csv_of, json_of

_NO_OPTIONS: Mapping[str, object] = {}
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
            rows = list(_rows(table, answers))
        except (PptraceError, ValueError) as err:
            abort(400, str(err))
        except LookupError as err:
            abort(404, str(err))
        return _download(csv_of(rows) if kind == "csv" else json_of(rows), name, _TYPES[kind])

    app.server.add_url_rule("/export/<name>", view_func=export, methods=["GET"])


def _rows(table: str, answers: Answers) -> Iterable[Any]:
    """The rows of a table of the run, or of a schedule on paper.

    Raises:
        LookupError: there is no such table or step.
    """
    if table in PAPER_TABLES:
        return PAPER_TABLES[table](on_paper(request.args))
    if table not in TABLES:
        raise LookupError("there is no such file")
    return TABLES[table].rows(Asked(answers, _number(request.args.get("step")), request.args))


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        raise UsageError(f"step={text!r}: expected a whole number") from None


def _download(text: str, name: str, mime: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="pptrace-{name}"', "X-Content-Type-Options": "nosniff"}
    return Response(text, mimetype=mime, headers=headers)


def table_files(name: str, options: Mapping[str, object] = _NO_OPTIONS) -> Node:
    """Links to the CSV and the JSON of a table."""
    assert name in TABLES or name in PAPER_TABLES
    query = urlencode({key: value for key, value in options.items() if value not in (None, "")})
    links = [
        html.A(
            kind.upper(),
            href=f"/export/{name}.{kind}" + (f"?{query}" if query else ""),
            download=f"pptrace-{name}.{kind}",
            title=f"this table as {kind.upper()}, unrounded",
        )
        for kind in _TYPES
    ]
    return html.Span(links, className="files")


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
    links = [
        html.A(
            name.rpartition(".")[2].upper(), href=f"/export/{name}", download=f"pptrace-{name}", title=f"pptrace-{name}"
        )
        for name in names
    ]
    return html.Span(links, className="files")


def whole_run() -> Node:
    """A button that saves the page as it is shown (``assets/page_file.js``), and links to the report of the whole run."""
    page = html.Button("HTML", id="save-page", type="button", title="as it is shown, one file that loads nothing")
    files = (("HTML", "report.html", "one file that loads nothing"), ("JSON", "report.json", "pptrace.report/1"))
    links = [
        html.A(label, href=f"/export/{name}", download=f"pptrace-{name}", title=hint)
        for label, name, hint in (*files, ("Perfetto", "perfetto.json", "for ui.perfetto.dev"))
    ]
    parts: list[Node] = [
        "This page as a file:",
        html.Span([page], className="files"),
        "This run:",
        html.Span(links, className="files"),
    ]
    return html.Footer(parts, id="whole-run")
