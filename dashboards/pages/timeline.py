"""The timeline: every op of a step, as it was measured or as the plan would have it."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, dcc, html
from dash.exceptions import PreventUpdate

from dashboards.components import Node, height_of
from dashboards.planned import PlannedStep, plan_step
from dashboards.store import Loaded, Store
from pptrace.analysis.analyse import Analysis
from pptrace.report.figures import CONFIG, note, timeline
from pptrace.report.units import milliseconds

MEASURED, PLANNED = "measured", "planned"
_HELP = (
    "Below the ops: receives, then sends · wheel: zoom time · drag: select a stretch · Shift and drag: move · "
    "double click: whole step"
)


def layout(loaded: Loaded) -> Node:
    has_plan = loaded.analysis is not None and loaded.analysis.plan is not None
    choice = dcc.RadioItems(
        id="timeline-source",
        options=[
            {"label": "Measured", "value": MEASURED},
            {"label": "Planned", "value": PLANNED, "disabled": not has_plan},
        ],
        value=MEASURED,
        inline=True,
        className="segments",
        persistence=True,
        persistence_type="session",
    )
    config: Any = dict(CONFIG)
    return html.Section(
        [
            html.Div([choice, html.Span(id="timeline-note", className="note")], className="panel-head"),
            dcc.Graph(id="timeline", config=config, className="graph", figure=note("")),
            html.P(_HELP, className="help"),
        ],
        className="panel",
    )


def register(app: Dash, store: Store) -> None:
    @app.callback(
        Output("timeline", "figure"),
        Output("timeline", "style"),
        Output("timeline-note", "children"),
        Input("step", "value"),
        Input("timeline-source", "value"),
    )
    def show(step: int | None, source: str) -> Any:
        loaded = store.get()
        if loaded.analysis is None or (step is None and loaded.steps):
            raise PreventUpdate
        if step is None:
            figure, line = note("No pipeline steps in these traces"), "The overview has what they tell all the same."
        else:
            figure, line = draw(loaded.analysis, step, source)
        return figure, height_of(figure), line


def draw(analysis: Analysis, step: int, source: str) -> tuple[Any, str]:
    """The picture, and a line about it. Both sources have one scale, so that switching compares them."""
    windows = tuple(window for window in analysis.windows if window.step == step)
    if not windows:
        return note(f"The traces have no step {step}"), ""
    plan = plan_step(analysis, step)
    measured_ns = max(window.span_ns for window in windows)
    extent_ns = max(measured_ns, plan.span_ns) if plan else measured_ns
    if source == PLANNED and plan is not None:
        figure = timeline(plan.ops, windows=plan.windows, extent_ns=extent_ns)
        line = f"{_plan_text(plan, measured_ns)}; every op at the mean cost of its kind, messages for nothing"
    else:
        data = analysis.data
        figure = timeline(data.ops, data.comms, windows, data.lanes, extent_ns)
        line = f"Measured {milliseconds(measured_ns)} ms" + (
            f"; the plan alone would take {milliseconds(plan.span_ns)} ms" if plan else ""
        )
    figure.update_layout(uirevision=f"step {step}")
    return figure, line


def _plan_text(plan: PlannedStep, measured_ns: int) -> str:
    return f"The plan alone takes {milliseconds(plan.span_ns)} ms, measured {milliseconds(measured_ns)} ms"
