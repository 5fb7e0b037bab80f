"""The schedules page: a schedule of any size and cost on paper, the bubbles of all of them, and throughput against p."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate

from dashboards.address import NOTHING, Query, choice_of, keep_fields, keeper, number_of
from dashboards.components import Node, panel, report_table, still_picture
from dashboards.exports import picture_files, table_files
from dashboards.paper import OnPaper, on_paper
from dashboards.parts import waiting, with_files
from dashboards.store import Loaded, Store
from pptrace.errors import PptraceError
from pptrace.model import units
from pptrace.model.wording import counted
from pptrace.report.estimate.table import headline, tables
from pptrace.report.figures import CONFIG, timeline
from pptrace.report.idle import idle_table
from pptrace.report.sweep.figures import curves, heat_maps
from pptrace.schedule.registry import SCHEDULES

_NUMBERS = (
    ("pp", "p", "pipeline ranks", 1),
    ("microbatches", "m", "microbatches of a step", 1),
    ("chunks", "v", "virtual stages of a rank; empty: the schedule's", 1),
    ("forward", "F ms", "forward of one microbatch in all layers of a rank", 0),
    ("backward", "B ms", "full backward of the same", 0),
    ("p2p", "message ms", "one message", 0),
)
_MODEL = (
    ("layers", "layers", "layers of the model", 1),
    ("hidden", "hidden", "hidden size", 1),
    ("heads", "heads", "attention heads", 1),
    ("sequence", "sequence", "tokens of a sequence", 1),
    ("vocabulary", "vocabulary", "rows of embedding and head", 1),
    ("microbatch_size", "b", "sequences of a microbatch; empty: 1", 1),
    ("tp", "tp", "tensor-parallel ranks; empty: 1", 1),
    ("dp", "dp", "data-parallel pipelines; empty: 1", 1),
    ("zero", "ZeRO", "0 to 3: what replicas share", 0),
)
_REFUSED = "plan-refused"


def layout(loaded: Loaded, query: Query = NOTHING) -> Node:
    """The page, with the schedule and sizes of the address, or those of the run, where it has them."""
    name, *values = _of_run(loaded)
    if (chosen := choice_of(query, "schedule", list(SCHEDULES))) is not None:
        name, values = chosen, [None for _ in values]
    values = [
        number_of(query, key) if key in query else value for (key, *_), value in zip(_NUMBERS, values, strict=True)
    ]
    schedule = dcc.Dropdown(id="plan-schedule", options=list(SCHEDULES), value=name, clearable=False, searchable=False)
    fields = [html.Label([html.Span("Schedule"), schedule], className="plan-schedule")]
    fields += [_field(*number, value) for number, value in zip(_NUMBERS, values, strict=True)]
    sizes = [html.Span("Sizes of a model, for what its ranks need", className="note")]
    sizes += [_field(*number, number_of(query, number[0])) for number in _MODEL]
    later = waiting(id="plan-sweeps")
    forms = (html.Div(each, className="panel plan-fields") for each in (fields, sizes))
    return html.Div([*forms, html.Div(id="plan-body"), later, keeper("plan")])


def _field(key: str, label: str, hint: str, least: int, value: float | None) -> Node:
    number = dcc.Input(id=f"plan-{key}", type="number", value=value, min=least, step="any", debounce=True)
    return html.Label([html.Span(label), number], title=hint)


def _of_run(loaded: Loaded) -> tuple[str, int, int, int | None, float, float, float]:
    plan = None if loaded.analysis is None else loaded.analysis.schedule.plan
    if plan is None or plan.name not in SCHEDULES:
        return "1f1b", 4, 8, None, 1.0, 2.0, 0.0
    return plan.name, plan.pp, plan.num_microbatches, plan.num_chunks, 1.0, 2.0, 0.0


def register(app: Dash, _store: Store) -> None:
    of_plan, of_model = ([key for key, *_ in numbers] for numbers in (_NUMBERS, _MODEL))
    _show(app, "plan-body", [*of_plan, *of_model], body)
    _show(app, "plan-sweeps", of_plan, sweeps)
    keep_fields(app, "plan", "plan-schedule", *(f"plan-{key}" for key in (*of_plan, *of_model)))


def _show(app: Dash, place: str, names: Sequence[str], parts: Callable[[OnPaper], list[Node]]) -> None:
    """Fill a place of the page by itself: the plan is there before the sweeps, which take longer."""

    @app.callback(
        Output(place, "children"),
        Input("plan-schedule", "value"),
        *(Input(f"plan-{key}", "value") for key in names),
        State("location", "pathname"),
    )
    def show(schedule: str, *values: Any) -> Any:
        *numbers, path = values
        if path != "/schedules":
            raise PreventUpdate
        return parts(on_paper({"schedule": schedule} | dict(zip(names, numbers, strict=True))))


def body(form: OnPaper) -> list[Node]:
    """The plan drawn in time, its idle time by cause, and what a model needs with it, or the line that says why not."""
    return _or_refused([_plan, _needs], form)


def sweeps(form: OnPaper) -> list[Node]:
    """The bubbles of all schedules over m, and the throughput; or a line, where the plan's own does not say why not."""
    try:
        form.step()
    except PptraceError as err:
        known = str(err)
    else:
        known = ""
    return _or_refused([_bubbles, _throughput], form, known)


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
    figure = timeline(step.ops)
    note = (
        f"{units.milliseconds(step.makespan_ns)} ms · bubble ratio {units.ratio(step.bubble_ratio)}, "
        f"{units.percent(step.bubble_share)} of the step · at most "
        f"{counted(int(max(step.ranks.peak_inflight_microbatches)), 'activation')} of a chunk on a rank"
    )
    drawn = panel(form.schedule, still_picture(figure, "plan-timeline", CONFIG), note=note, id="plan-drawn")
    idle = idle_table(step.simulation, units.milliseconds, "ms")
    tables = [] if idle is None else [with_files(report_table(idle), table_files("plan-idle", form.options))]
    return [_with_both_files(drawn, "plan-timeline", "plan-ops", form), *tables]


def _needs(form: OnPaper) -> list[Node]:
    """Memory, FLOPs and communication of a model whose sizes are given."""
    run = form.estimate()
    if run is None:
        return []
    shown = tables(run.estimate, run.link_speeds, None)
    notes = [headline(run.estimate)] + [""] * (len(shown) - 1)
    files = (table_files(f"plan-{table.key}", form.options) for table in shown)
    return [
        with_files(report_table(table, note), links) for table, note, links in zip(shown, notes, files, strict=True)
    ]


def _bubbles(form: OnPaper) -> list[Node]:
    """The bubble ratio of every schedule that is not searched, over m from p to 8p, with 2 and 4 chunks."""
    title = "Bubble ratio of all schedules"
    return [
        _with_both_files(
            panel(title, still_picture(figure, "plan-bubbles"), note=f"{sizes}, the same costs"),
            "plan-bubbles",
            "plan-bubbles",
            form,
        )
        for sizes, figure in heat_maps(form.bubbles())
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
