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
from pptrace.analysis.compare.result import REMAINDER, PartChange
from pptrace.model.report_table import Amount, ReportTable
from pptrace.model.units import milliseconds
from pptrace.report.charts.base import with_minus
from pptrace.report.charts.changes import causes_of_both, changes_of_parts
from pptrace.report.summary_figures import waterfall
from pptrace.report.tables.comparison import comparison_tables

_NOT_EXPLAINED = "Not known: the traces lack ops of the plan, or there is no plan to compare with."
_NO_PIPELINE = "This run has no pipeline; the parts below are those that any step has."
_NOT_OF_BOTH = "Not known of both runs: the warnings below say why."


def layout(_loaded: Loaded, answers: Answers, *_: object) -> Node:
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
    pipelines = [_has_pipeline(run) for run in (loaded, other)]
    waterfalls = [_waterfall("A", loaded, other), _waterfall("B", other, loaded)] if any(pipelines) else []
    title, why_not = "Causes of a typical step", _NOT_EXPLAINED
    if not all(pipelines):
        title, why_not = "Parts of a typical step", _NOT_OF_BOTH
    nothing = "No part changed." if result.parts else _NOT_OF_BOTH
    charts = [
        chart(title, causes_of_both(result), "compare-causes", why_not),
        chart("Parts that changed most", changes_of_parts(result), "compare-parts", nothing, note=note),
    ]
    return [
        with_files(head, whole_files("comparison.html", "comparison.json")),
        *([html.Div(waterfalls, className="columns")] if waterfalls else []),
        html.Div(charts, className="columns ragged"),
        *(_table(table) for table in comparison_tables(result, Amount.WHOLE)),
        *([panel("Warnings", lines(result.warnings, "compare-warnings"))] if result.warnings else []),
    ]


def note_on_chance(parts: Sequence[PartChange]) -> str:
    """The note on which parts changed by more than chance."""
    marks = {part.significant for part in parts if part.name != REMAINDER}
    if True in marks:
        return "coloured: by more than chance"
    return "not known whether by more than chance" if None in marks else "none by more than chance can explain"


def _table(table: ReportTable) -> Node:
    if table.key != "compared-facts":  # which are texts
        rows = (tuple(with_minus(cell) if isinstance(cell, str) else cell for cell in row) for row in table.rows)
        table = replace(table, rows=tuple(rows))
    return data_table(table, table.key) if table.key in TABLES else report_table(table)


def _has_pipeline(run: Loaded) -> bool:
    step = None if run.analysis is None else run.analysis.report.typical_step
    return step is not None and step.has_pipeline


def _waterfall(name: str, loaded: Loaded, other: Loaded) -> Node:
    step, against = (None if run.analysis is None else run.analysis.report.typical_step for run in (loaded, other))
    figure = None
    if step is not None and step.length_ns is not None and step.parts is not None:
        figure = waterfall(step, 0 if against is None else against.length_ns or 0)
    note = "" if step is None else f"typical step {step.step}: {milliseconds(step.length_ns)} ms"
    why_not = _NOT_EXPLAINED if _has_pipeline(loaded) else _NO_PIPELINE
    return chart(f"{name}: where the step went", figure, f"compare-waterfall-{name.lower()}", why_not, note=note)
