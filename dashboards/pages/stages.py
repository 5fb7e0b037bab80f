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
from pptrace.analysis.op_samples import OpSample
from pptrace.analysis.result import Report
from pptrace.analysis.stages.show import stage_tables
from pptrace.analysis.stragglers.show import has_slowdown, stragglers_table
from pptrace.analysis.whatif.paste import goes_round, paste_options
from pptrace.api.wishes import Wishes
from pptrace.report.charts.stage_work import stage_work_chart
from pptrace.report.charts.stages import group_lines, stage_points, stages_chart
from pptrace.report.tables import Amount
from pptrace.report.tables.stages import stages_table
from pptrace.report.whatif import span_words
from pptrace.schedule.plan import Plan

_MOST_LINES = 12


def layout(loaded: Loaded, answers: Answers, query: Query = NOTHING) -> Node:
    parts = guarded(lambda: body(loaded, answers, query), "Stages", "stages-failed")
    return html.Div([*parts, *_stragglers(loaded)], id="stages-body")


def _stragglers(loaded: Loaded) -> list[Node]:
    """The study of stragglers, which is kept of runs whose ops are not."""
    slow = None if loaded.analysis is None else loaded.analysis.report.stragglers
    if slow is None or not has_slowdown(slow):
        return []
    return [data_table(stragglers_table(slow, Amount.WHOLE), "stragglers")]


def body(loaded: Loaded, answers: Answers, query: Query = NOTHING) -> list[Node]:
    """The page; it is of all steps."""
    assert loaded.analysis is not None
    costs = answers.stages()
    if not costs:
        return [_no_stages(loaded.analysis.report)]
    samples = answers.stage_samples()
    points = stage_points(samples)
    note = (
        "bars: the median op; whiskers: eight in ten ops"
        if points is None
        else "points: ops; lines: medians of each group of them"
    )
    groups = [] if points is None else [_groups(samples)]
    field = dcc.Input(
        id="stage-layers",
        type="text",
        value=query.get("layers"),
        debounce=True,
        maxLength=400,
        placeholder="e.g. 8,8,8,8",
    )
    label = html.Label(
        [html.Span("Layers today"), field], className="plan-list", title="layers of each stage of the model"
    )
    return [
        chart("What a microbatch costs in each stage", points or stages_chart(costs), "stages-chart", "", note=note),
        *groups,
        panel(
            "Advised split",
            html.Div([label, keeper("stages")], className="plan-fields"),
            waiting(id="split-body"),
            id="split",
        ),
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


def _no_stages(report: Report) -> Node:
    title = "No stages in these traces"
    if not report.steps:
        return no_steps(title, report)
    return empty(title, "The steps have no ops of a pipeline whose stages are known.", "no-stages")


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
    if today is None:
        return _no_split("The trace does not say how many layers its stages have; write them above.")
    best = study.best_split
    if best is None:
        return _no_split("No split of these layers over these stages can be advised.")
    if best == today:
        return [html.P(f"{_commas(today)} is the best split already, by the measured costs.", id="split-best")]
    return [_gain(answers, today, Wishes(split=best, layers=wishes.layers)), _to_paste(best, study.costs.plan)]


def _no_split(reason: str) -> list[Node]:
    return [html.P(reason, className="empty", id="split-unknown")]


def _gain(answers: Answers, today: tuple[int, ...], wishes: Wishes) -> Node:
    result = answers.whatif(wishes).result
    gain = span_words(result.scenarios[0], result) if result.scenarios else "its gain cannot be predicted"
    line = f"{_commas(wishes.split or ())} layers in place of {_commas(today)}: {gain}"
    return html.P(line, className="verdict", id="split-best")


def _to_paste(split: tuple[int, ...], plan: Plan) -> Node:
    options = paste_options(split, has_chunks=plan.num_stages > plan.pp, goes_round=goes_round(plan))
    return html.Table(html.Tbody([_row(*entry) for entry in options]), id="split-paste")


def _row(framework: str, option: str) -> Node:
    copy = dcc.Clipboard(content=option, title=f"copy for {framework}")
    return html.Tr([html.Td(framework), html.Td(html.Code(option)), html.Td(copy)])


def _commas(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
