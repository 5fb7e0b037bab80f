"""The timeline page: every op of a run, planned, simulated and measured; :mod:`pptrace.report.tiles.scripts` draws it."""

from __future__ import annotations

from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, dcc, html

from dashboards.components import Node


def layout() -> Node:
    return html.Section(
        [html.Div(id="timeline", className="timeline"), dcc.Store(id="timeline-step")], className="panel timeline-panel"
    )


def register(app: Dash) -> None:
    choose: Any = ClientsideFunction("pptraceTimeline", "chooseStep")
    clientside: Any = app.clientside_callback
    clientside(choose, Output("timeline-step", "data"), Input("step", "value"), Input("step", "options"))
