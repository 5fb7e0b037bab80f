"""The comparison page: two runs, step against step and part against part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import Dash, Input, Output, html
from msgspec.structs import replace

from dashboards.answers import Answers
from dashboards.components import Node, lines, panel, report_table
from dashboards.exports import whole_files
from dashboards.parts import chart, data_table, empty, guarded, waiting, with_files
from dashboards.store import Loaded, Store
from dashboards.tables import TABLES
from pptrace.analysis.compare.result import PartChange
from pptrace.model.units import milliseconds
from pptrace.report.charts.base import with_minus
from pptrace.report.charts.changes import causes_of_both, changes_of_parts
from pptrace.report.summary_figures import waterfall
from pptrace.report.tables import Amount, ReportTable
from pptrace.report.tables.comparison import comparison_tables

_NOT_EXPLAINED = "Not known: the traces lack ops of the plan, or there is no plan to compare with."


def layout(_loaded: Loaded, answers: Answers) -> Node:
    if answers.other is None:
        return empty(
            "One run alone",
            "This page says whether a second run is slower, by how much, how certain that is, and in which parts.",
            "no-other",
            "Start with: pptrace dashboard A --compare B",
        )
    return waiting(id="compare-body")


def register(app: Dash, store: Store, answers: Answers) -> None:
    @app.callback(Output("compare-body", "children"), Input("compare-body", "id"))
    def show(_id: str) -> Any:
        return guarded(lambda: body(store.get(), answers), "These runs do not compare", "compare-refused")


def body(loaded: Loaded, answers: Answers) -> list[Node]:
    """The verdict, the waterfalls of both typical steps side by side, what changed, and the tables."""
    result, other = answers.comparison().result, answers.other
    assert other is not None  # else there is no comparison
    names: list[Node] = ["A: ", html.Code(loaded.title), "   B: ", html.Code(other.title)]
    verdict = html.P(with_minus(result.detail), className="verdict", id="compare-detail")
    head = panel("B against A", verdict, html.P(names, className="note"))
    note = note_on_chance(result.parts)
    charts = [
        chart("Causes of a typical step", causes_of_both(result), "compare-causes", _NOT_EXPLAINED),
        chart("Parts that changed most", changes_of_parts(result), "compare-parts", "No part changed.", note=note),
    ]
    return [
        with_files(head, whole_files("comparison.html", "comparison.json")),
        html.Div([_waterfall("A", loaded, other), _waterfall("B", other, loaded)], className="columns"),
        html.Div(charts, className="columns ragged"),
        *(_table(table) for table in comparison_tables(result, Amount.WHOLE)),
        *([panel("Warnings", lines(result.warnings, "compare-warnings"))] if result.warnings else []),
    ]


def note_on_chance(parts: Sequence[PartChange]) -> str:
    """The note on which parts changed by more than chance."""
    marks = {part.significant for part in parts}
    if True in marks:
        return "coloured: by more than chance"
    return "not known whether by more than chance" if None in marks else "none by more than chance can explain"


def _table(table: ReportTable) -> Node:
    if table.key != "compared-facts":  # which are texts
        rows = (tuple(with_minus(cell) if isinstance(cell, str) else cell for cell in row) for row in table.rows)
        table = replace(table, rows=tuple(rows))
    return data_table(table, table.key) if table.key in TABLES else report_table(table)


def _waterfall(name: str, loaded: Loaded, other: Loaded) -> Node:
    step, against = (None if run.analysis is None else run.analysis.report.typical_step for run in (loaded, other))
    figure = None
    if step is not None and step.length_ns is not None and step.parts is not None:
        figure = waterfall(step, 0 if against is None else against.length_ns or 0)
    note = "" if step is None else f"typical step {step.step}: {milliseconds(step.length_ns)} ms"
    return chart(f"{name}: where the step went", figure, f"compare-waterfall-{name.lower()}", _NOT_EXPLAINED, note=note)
