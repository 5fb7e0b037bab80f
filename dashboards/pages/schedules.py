"""The schedules page: a schedule of any size and cost on paper, the bubbles of all of them, and throughput against p."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.exceptions import PreventUpdate

from dashboards.address import NOTHING, Query, choice_of, keep_fields, keeper, number_of
from dashboards.components import Node, lines, panel, report_table, still_picture
from dashboards.exports import picture_files, table_files
from dashboards.paper import COSTS, PLAN, SEVERAL, SIZES, OnPaper, on_paper
from dashboards.parts import fill_in_parts, made_in_parts, of_parts, waiting, with_files
from dashboards.store import Loaded
from pptrace.api.options import Option, Value
from pptrace.errors import PptraceError
from pptrace.model import units
from pptrace.model.wording import counted
from pptrace.report.estimate.sweep import candidate_table, sweep_lines
from pptrace.report.estimate.table import headline, tables, verdict_lines
from pptrace.report.simulation_text import idle_table
from pptrace.report.sweep.figures import curves, heat_maps
from pptrace.report.tiles.inline import inline_simulation
from pptrace.schedule.registry import SCHEDULES

_NUMBERS = (Value.WHOLE, Value.DEPTH, Value.TIMES, Value.MILLISECONDS)
"""Values of fields of numbers."""
_OPTIONS = {**PLAN, **SIZES, **SEVERAL}
"""The options of all fields by their names, as an address has them."""
_REFUSED = "plan-refused"
_BLANK = "no such plan, pointing at it says why"
_EVERY_MS = 250
_MOST_CHARACTERS = 2_000_000
"""Room for the tiles of a plan in the page."""
_SWEPT_S = 1.0
"""Time after which a page is shown what is simulated, s."""
_STOP = "stops after the schedule that is being simulated, and goes on from there"
_OF_PLAN = "p ranks, m microbatches, v chunks a rank; F, B: all layers of a rank"
_SEVERAL = "Several values each (2,4,8 or 1..8:x2), for what fits; what is empty here is as above"


def layout(loaded: Loaded, _answers: object, query: Query = NOTHING) -> Node:
    """The page, with the schedule and sizes of the address, or those of the run, where it has them."""
    name, *values = _of_run(loaded)
    of_run = dict(zip(PLAN, values, strict=True))
    if (chosen := choice_of(query, "schedule", list(SCHEDULES))) is not None:
        name, of_run = chosen, {}
    schedule = dcc.Dropdown(id="plan-schedule", options=list(SCHEDULES), value=name, clearable=False, searchable=False)
    fields: list[Node] = [html.Label([html.Span("Schedule"), schedule], className="plan-schedule")]
    fields += [_field(key, option, query, of_run.get(key)) for key, option in PLAN.items()]
    fields += [html.Span(_OF_PLAN, className="note")]
    sizes = [html.Span("Sizes of a model, for what its ranks need", className="note")]
    sizes += [_field(key, option, query) for key, option in SIZES.items()]
    several = [html.Span(_SEVERAL, className="note")]
    several += [_text(key, option, query) for key, option in SEVERAL.items()]
    later = [waiting(id="plan-fits"), *made_in_parts("sweep", "Simulated sizes", "Simulating …", _STOP, _EVERY_MS)]
    forms = (html.Div(each, className="panel plan-fields") for each in (fields, sizes, several))
    return html.Div([*forms, html.Div(id="plan-body"), *later, waiting(id="plan-curves"), keeper("plan")])


def _id(key: str) -> str:
    """The id of a field; ``dashboards/guard.py`` takes numbers alone for what begins with plan."""
    is_number = key not in SEVERAL and _OPTIONS[key].takes in _NUMBERS
    return f"{'plan' if is_number else 'size'}-{key}"


def _field(key: str, option: Option, query: Query, value: float | None = None) -> Node:
    """The field of an option, with what the address has for it."""
    choices = option.choices or (("yes",) if option.takes is Value.FLAG else ())
    if choices:
        chosen = choice_of(query, key, choices)
        field = dcc.Dropdown(id=_id(key), options=list(choices), value=chosen, searchable=False)
        return html.Label([html.Span(option.label), field], title=option.help, className="plan-list")
    if option.takes not in _NUMBERS:
        return _text(key, option, query)
    value = number_of(query, key) if key in query else value
    least = int(option.takes is Value.WHOLE)
    usual = f"{option.default:g}" if key in COSTS else ""
    number = dcc.Input(id=_id(key), type="number", value=value, min=least, step="any", debounce=True, placeholder=usual)
    return html.Label([html.Span(option.label), number], title=option.hint or option.help)


def _text(key: str, option: Option, query: Query) -> Node:
    text = dcc.Input(id=_id(key), type="text", value=query.get(key), debounce=True, maxLength=100)
    wide: Any = {"className": "plan-list"} if option.takes is Value.TEXT else {}
    return html.Label([html.Span(option.label or option.name), text], title=option.hint or option.help, **wide)


def _of_run(loaded: Loaded) -> tuple[str, int, int, int | None, float, float, float]:
    plan = None if loaded.analysis is None else loaded.analysis.schedule.plan
    if plan is None or plan.name not in SCHEDULES:
        return "1f1b", 4, 8, None, 1.0, 2.0, 0.0
    return plan.name, plan.pp, plan.num_microbatches, plan.num_chunks, 1.0, 2.0, 0.0


def register(app: Dash, *_: object) -> None:
    _show(app, "plan-body", [*PLAN, *SIZES], body)
    _show(app, "plan-fits", [*PLAN, *SIZES, *SEVERAL], what_fits)
    _show(app, "plan-curves", list(PLAN), throughput)
    fill_in_parts(app, "sweep", _given(list(PLAN)), _sweep)
    keep_fields(app, "plan", "plan-schedule", *map(_id, _OPTIONS))


def _show(app: Dash, place: str, names: Sequence[str], parts: Callable[[OnPaper], list[Node]]) -> None:
    """Fill a place of the page by itself: the plan is there before the sweeps, which take longer."""

    @app.callback(Output(place, "children"), *_given(names))
    def show(*values: Any) -> Any:
        return parts(_form(names, *values))


def _given(names: Sequence[str]) -> list[Any]:
    """Inputs of the page that :func:`_form` takes."""
    fields = [Input(_id(key), "value") for key in names]
    return [Input("plan-schedule", "value"), *fields, State("location", "pathname")]


def _form(names: Sequence[str], schedule: str, *values: Any) -> OnPaper:
    *numbers, path = values
    if path != "/schedules":
        raise PreventUpdate
    return on_paper({"schedule": schedule} | dict(zip(names, numbers, strict=True)))


def body(form: OnPaper) -> list[Node]:
    """The plan drawn in time, its idle time by cause, and what a model needs with it, or the line that says why not."""
    return _or_refused([_plan, _needs], form)


def what_fits(form: OnPaper) -> list[Node]:
    """Combinations of the sizes of a model that fit, or a line, where the estimate of one of them does not say why not."""
    return _or_refused([_combinations], form, _refusal(form.estimate))


def throughput(form: OnPaper) -> list[Node]:
    """The throughput; or a line, where the plan's own and that of the bubbles do not say why not."""
    return _or_refused([_throughput], form, _refusal(form.step) or _refusal(lambda: form.bubbles(0)))


