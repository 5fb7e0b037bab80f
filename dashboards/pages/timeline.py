"""The timeline page: every op of a run, planned, simulated and measured, drawn by ``assets/timeline*.js`` from tiles."""

from __future__ import annotations

from dash import ClientsideFunction, Dash, Input, Output, dcc, html

from dashboards.components import Node


def layout() -> Node:
    return html.Section([html.Div(id="timeline"), dcc.Store(id="timeline-step")], className="panel timeline-panel")


def register(app: Dash) -> None:
    app.clientside_callback(
        ClientsideFunction("pptraceTimeline", "chooseStep"), Output("timeline-step", "data"), Input("step", "value")
    )
