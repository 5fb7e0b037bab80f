"""The part of the bubbles page that tries a change: its fields, the step with it drawn below the measured one, its run in real
processes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import log2
from typing import Any
from urllib.parse import urlencode

from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate
from flask import request

from dashboards.address import NOTHING, Query, choice_of, keep_fields, keeper, number_of
from dashboards.answers import Answers
from dashboards.components import Node, in_browser, panel
from dashboards.exports import table_files
from dashboards.fields import words_of
from dashboards.parts import data_table, guarded, waiting, with_files
from dashboards.store import Loaded
from dashboards.wishes import FIELDS, address_of, wishes_of
from pptrace.api.options import Value
from pptrace.api.whatif import Predictions
from pptrace.api.wishes import FORM
from pptrace.errors import PptraceError, UsageError
from pptrace.model.predicted import gpt_of_run
from pptrace.model.units import milliseconds
from pptrace.report.whatif import headline, span_words, standing_words, whatif_tables
from pptrace.schedule.registry import SCHEDULES
from pptrace.workflow.analyse import Analysis

_VERIFY = "runs this plan in real processes of this machine: ops sleep as long as they took, messages have their size"
_SLIDER: Any = {"step": 1, "marks": None, "allow_direct_input": False, "className": "slider"}
_MOST_VERIFIED_S = 10.0
"""Longer steps are left to the command line: six of them are run while a page waits."""
_HELP = (
    "Choose a schedule, a size or a split: the step is then drawn as it would be, below the measured one.",
    *(f"{option.label}: {option.hint}." for option in FORM.values() if not option.is_change),
)
_WHOLE, _TIMES, _SHARES, _TEXTS, _FLAGS = (
    {name: option for name, option in FORM.items() if option.takes is value}
    for value in (Value.WHOLE, Value.TIMES, Value.SHARE, Value.SPLIT, Value.FLAG)
)
"""The fields with numbers, ratios, parts and splits, and those that say yes, by their names."""
_SLIDES_WIDER = 4
"""The slider of a size reaches so many times today's."""
_SLIDES_DOUBLINGS = 3
"""The slider of a ratio reaches so many doublings and halvings."""
_MOST_HANDLES = 31
"""Most borders between stages that a slider shows."""


def layout(loaded: Loaded, note: str, query: Query = NOTHING) -> list[Node]:
    """The panel of the fields, with what the address has for them, and the place of the answer."""
    return [
        panel("Try a change", _controls(loaded, query), html.P(" ".join(_HELP), className="help"), note=note, id="try"),
        waiting(id="try-body"),
        keeper("try"),
    ]


def field(name: str) -> str:
    """The id of a field; those of numbers begin as those of the schedules page do."""
    is_number = FORM[name].takes in (Value.WHOLE, Value.TIMES, Value.SHARE)
    return f"plan-try-{name}" if is_number else f"try-{name}"


def _slider(name: str) -> str:
    return f"{field(name)}-slider"


