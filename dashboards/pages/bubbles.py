"""The page of bubbles and what-if: why a step took as long as it did, what would get it back, and changes to try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate

from dashboards.answers import Answers
from dashboards.components import Node, lines, panel
from dashboards.exports import table_files, whole_files
from dashboards.parts import chart, data_table, empty, guarded, no_steps, waiting, with_files
from dashboards.store import Loaded, Store
from dashboards.wishes import FIELDS, address_of, command_of, wishes_of
from pptrace.analysis.result import StepReport
from pptrace.api.whatif import Predictions, Wishes
from pptrace.errors import PptraceError
from pptrace.report.charts.causes import blame_chart, causes_chart
from pptrace.report.charts.changes import changes_chart
from pptrace.report.figures import View, timeline, waterfall
from pptrace.report.tables import Amount
from pptrace.report.tables.blame import blame_table
from pptrace.report.tables.ranks import bounds_table
from pptrace.report.tables.waterfall import causes_table
from pptrace.report.units import milliseconds
from pptrace.report.whatif import headline, replay_line, span_words, whatif_tables
from pptrace.schedule.registry import SCHEDULES
from pptrace.simulator import Simulation
from pptrace.workflow.analyse import Analysis

_NOT_EXPLAINED = (
    "The trace lacks ops of the plan or ranks of the pipeline, there is no plan to compare with, or the "
    "ranks' times do not compare. The warnings of the overview say which."
)
_BASIS = "predicted from the measured costs of ops and messages"
_HELP = "Choose a schedule, a size or a split: the step is then drawn as it would be, below the measured one."
_LABELS_PX = 170
_MOST_DRAWN = 6_000
"""Most actions that are drawn one by one before those too short to be seen become blocks."""
_NUMBERS: Mapping[str, tuple[str, str]] = {
    "chunks": ("Chunks", "virtual stages of a rank"),
    "microbatches": ("Microbatches", "of a step, of the size they have"),
    "microbatch_size": ("Size", "of a microbatch, times today's"),
    "link_speed": ("Link speed", "messages so many times as fast"),
}


def layout(loaded: Loaded, answers: Answers) -> Node:
    return html.Div([html.Div(id="bubbles-body"), *(_whatif(loaded, answers) if loaded.steps else [])])


def _whatif(loaded: Loaded, answers: Answers) -> list[Node]:
    """The gains of changes, and the controls to try one; the reason in their place where nothing can be predicted."""
    if reason := answers.why_no_prediction():
        return [empty("What another schedule would gain cannot be predicted", reason, "no-prediction")]
    return [
        panel("Try a change", _controls(loaded), html.P(_HELP, className="help"), note=_BASIS, id="try"),
        waiting(id="try-body"),
        waiting(id="whatif-body"),
    ]


def _field(name: str) -> str:
    """The id of a field; those of numbers begin as those of the schedules page do."""
    return f"plan-try-{name}" if name in _NUMBERS else f"try-{name}"


def _controls(loaded: Loaded) -> Node:
    names = [{"label": "as it was", "value": ""}, *({"label": name, "value": name} for name in SCHEDULES)]
    schedule = dcc.Dropdown(id=_field("schedule"), options=names, value="", clearable=False, searchable=False)
    fields = [html.Label([html.Span("Schedule"), schedule], className="plan-schedule")]
    plan = None if loaded.analysis is None else loaded.analysis.schedule.plan
    today = {} if plan is None else {"chunks": plan.num_chunks, "microbatches": plan.num_microbatches}
    for name, (label, hint) in _NUMBERS.items():
        number = dcc.Input(
            id=_field(name), type="number", min=0, step="any", debounce=True, placeholder=str(today.get(name, 1))
        )
        fields.append(html.Label([html.Span(label), number], title=hint))
    for name, label, hint in (
        ("split", "Split", "layers of each stage of the model, such as 5,5,5,3"),
        ("layers", "Layers today", "layers of the run's stages, where its trace does not say"),
    ):
        text = dcc.Input(id=_field(name), type="text", debounce=True, maxLength=400, placeholder="e.g. 4,4,4,4")
        fields.append(html.Label([html.Span(label), text], title=hint, className="plan-list"))
    return html.Div(fields, className="plan-fields")


def register(app: Dash, store: Store, answers: Answers) -> None:
    @app.callback(Output("bubbles-body", "children"), Input("step", "value"))
    def show(step: int | None) -> Any:
        loaded = store.get()
        if loaded.analysis is None or (step is None and loaded.steps):
            raise PreventUpdate
        return guarded(lambda: body(loaded, step), "Bubbles", "bubbles-failed")

    @app.callback(Output("whatif-body", "children"), Input("whatif-body", "id"), Input(_field("layers"), "value"))
    def all_changes(_id: str, layers: str | None) -> Any:
        return guarded(lambda: changes(answers, layers), "No prediction", "whatif-refused")

    @app.callback(
        Output("try-body", "children"), *(Input(_field(name), "value") for name in FIELDS), State("try-body", "id")
    )
    def try_change(*values: Any) -> Any:
        form = dict(zip(FIELDS, values, strict=False))
        return guarded(lambda: tried(answers, form), "This cannot be predicted", "try-refused")


def body(loaded: Loaded, number: int | None) -> list[Node]:
    """The parts and causes of the chosen step, and to what its bubble is charged."""
    assert loaded.analysis is not None
    step = loaded.step(number) if number is not None else None
    if step is None:
        return [no_steps("No steps in these traces, so no bubbles", loaded.analysis.report)]
    if not step.has_pipeline:
        reason = "These steps are not of a pipeline: each rank's window is its own step, and the overview has what it did in it."
        return [empty("No pipeline, so no bubbles of one", reason, "no-pipeline")]
    if step.span_parts is None and step.causes is None and step.blame is None:
        return [empty(f"Where step {step.step} went is not known", _NOT_EXPLAINED, "not-explained"), *_bounds(step)]
    of_step = {"step": step.step}
    pictures = [
        chart(f"Where step {step.step} went", _waterfall(step), "bubbles-waterfall", _NOT_EXPLAINED),
        chart("Causes and their places", causes_chart(step), "bubbles-causes", _NOT_EXPLAINED),
    ]
    tables = [data_table(causes_table(step), "causes", options=of_step)] if step.causes else []
    tables += [data_table(blame_table(step, Amount.WHOLE), "blame", options=of_step)] if _has_blame(step) else []
    note = "what took longer than usual, walked back from every bubble of every rank"
    return [
        html.Div(pictures, className="columns ragged"),
        chart("Who causes the bubble", blame_chart(step), "bubbles-blame", _NOT_EXPLAINED, note=note),
        html.Div(tables, className="columns ragged") if tables else html.Div(),
    ]


def _bounds(step: StepReport) -> list[Node]:
    """Bounds of the bubble, where the other sides of messages have no trace."""
    if all(rank.bubble_low_ns is None or rank.bubble_ns is not None for rank in step.ranks):
        return []
    return [data_table(bounds_table(step, Amount.WHOLE), "ranks")]


def _waterfall(step: StepReport) -> Any:
    return None if step.span_parts is None or step.span_ns is None else waterfall(step)


def _has_blame(step: StepReport) -> bool:
    return step.blame is not None and step.blame.total_ns > 0


def changes(answers: Answers, layers: str | None) -> list[Node]:
    """All sensible changes, the best first: the sentence, the front of gain and memory, and the table."""
    wishes = wishes_of({"layers": layers})
    result = answers.whatif(wishes).result
    head = panel(
        "What would get it back",
        html.P(headline(result), className="verdict", id="whatif-headline"),
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
    return [head, front, *(data_table(table, "whatif", options={"layers": layers}) for table in whatif_tables(result))]


def tried(answers: Answers, form: Mapping[str, object]) -> list[Node]:
    """The measured step, and below it the simulated one with the change, on one scale."""
    wishes = wishes_of(form)
    if not wishes:
        return []
    predictions = answers.whatif(wishes)
    if not predictions.result.scenarios:
        raise PptraceError("; ".join(predictions.result.warnings[-1:]) or headline(predictions.result))
    return [_sentence(predictions, wishes, form), *_pictures(answers.run().analysis, predictions)]


def _sentence(predictions: Predictions, wishes: Wishes, form: Mapping[str, object]) -> Node:
    one, result = predictions.result.scenarios[0], predictions.result
    text = f"{one.name}: {span_words(one, result)}, {_gain(one.gain_ns)} for the same work"
    line = f"pptrace whatif PATH {command_of(wishes)} --verify"
    command = html.P(["Try it in real processes: ", html.Code(line)], className="note")
    on_axis = dcc.Link(
        "On the timeline, below the measured step", href=_on_timeline(predictions, form), id="try-timeline"
    )
    box = panel(
        "Predicted", html.P(text, className="verdict", id="try-result"), command, html.P(on_axis, className="note")
    )
    table = [data_table(table, "whatif", options=form) for table in whatif_tables(result)]
    return html.Div([with_files(box, table_files("whatif", form)), *table])


def _on_timeline(predictions: Predictions, form: Mapping[str, object]) -> str:
    query = {"step": predictions.study.typical_step, "sources": "measured,whatif", "whatif": address_of(form)}
    return f"/timeline?{urlencode(query)}"


def _gain(ns: int) -> str:
    return f"a {'gain' if ns >= 0 else 'loss'} of {milliseconds(abs(ns))} ms"


def _pictures(analysis: Analysis, predictions: Predictions) -> Sequence[Node]:
    step, data = predictions.study.typical_step, analysis.data
    windows = [window for window in analysis.windows if window.step == step]
    longest = max(windows, key=lambda window: window.span_ns)
    changed = predictions.study.picture(predictions.changes[0][1])
    extent = max(longest.span_ns, changed.makespan_ns)
    view = _view(int((data.ops["step"] == step).sum()), longest.start_ns, extent)
    measured = timeline(data.ops, data.comms, [longest], data.lanes, extent, view)
    simulated = timeline(changed.ops(), extent_ns=extent, view=_view(_num_actions(changed), 0, extent))
    for figure in (measured, simulated):  # time begins at the same place in both
        figure.update_layout(margin={"l": _LABELS_PX}).update_yaxes(automargin=False)
    several = f", the longest of {len(windows)} pipelines" if len(windows) > 1 else ""
    note = f"step {step}{several}: {milliseconds(longest.span_ns)} ms"
    changed_note = f"step {step} with the change: {milliseconds(changed.makespan_ns)} ms"
    return [
        chart("Measured", measured, "try-measured", "", note=note),
        chart("Simulated", simulated, "try-simulated", "", note=changed_note),
    ]


def _num_actions(simulation: Simulation) -> int:
    return sum(map(len, simulation.plan.ranks))


def _view(num_ops: int, start_ns: int, extent_ns: int) -> View | None:
    return View(start_ns, start_ns + extent_ns) if num_ops > _MOST_DRAWN else None
