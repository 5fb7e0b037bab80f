"""The stages page: what ops cost in each stage, and the layers that would make the stages even."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import Dash, Input, Output, dcc, html

from dashboards.address import NOTHING, Query, keep_fields, keeper
from dashboards.answers import Answers
from dashboards.components import Node, lines, panel
from dashboards.parts import chart, data_table, empty, guarded, no_steps, waiting
from dashboards.store import Loaded, Store
from dashboards.wishes import wishes_of
from pptrace.analysis.op_costs import OpSample, op_costs, op_samples
from pptrace.analysis.report import Report
from pptrace.analysis.stages.show import stage_tables, stages_table
from pptrace.analysis.stragglers.show import has_slowdown, stragglers_table
from pptrace.analysis.whatif.frameworks import paste_options
from pptrace.api.whatif import commas
from pptrace.api.wishes import Wishes
from pptrace.model.report_table import Amount
from pptrace.report.charts.stages import group_lines, stage_points, stage_work_chart, stages_chart
from pptrace.report.whatif import span_words

_MOST_LINES = 12


def layout(loaded: Loaded, answers: Answers, query: Query = NOTHING) -> Node:
    parts = guarded(lambda: body(loaded, answers, query), "Stages", "stages-failed")
    slow = None if loaded.analysis is None else loaded.analysis.report.stragglers  # kept of runs whose ops are not
    if slow is not None and has_slowdown(slow):
        parts.append(data_table(stragglers_table(slow, Amount.WHOLE), "stragglers"))
    return html.Div(parts, id="stages-body")


def body(loaded: Loaded, answers: Answers, query: Query = NOTHING) -> list[Node]:
    """The page; it is of all steps."""
    assert loaded.analysis is not None
    costs = answers.of_data(op_costs)
    if not costs:
        title, report = "No stages in these traces", loaded.analysis.report
        if not report.steps:
            return [no_steps(title, report)]
        return [empty(title, "The steps have no ops of a pipeline whose stages are known.", "no-stages")]
    samples = answers.of_data(op_samples)
    points = stage_points(samples)
    note = "bars: the median op; whiskers: eight in ten ops"
    if points is not None:
        note = "points: ops; lines: medians of each group of them"
    text: Any = {"type": "text", "debounce": True, "maxLength": 400, "placeholder": "e.g. 8,8,8,8"}
    field = dcc.Input(id="stage-layers", value=query.get("layers"), **text)
    hint = "layers of each stage of the model"
    label = html.Label([html.Span("Layers today"), field], className="plan-list", title=hint)
    fields = html.Div([label, keeper("stages")], className="plan-fields")
    return [
        chart("What a microbatch costs in each stage", points or stages_chart(costs), "stages-chart", "", note=note),
        *([] if points is None else [_groups(samples)]),
        panel("Advised split", fields, waiting(id="split-body"), id="split"),
        data_table(stages_table(costs), "stages"),
        *_work(loaded.analysis.report),
    ]


def _work(report: Report) -> list[Node]:
    """The tables of what the ops do, by kind of work and part of the model, with why one stage takes longer than another."""
    if report.stages is None:
        return []
    figure, note = stage_work_chart(report.stages), "kernels, or on hosts without a device innermost operators"
    drawn = [] if figure is None else [chart("What ops do", figure, "stage-work-chart", "", note=note)]
    return [*drawn, *(data_table(table, "stage-work") for table in stage_tables(report.stages, Amount.WHOLE))]


def _groups(samples: Sequence[OpSample]) -> Node:
    """The stages and kinds whose ops are of two groups, and how that is known."""
    test = (
        "Ops of a stage and kind, 16 or more, are two groups if, cut where that explains most of their variance, each has a "
        "tenth of them and three or more, the medians differ by a tenth, and at most 4 % lie in the middle third between these."
    )
    found = group_lines(samples)
    more = [f"… {len(found) - _MOST_LINES} more"] if len(found) > _MOST_LINES else []
    return panel(
        "Ops of two groups", lines([*found[:_MOST_LINES], *more], "stage-groups"), html.P(test, className="note")
    )


def register(app: Dash, _store: Store, answers: Answers) -> None:
    @app.callback(Output("split-body", "children"), Input("stage-layers", "value"))
    def advise(layers: str | None) -> Any:
        return guarded(lambda: advice(answers, layers), "No split is advised", "split-refused")

    keep_fields(app, "stages", "stage-layers")


def advice(answers: Answers, layers: str | None) -> list[Node]:
    """The best split of the layers, what it would gain, and what to paste into which framework."""
    wishes = wishes_of({"layers": layers})
    study = answers.study(wishes)
    today = study.costs.layers
    best, reason = study.best_split, ""
    if today is None:
        reason = "The trace does not say how many layers its stages have; write them above."
    elif best is None:
        reason = "No split of these layers over these stages can be advised."
    if today is None or best is None:
        return [html.P(reason, className="empty", id="split-unknown")]
    if best == today:
        return [html.P(f"{commas(today)} is the best split already, by the measured costs.", id="split-best")]
    result = answers.whatif(Wishes(split=best, layers=wishes.layers)).result
    gain = span_words(result.scenarios[0], result) if result.scenarios else "its gain cannot be predicted"
    line = f"{commas(best)} layers in place of {commas(today)}: {gain}"
    rows = []
    for framework, option in paste_options(best, study.costs.plan):
        copy = dcc.Clipboard(content=option, title=f"copy for {framework}")
        rows.append(html.Tr([html.Td(framework), html.Td(html.Code(option)), html.Td(copy)]))
    verdict = html.P(line, className="verdict", id="split-best")
    return [verdict, html.Table(html.Tbody(rows), id="split-paste")]
