"""Files of what the pages show: tables as CSV and JSON, charts as PNG and SVG, and the report of the whole run.

Addresses name a table of a fixed list, never a path: ``/export/links.csv``, ``/export/causes.json?step=4``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlencode

import pandas as pd
from dash import Dash, html
from flask import Response, abort, request

from dashboards.answers import Answers
from dashboards.components import Node
from dashboards.wishes import wishes_of
from pptrace.analysis.result import Report, StepReport
from pptrace.errors import PptraceError
from pptrace.report.rows import csv_of, json_of


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a table: the run, the step, and options."""

    answers: Answers
    step: int | None
    options: Mapping[str, str]

    @property
    def report(self) -> Report:
        return self.answers.run().report

    def the_step(self) -> StepReport:
        """The step; the typical one where none is named.

        Raises:
            LookupError: there is no such step.
        """
        if self.step is None:
            step = self.report.typical_step
        else:
            step = next((step for step in self.report.steps if step.step == self.step), None)
        if step is None:
            raise LookupError("there is no such step")
        return step


def _frame(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table of the API, None where it has <NA>."""
    columns = {str(name): [None if value is pd.NA else value for value in table[name].tolist()] for name in table}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _differences(asked: Asked) -> Iterable[Any]:
    series = asked.report.step_series
    entries: tuple[Any, ...] = () if series is None else (*series.outliers, *series.changes)
    for entry in entries:
        fixed = {name: value for name, value in asdict(entry).items() if name not in ("differences", "ops")}
        for cause in entry.differences or (None,):
            yield fixed | ({} if cause is None else asdict(cause))


def _comms(asked: Asked) -> Iterable[Any]:
    for rank in asked.the_step().ranks:
        for comm in rank.comms:
            yield {"rank": rank.rank, "stage": rank.stage} | asdict(comm)


def _comm_totals(asked: Asked) -> Iterable[Any]:
    for entry in asked.report.device:
        for comm in entry.comms:
            yield {"rank": entry.rank} | asdict(comm)


def _blame(asked: Asked) -> Iterable[Any]:
    blame = asked.the_step().blame
    if blame is not None:
        for of, charged in (("rank", blame.by_rank), ("stage", blame.by_stage), ("kind", blame.by_kind)):
            yield from ({"of": of, "name": name, "ns": ns} for name, ns in charged.items())


def _waterfall(asked: Asked) -> Iterable[Any]:
    return ({"part": name, "ns": ns} for name, ns in (asked.the_step().span_parts or {}).items())


TABLES: Mapping[str, Callable[[Asked], Iterable[Any]]] = {
    "steps": lambda asked: _frame(asked.answers.run().steps),
    "ranks": lambda asked: _frame(asked.answers.run().ranks),
    "step-differences": _differences,
    "findings": lambda asked: asked.report.findings,
    "waterfall": _waterfall,
    "causes": lambda asked: asked.the_step().causes or (),
    "blame": _blame,
    "comms": _comms,
    "whatif": lambda asked: asked.answers.whatif(wishes_of(asked.options)).result.scenarios,
    "comm-totals": _comm_totals,
    "links": lambda asked: asked.report.links,
    "late-ranks": lambda asked: asked.report.late_ranks,
    "interconnect": lambda asked: () if asked.report.interconnect is None else asked.report.interconnect.collectives,
    "memory": lambda asked: () if asked.report.memory is None else asked.report.memory.ranks,
    "stages": lambda asked: asked.answers.stages(),
    "experts": lambda asked: () if asked.report.experts is None else asked.report.experts.layers,
    "expert-ranks": lambda asked: () if asked.report.experts is None else asked.report.experts.ranks,
    "expert-calls": lambda asked: () if asked.report.experts is None else asked.report.experts.calls,
    "compared-parts": lambda asked: asked.answers.comparison().result.parts,
    "compared-facts": lambda asked: asked.answers.comparison().result.facts,
    "hang": lambda asked: _frame(asked.answers.hang().edges),
}
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
            if table not in TABLES or kind not in _TYPES:
                abort(404, "there is no such file")
            rows = list(TABLES[table](Asked(answers, _number(request.args.get("step")), request.args)))
        except (PptraceError, ValueError) as err:
            abort(400, str(err))
        except LookupError as err:
            abort(404, str(err))
        return _download(csv_of(rows) if kind == "csv" else json_of(rows), name, _TYPES[kind])

    app.server.add_url_rule("/export/<name>", view_func=export, methods=["GET"])


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _download(text: str, name: str, mime: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="pptrace-{name}"', "X-Content-Type-Options": "nosniff"}
    return Response(text, mimetype=mime, headers=headers)


def table_files(name: str, options: Mapping[str, object] = _NO_OPTIONS) -> Node:
    """Links to the CSV and the JSON of a table."""
    assert name in TABLES
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
    """Links to the report of the whole run."""
    files = (("HTML", "report.html", "one file that loads nothing"), ("JSON", "report.json", "pptrace.report/1"))
    links = [
        html.A(label, href=f"/export/{name}", download=f"pptrace-{name}", title=hint)
        for label, name, hint in (*files, ("Perfetto", "perfetto.json", "for ui.perfetto.dev"))
    ]
    return html.Footer(["This run as a file:", html.Span(links, className="files")], id="whole-run")