def _controls(loaded: Loaded, query: Query) -> Node:
    names = [{"label": "as it was", "value": ""}, *({"label": name, "value": name} for name in SCHEDULES)]
    chosen = choice_of(query, "schedule", list(SCHEDULES)) or ""
    schedule = dcc.Dropdown(id=field("schedule"), options=names, value=chosen, clearable=False, searchable=False)
    fields: list[Node] = [html.Label([html.Span(FORM["schedule"].label), schedule], className="plan-schedule")]
    plan = None if loaded.analysis is None else loaded.analysis.schedule.plan
    sizes = {} if plan is None else {"chunks": plan.num_chunks, "microbatches": plan.num_microbatches}
    for name in _WHOLE:
        today = sizes.get(name, 1)
        fields.append(_number(name, today, range(1, max(_SLIDES_WIDER * today, _SLIDES_WIDER) + 1), query))
    fields += [_number(name, 1, range(-_SLIDES_DOUBLINGS, _SLIDES_DOUBLINGS + 1), query) for name in _TIMES]
    split = _layers_today(loaded)
    for name, option in _TEXTS.items():
        shown = ",".join(map(str, split)) if split and name == "split" else "e.g. 4,4,4,4"
        text = dcc.Input(
            id=field(name), type="text", value=query.get(name), debounce=True, maxLength=400, placeholder=shown
        )
        slider = [_borders(split, query)] if split and name == "split" else []
        label = html.Label([html.Span(option.label), text], title=option.hint, className="plan-list")
        fields.append(html.Div([label, *slider], className="plan-list"))
    for name, option in _SHARES.items():
        typed = number_of(query, name)
        number = dcc.Input(id=field(name), type="number", value=typed, min=0, max=1, step="any", debounce=True)
        fields.append(
            html.Div(html.Label([html.Span(option.label), number], title=option.hint), className="plan-field")
        )
    for name, option in _FLAGS.items():
        answer = choice_of(query, name, ("yes",))
        flag = dcc.Dropdown(id=field(name), options=["yes"], value=answer, searchable=False)
        fields.append(html.Label([html.Span(option.label), flag], title=option.hint, className="plan-list"))
    return html.Div(fields, className="plan-fields")


def _number(name: str, today: int, reach: range, query: Query) -> Node:
    """A field of a number with its slider; ``reach`` is the slider's: of ratios, powers of two."""
    option, typed = FORM[name], number_of(query, name)
    number = dcc.Input(
        id=field(name), type="number", value=typed, min=0, step="any", debounce=True, placeholder=str(today)
    )
    place = today if typed is None else typed
    if name in _TIMES:
        place = log2(place) if place > 0 else 0
    place = min(max(place, reach.start), reach.stop - 1)
    slider = dcc.Slider(id=_slider(name), min=reach.start, max=reach.stop - 1, value=place, **_SLIDER)
    return html.Div([html.Label([html.Span(option.label), number], title=option.hint), slider], className="plan-field")


def _layers_today(loaded: Loaded) -> Sequence[int]:
    """The layers of each stage of the model, as the trace has them; empty where it does not say, or has too many for a slider."""
    analysis = loaded.analysis
    sizes = None if analysis is None else gpt_of_run(analysis.facts.values(), analysis.schedule)
    layers = () if sizes is None else sizes.layers_per_stage
    return layers if 1 < len(layers) <= _MOST_HANDLES + 1 else ()


def _borders(layers: Sequence[int], query: Query) -> Node:
    """A slider with a handle for each border between two stages, which moves layers from one to the other."""
    try:
        chosen = wishes_of({"split": query.get("split")}).split or layers
    except PptraceError:
        chosen = layers
    shown = chosen if len(chosen) == len(layers) and sum(chosen) == sum(layers) else layers
    return dcc.RangeSlider(
        id=_slider("split"),
        min=0,
        max=sum(layers),
        value=list(accumulate(shown))[:-1],
        pushable=1,
        **_SLIDER,
    )


def register(app: Dash, answers: Answers) -> None:
    @app.callback(
        Output("try-body", "children"), *(Input(field(name), "value") for name in FIELDS), State("try-body", "id")
    )
    def try_change(*values: Any) -> Any:
        form = dict(zip(FIELDS, values, strict=False))
        return guarded(lambda: tried(answers, form), "This cannot be predicted", "try-refused")

    @app.callback(
        Output("try-verified", "children"),
        Input("try-verify", "n_clicks"),
        *(State(field(name), "value") for name in FIELDS),
        running=[(Output("try-verify", "disabled"), True, False)],  # asked for twice, the first answer would be lost
    )
    def verify(clicks: int | None, *values: Any) -> Any:
        if not clicks:
            raise PreventUpdate
        form = dict(zip(FIELDS, values, strict=True))
        return guarded(lambda: verified(answers, form), "This was not run", "verify-refused")

    keep_fields(app, "try", *map(field, FIELDS))
    for name in (*_WHOLE, *_TIMES, "split"):
        function = "slideSplit" if name == "split" else "slideTimes" if name in _TIMES else "slideWhole"
        in_browser(
            *(app, "pptrace", function),
            Output(field(name), "value"),
            Output(_slider(name), "value"),
            Input(_slider(name), "value"),
            Input(field(name), "value"),
            State(field(name), "placeholder"),
            prevent_initial_call=True,
        )


