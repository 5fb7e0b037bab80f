"""The timeline page: every op of a step, measured or planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import Dash, Input, Output, State, ctx, dcc, html
from dash.exceptions import PreventUpdate

from dashboards.components import Node, height_of
from dashboards.planned import PlannedStep, plan_step
from dashboards.store import Loaded, Store
from pptrace.report.detail import MOST_BARS
from pptrace.report.figures import CONFIG, View, note, timeline
from pptrace.report.units import milliseconds
from pptrace.workflow.analyse import Analysis

MEASURED, PLANNED = "measured", "planned"
_HELP = (
    "Below the ops: receives, then sends · wheel: zoom time · drag: select a stretch · Shift and drag: move · "
    "double click: whole step"
)

_NO_PIPELINE = (
    "No pipeline steps in these traces, so no ops to draw; the overview has what each rank did,<br>"
    "and pptrace analyze --perfetto FILE writes a trace for ui.perfetto.dev"
)


def layout(loaded: Loaded) -> Node:
    has_steps = any(step.has_pipeline for step in loaded.steps)
    has_plan = loaded.analysis is not None and loaded.analysis.schedule.plan is not None
    choice = dcc.RadioItems(
        id="timeline-source",
        options=[
            {"label": "Measured", "value": MEASURED, "disabled": not has_steps},
            {"label": "Planned", "value": PLANNED, "disabled": not (has_steps and has_plan)},
        ],
        value=MEASURED if has_steps else None,
        inline=True,
        className="segments",
        persistence=has_steps,
        persistence_type="session",
    )
    config: Any = dict(CONFIG) if has_steps else {"staticPlot": True}
    return html.Section(
        [
            html.Div([choice, html.Span(id="timeline-note", className="note")], className="panel-head"),
            dcc.Graph(id="timeline", config=config, className="graph", figure=note("")),
            html.P(_HELP if has_steps else "", className="help"),
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
        State("timeline", "relayoutData"),
    )
    def show(step: int | None, source: str, relayout: Mapping[str, Any] | None) -> Any:
        loaded = store.get()
        if loaded.analysis is None or (step is None and loaded.steps):
            raise PreventUpdate
        if not any(entry.has_pipeline for entry in loaded.steps):
            figure, line = note(_NO_PIPELINE), ""
        elif step is None:
            raise PreventUpdate
        else:
            figure, line = draw(
                loaded.analysis, step, source, None if ctx.triggered_id == "step" else range_of(relayout)
            )
        return figure, height_of(figure), line

    # Separate from the callback above: Dash drops the result of one that is triggered again meanwhile, as moving does.
    @app.callback(
        Output("timeline", "figure", allow_duplicate=True),
        Input("timeline", "relayoutData"),
        State("step", "value"),
        State("timeline-source", "value"),
        prevent_initial_call=True,
    )
    def redraw_visible(relayout: Mapping[str, Any] | None, step: int | None, source: str) -> Any:
        analysis, shown_ms = store.get().analysis, range_of(relayout)
        is_whole = bool((relayout or {}).get("xaxis.autorange"))
        if analysis is None or step is None or not (shown_ms or is_whole) or not is_long(analysis, step):
            raise PreventUpdate
        return draw(analysis, step, source, shown_ms)[0]


def range_of(relayout: Mapping[str, Any] | None) -> tuple[float, float] | None:
    """The range in ms that plotly shows now; None where its data lacks it."""
    values = relayout or {}
    low, high = values.get("xaxis.range") or (values.get("xaxis.range[0]"), values.get("xaxis.range[1]"))
    return None if low is None or high is None else (float(low), float(high))


def is_long(analysis: Analysis, step: int | None) -> bool:
    """Return whether a step has too many ops to draw each before zooming in."""
    return int((analysis.data.ops["step"] == step).sum()) > MOST_BARS


def draw(analysis: Analysis, step: int, source: str, shown_ms: tuple[float, float] | None = None) -> tuple[Any, str]:
    """The picture, and a line about it. Both sources have one scale, so that switching compares them.

    ``shown_ms`` is the range that the browser shows, from the step's start; None for the whole step.
    """
    windows = tuple(window for window in analysis.windows if window.step == step)
    if not windows:
        return note(f"The traces have no step {step}"), ""
    plan = plan_step(analysis, step)
    measured_ns = max(window.span_ns for window in windows)
    extent_ns = max(measured_ns, plan.span_ns) if plan else measured_ns
    start_ns = min(window.start_ns for window in windows)
    low, high = (0, extent_ns) if shown_ms is None else (round(shown_ms[0] * 1e6), round(shown_ms[1] * 1e6))
    view = View(start_ns + low, start_ns + high) if is_long(analysis, step) else None
    if source == PLANNED and plan is not None:
        figure = timeline(plan.ops, windows=plan.windows, extent_ns=extent_ns, view=view)
        line = f"{_plan_text(plan, measured_ns)}; every op at the mean cost of its kind, free messages"
    else:
        data = analysis.data
        figure = timeline(data.ops, data.comms, windows, data.lanes, extent_ns, view)
        line = f"Measured {milliseconds(measured_ns)} ms"
        line += f"; the plan alone would take {milliseconds(plan.span_ns)} ms" if plan else ""
    figure.update_layout(uirevision=f"step {step}, {shown_ms if view else 'whole'}")
    if view is not None and shown_ms is not None:
        figure.update_xaxes(range=list(shown_ms))
    return figure, line


def _plan_text(plan: PlannedStep, measured_ns: int) -> str:
    return f"The plan alone takes {milliseconds(plan.span_ns)} ms, measured {milliseconds(measured_ns)} ms"
