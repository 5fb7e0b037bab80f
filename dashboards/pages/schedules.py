"""The schedules page: a schedule of any size and cost on paper, and the bubbles of all of them."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, dcc, html
from dash.exceptions import PreventUpdate

from dashboards.components import Node, height_of, held, panel, report_table, still_picture
from dashboards.exports import picture_files
from dashboards.parts import with_files
from dashboards.store import Loaded, Store
from pptrace.api.simulate import MillisecondCosts, Sizes, simulate_as
from pptrace.api.sweep import SweepArguments, sweep_as
from pptrace.errors import PptraceError
from pptrace.report import units
from pptrace.report.figures import CONFIG, timeline
from pptrace.report.idle import idle_table
from pptrace.report.sweep.figures import heat_maps
from pptrace.schedule.registry import SCHEDULES
from pptrace.simulator import Simulation

_NUMBERS = (
    ("pp", "p", "pipeline ranks", 1),
    ("microbatches", "m", "microbatches of a step", 1),
    ("chunks", "v", "virtual stages of a rank; empty: the schedule's", 1),
    ("forward", "F ms", "forward of one microbatch in all layers of a rank", 0),
    ("backward", "B ms", "full backward of the same", 0),
    ("p2p", "message ms", "one message", 0),
)
_MOST_ACTIONS = 20_000
"""Most actions of a plan that is drawn."""


def layout(loaded: Loaded) -> Node:
    """The page, with the schedule and sizes of the run, where it has them."""
    name, *values = _of_run(loaded)
    schedule = dcc.Dropdown(id="plan-schedule", options=list(SCHEDULES), value=name, clearable=False, searchable=False)
    fields = [html.Label([html.Span("Schedule"), schedule], className="plan-schedule")]
    for (key, label, hint, least), value in zip(_NUMBERS, values, strict=True):
        number = dcc.Input(id=f"plan-{key}", type="number", value=value, min=least, step="any", debounce=True)
        fields.append(html.Label([html.Span(label), number], title=hint))
    return html.Div([html.Div(fields, className="panel plan-fields"), html.Div(id="plan-body")])


def _of_run(loaded: Loaded) -> tuple[str, int, int, int | None, float, float, float]:
    plan = None if loaded.analysis is None else loaded.analysis.schedule.plan
    if plan is None or plan.name not in SCHEDULES:
        return "1f1b", 4, 8, None, 1.0, 2.0, 0.0
    return plan.name, plan.pp, plan.num_microbatches, plan.num_chunks, 1.0, 2.0, 0.0


def register(app: Dash, _store: Store) -> None:
    @app.callback(
        Output("plan-body", "children"),
        Input("plan-schedule", "value"),
        *(Input(f"plan-{key}", "value") for key, *_ in _NUMBERS),
        State("location", "pathname"),
    )
    def show(name: str, *values: Any) -> Any:
        *numbers, path = values
        if path != "/schedules":
            raise PreventUpdate
        return body(name, *numbers)


def body(
    name: str,
    pp: float | None,
    microbatches: float | None,
    chunks: float | None,
    forward: float | None,
    backward: float | None,
    p2p: float | None,
) -> list[Node]:
    """The plan drawn in time, its idle time by cause, and the bubbles of all schedules over m; or the line that says why not."""
    sizes = (_whole(pp), _whole(microbatches), _whole(chunks))
    costs = (forward or 0.0, backward or 0.0, p2p or 0.0)
    try:
        shown = _plan(name, *sizes, *costs)
    except PptraceError as err:
        shown = [html.P(str(err), className="panel problem", id="plan-refused")]
    try:
        return [*shown, *_bubbles(sizes[0], *costs)]
    except PptraceError:  # the page of the plan shows why
        return shown


def _whole(number: float | None) -> int | float | None:
    """A whole number as such; what is none is left for the error that says so."""
    return int(number) if number is not None and number == int(number) else number


def _plan(
    name: str, pp: Any, microbatches: Any, chunks: Any, forward: float, backward: float, p2p: float
) -> list[Node]:
    parts = chunks or SCHEDULES[name].default_chunks
    parts = 1 if SCHEDULES[name].bidirectional else parts
    size = (pp or 0) * (microbatches or 0) * (chunks or SCHEDULES[name].default_chunks)
    if size > _MOST_ACTIONS:
        raise PptraceError(f"{size:,} forwards are more than a page can draw; expected at most {_MOST_ACTIONS:,}")
    costs = MillisecondCosts(forward / parts, backward / parts, None, p2p)
    step = simulate_as(name, Sizes(pp, microbatches, chunks), costs)
    figure = timeline(step.ops)
    note = (
        f"{units.milliseconds(step.makespan_ns)} ms · bubble ratio {units.ratio(step.bubble_ratio)}, "
        f"{units.percent(step.bubble_share)} of the step · at most {max(step.ranks.peak_inflight_microbatches)} "
        "activations of a chunk on a rank"
    )
    config: Any = dict(CONFIG)
    graph = dcc.Graph(id="plan-timeline", figure=figure, config=config, style=height_of(figure), className="graph")
    drawn = with_files(panel(name, held(graph, figure), note=note, id="plan-drawn"), picture_files("plan-timeline"))
    return [drawn, *_idle(step.simulation)]


def _idle(simulation: Simulation) -> list[Node]:
    table = idle_table(simulation, units.milliseconds, "ms")
    return [] if table is None else [report_table(table)]


def _bubbles(pp: Any, forward: float, backward: float, p2p: float) -> list[Node]:
    """The bubble ratio of every schedule that is not searched, over m from p to 8p, with 2 and 4 chunks."""
    names = [name for name, entry in SCHEDULES.items() if not entry.searches]
    asked = SweepArguments(pp, "p,2p,3p,4p,6p,8p", "1,2,4", forward=forward, backward=backward, p2p=p2p)
    return [
        with_files(
            panel(
                "Bubble ratio of all schedules", still_picture(figure, "plan-bubbles"), note=f"{title}, the same costs"
            ),
            picture_files("plan-bubbles"),
        )
        for title, figure in heat_maps(sweep_as(names, asked))
    ]
