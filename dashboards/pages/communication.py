"""The communication page: time by axis and kind, who sends how much to whom, and what the links reach."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, dcc, html
from dash.exceptions import PreventUpdate
from msgspec.structs import replace

from dashboards.address import Query, choice_of, keep_fields, keeper
from dashboards.components import Node
from dashboards.parts import body_of_step, chart, data_table, empty, guarded, no_steps
from dashboards.store import Loaded, Store
from pptrace.analysis.links.show import collectives_table, late_ranks_table, links_table, sizes_table
from pptrace.analysis.report import Report
from pptrace.model.report_table import Amount
from pptrace.model.wording import listed
from pptrace.report.charts.communication import (
    axes_of_links,
    comms_chart,
    is_by_stage,
    link_matrix,
    link_rates,
)
from pptrace.report.tables.communication import comm_totals_table, comms_table

_FEW_RANKS = 16
"""Most ranks that have a row each below the means."""
_MATRICES = (
    ("Bytes from rank to rank", "bytes", "the size of messages"),
    ("Transfer time from rank to rank", "transfer", "how long transfers took"),
    ("Late senders", "late sender", "any receiver that waited"),
)
_NO_LINKS = (
    "No message of this run is known from both ends: the traces have no messages, name no peers, or lack the ranks on the other "
    "side. The warnings of the overview say which."
)


def layout(loaded: Loaded, _answers: object, query: Query) -> Node:
    axes = [] if loaded.analysis is None else axes_of_links(loaded.analysis.report)
    choice = dcc.RadioItems(
        id="link-axis",
        options=[{"label": axis, "value": axis} for axis in axes],
        value=choice_of(query, "axis", axes) or next(iter(axes), None),
        inline=True,
        className="segments" + ("" if len(axes) > 1 else " gone"),
    )
    name: Any = {"data-name": "Axis of the links"}
    return html.Div(
        [html.Div(id="communication-body"), html.Div(choice, **name), html.Div(id="links-body"), keeper("links")]
    )


def register(app: Dash, store: Store, *_: object) -> None:
    body_of_step(app, store, "communication", of_step)

    @app.callback(Output("links-body", "children"), Input("link-axis", "value"))
    def show_links(axis: str | None) -> Any:
        loaded = store.get()
        if loaded.analysis is None:
            raise PreventUpdate
        report = loaded.analysis.report
        return guarded(lambda: of_links(report, axis), "Links", "links-failed")

    keep_fields(app, "links", "link-axis")


def of_step(loaded: Loaded, number: int | None) -> list[Node]:
    """Communication of the chosen step; without steps that of the whole traces."""
    assert loaded.analysis is not None
    report = loaded.analysis.report
    step = loaded.step(number)
    if step is None:
        if any(entry.comms for entry in report.device):
            return [data_table(comm_totals_table(report, Amount.WHOLE), "comm-totals")]
        return [no_steps("No communication in these traces", report)]
    if not any(rank.comms for rank in step.ranks):
        reason = (
            "These ranks communicated nothing, or what recorded them keeps no communication."
            if len(step.ranks) > 1
            else "One rank alone has a trace, and no communication in it."
        )
        return [empty(f"No communication in step {step.step}", reason, "no-comms")]
    note = f"step {step.step}, means over the ranks"
    meaning = "overlap: hidden behind compute; bus B/s: by the factors of nccl-tests"
    options = {"step": step.step}
    shown = [
        chart("Time by axis and kind", comms_chart(step), "comms-chart", "No call of it took any time.", note=note),
        data_table(comms_table(step, Amount.BRIEF), "comms", note=meaning, options=options),
    ]
    if 1 < len(step.ranks) <= _FEW_RANKS:
        of_ranks = replace(comms_table(step, Amount.WHOLE), title="Communication of each rank")
        shown.append(data_table(of_ranks, "comms", options=options))
    return shown


def of_links(report: Report, axis: str | None) -> list[Node]:
    """All steps together: matrices, the slowest links, those that wait most, and who is late."""
    parts: list[Node] = []
    if axis is not None and axis in axes_of_links(report):
        parts = [*_pictures(report, axis), data_table(links_table(report), "links")]
    elif report.steps:
        parts = [empty("No links", _NO_LINKS, "no-links")]
    if report.late_ranks:
        parts.append(data_table(late_ranks_table(report), "late-ranks"))
    if report.collectives:
        parts.append(data_table(sizes_table(report.collectives), "collectives"))
    if report.interconnect is not None and report.interconnect.collectives:
        parts.append(data_table(collectives_table(report.interconnect), "interconnect"))
    return parts


def _pictures(report: Report, axis: str) -> list[Node]:
    """The matrices and the slowest links that there are, and a line about the others."""
    note = f"{axis}, all steps{', by stage' if is_by_stage(report, axis) else ''}"
    figures = [
        (title, f"matrix-{what.replace(' ', '-')}", link_matrix(report, axis, what)) for title, what, _ in _MATRICES
    ]
    figures.append(("Slowest links", "link-rates", link_rates(report, axis)))
    shown = [chart(title, figure, id, "", note=note) for title, id, figure in figures if figure is not None]
    lacking = [what for (*_, what), (*_, figure) in zip(_MATRICES, figures, strict=False) if figure is None]
    line = [html.P(f"The traces do not show {listed(lacking)}.", className="note", id="links-lack")] if lacking else []
    return [html.Div(shown, className="columns ragged"), *line]