def _sweep(is_paused: bool, shown: str | None, *values: Any) -> tuple[Any, ...]:
    """The bubbles that are simulated, after some more of them; ``shown`` is the state of them that the page has."""
    form = _form(list(PLAN), *values)
    try:
        sweep = form.bubbles(0 if is_paused else _SWEPT_S)
    except PptraceError:
        return of_parts(_or_refused([_bubbles], form, _refusal(form.step)), 0, 0, "", is_paused, "")
    done, total = len(sweep.points), sweep.grid.num_points
    count = f"{done} of {total} combinations of schedule, v and m simulated"
    state = f"{done} {form.options}"
    return of_parts(no_update if state == shown else _bubbles(form), done, total, count, is_paused, state)


def _refusal(make: Callable[[], object]) -> str:
    """The line that says why something cannot be made, "" where it can."""
    try:
        make()
    except PptraceError as err:
        return str(err)
    return ""


def _or_refused(parts: Sequence[Callable[[OnPaper], list[Node]]], form: OnPaper, known: str = "") -> list[Node]:
    """Parts of the page, and the line of the first one that there cannot be, unless it is ``known``."""
    shown: list[Node] = []
    for part in parts:
        try:
            shown += part(form)
        except PptraceError as err:
            if not known:
                shown.append(html.P(str(err), className="panel problem", id=_REFUSED))
                known = str(err)
    return shown


