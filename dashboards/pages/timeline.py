"""The timeline page: every op of a run, planned, simulated and measured; :mod:`pptrace.report.tiles.scripts` draws it."""

from __future__ import annotations

from dash import Dash, Input, Output, dcc, html

from dashboards.components import Node, in_browser


def layout(*_: object) -> Node:
    return html.Section(
        [html.Div(id="timeline", className="timeline"), dcc.Store(id="timeline-step")], className="panel timeline-panel"
    )


def register(app: Dash, *_: object) -> None:
    of_header = Input("step", "value"), Input("step", "options")
    in_browser(app, "pptraceTimeline", "chooseStep", Output("timeline-step", "data"), *of_header)