def tried(answers: Answers, form: Mapping[str, object]) -> list[Node]:
    """The measured step, and below each of its ranks the simulated one with the change."""
    wishes = wishes_of(form)
    if not wishes:
        return []
    predictions = answers.whatif(wishes)
    if not predictions.result.scenarios:
        raise PptraceError("; ".join(predictions.result.warnings[-1:]) or headline(predictions.result))
    tables = [data_table(table, "whatif", options=form) for table in whatif_tables(predictions.result)]
    query = {"step": predictions.study.typical_step, "sources": "measured,whatif", "whatif": address_of(form)}
    view = urlencode(query)
    picture = _picture(answers.run().analysis, predictions, view)
    return [_sentence(predictions, form, view), picture, *tables]


def _sentence(predictions: Predictions, form: Mapping[str, object], view: str) -> Node:
    one, result = predictions.result.scenarios[0], predictions.result
    gain = f"a {'gain' if one.gain_ns >= 0 else 'loss'} of {milliseconds(abs(one.gain_ns))} ms"
    standing = standing_words(one.standing, result)
    text = f"{one.name}: {span_words(one, result)}, {gain} for the same work ({standing})"
    line = f"pptrace whatif PATH {words_of(FORM, form)} --verify"
    command = html.P(["The same on the command line: ", html.Code(line)], className="note")
    on_axis = dcc.Link("On the page of the timeline", href=f"/timeline?{view}", id="try-timeline")
    verify = html.Button("Verify", id="try-verify", type="button", className="tool", title=_VERIFY)
    box = panel(
        "Predicted",
        html.P(text, className="verdict", id="try-result"),
        html.Div([verify, waiting(id="try-verified")], className="verify"),
        command,
        html.P(on_axis, className="note"),
    )
    return with_files(box, table_files("whatif", form))


def verified(answers: Answers, form: Mapping[str, object]) -> list[Node]:
    """The time that the change takes in real processes, with the predicted one.

    Raises:
        PptraceError: it cannot be predicted or run, or the browser may start no processes here.
    """
    if not (answers.is_secret or _is_of_this_machine(request.remote_addr)):
        raise UsageError(
            "processes are started for browsers of this machine; from elsewhere start the dashboard with --token"
        )
    one = answers.verified(wishes_of(form), _MOST_VERIFIED_S)
    assert one.verified_ns is not None
    off = one.verified_ns / one.length_ns - 1
    text = (
        f"{milliseconds(one.verified_ns)} ms in real processes, the median of five steps; {milliseconds(one.length_ns)} ms "
        f"were predicted ({off:+.1%})"
    )
    return [html.Span(text, id="verify-result")]


def _is_of_this_machine(address: str | None) -> bool:
    try:
        return ipaddress.ip_address(address or "").is_loopback
    except ValueError:
        return False


def _picture(analysis: Analysis, predictions: Predictions, view: str) -> Node:
    """The measured step and the changed one on one axis of time."""
    step = predictions.study.typical_step
    windows = [window for window in analysis.windows if window.step == step]
    longest = max(windows, key=lambda window: window.span_ns)
    changed = predictions.study.picture(predictions.changes[0][1])
    several = f", the longest of {len(windows)} pipelines" if len(windows) > 1 else ""
    length = milliseconds(changed.makespan_ns)
    note = f"pipeline of step {step}{several}: {milliseconds(longest.span_ns)} ms; with the change {length} ms"
    if milliseconds(predictions.result.scenarios[0].span_ns) != length:
        note += " by replay; the prediction adds what the replay of the run as it was is off by"
    data: dict[str, Any] = {"data-view": view}
    return panel("Measured and with the change", html.Div(className="timeline", **data), id="try-picture", note=note)