def _plan(form: OnPaper) -> list[Node]:
    step = form.step()
    timeline = inline_simulation(step.simulation, most=_MOST_CHARACTERS)
    note = (
        f"{units.milliseconds(step.makespan_ns)} ms · bubble ratio {units.ratio(step.bubble_ratio)}, "
        f"{units.percent(step.bubble_share)} of the step · at most "
        f"{counted(int(max(step.ranks.peak_inflight_microbatches)), 'activation')} of a chunk on a rank"
    )
    note += f" · {timeline.lacks}" if timeline.lacks else ""
    data: dict[str, Any] = {"data-tiles": timeline.data}
    picture = html.Div(id="plan-timeline", className="timeline", **data)
    drawn = panel(form.schedule, picture, note=note, id="plan-drawn")
    idle = idle_table(step.simulation, units.milliseconds, "ms")
    tables = [] if idle is None else [with_files(report_table(idle), table_files("plan-idle", form.options))]
    return [with_files(drawn, table_files("plan-ops", form.options)), *tables]


def _needs(form: OnPaper) -> list[Node]:
    """Memory, FLOPs and communication of a model whose sizes are given."""
    run = form.estimate()
    if run is None:
        return []
    facts = (run.link_speeds, run.limit_bytes)
    lines = verdict_lines(run.estimate, run.step, run.speeds, *facts, run.unused_links)
    verdict = panel(
        "What it needs",
        *map(html.P, lines),
        html.P(["The same on the command line: ", html.Code(form.command)], className="note"),
        note=headline(run.estimate),
        id="plan-needs",
    )
    shown = tables(run.estimate, *facts)
    files = (table_files(f"plan-{table.key}", form.options) for table in shown)
    return [verdict, *(with_files(report_table(table), links) for table, links in zip(shown, files, strict=True))]


def _combinations(form: OnPaper) -> list[Node]:
    """The combinations of several values that fit, the best first, and why others do not."""
    found = form.candidates()
    if found is None:
        return []
    first, *others = sweep_lines(found)
    reasons = [lines(others, "plan-refusals")] if others else []
    table = candidate_table(found)
    box = report_table(table, first) if found[0].fits else panel(table.title, note=first)
    box.children += reasons
    return [with_files(box, table_files("plan-fits", form.options))]


def _bubbles(form: OnPaper) -> list[Node]:
    """The bubble ratio of every schedule that is not searched, over m from p to 8p, with 2 and 4 chunks."""
    title = "Bubble ratio of all schedules"
    return [
        _with_both_files(
            panel(title, still_picture(figure, "plan-bubbles"), note=f"{sizes}, the same costs; blank: {_BLANK}"),
            "plan-bubbles",
            "plan-bubbles",
            form,
        )
        for sizes, figure in heat_maps(form.bubbles(0))
    ]


def _throughput(form: OnPaper) -> list[Node]:
    """Throughput against p, with as few microbatches as p − 1 and with many more, unless the schedule is searched."""
    swept = form.throughput()
    pictures = [] if swept is None else curves(swept)
    note = f"{form.schedule}, the same costs of a rank"
    return [
        _with_both_files(panel(title, still_picture(figure, id), note=note), id, "plan-throughput", form)
        for id, (title, figure) in zip(map("plan-curves-{}".format, count()), pictures, strict=False)
    ]


def _with_both_files(box: Node, picture: str, table: str, form: OnPaper) -> Node:
    """The panel of a picture, with links to it and to the table that it shows."""
    return with_files(with_files(box, picture_files(picture)), table_files(table, form.options))
