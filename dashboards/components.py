"""Components of pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dash import ClientsideFunction, Dash, dcc, html

from pptrace.hang_diagnosis.calls import rank_text
from pptrace.model.report_table import ReportTable
from pptrace.report.hang import EDGE_COLUMNS, edge_rows, wait_graph

Node = Any
"""A Dash component, or text."""


def in_browser(app: Dash, script: str, function: str, *parts: Any, **options: Any) -> None:
    """Let the browser answer a callback: ``function`` of what a ``script`` gives to ``window.dash_clientside``."""
    clientside: Any = app.clientside_callback
    clientside(ClientsideFunction(script, function), *parts, **options)


def panel(title: str, *children: Node, note: str = "", id: str = "") -> Node:
    """A titled box."""
    head: list[Node] = [html.H2(title)]
    if note:
        head.append(html.Span(note, className="note"))
    options: dict[str, Any] = {"id": id} if id else {}
    return html.Section([html.Div(head, className="panel-head"), *children], className="panel", **options)


def tile(label: str, value: str, detail: str, hint: str, id: str, tone: str = "") -> Node:
    """One number with its reference value; ``hint`` is its tooltip."""
    return html.Div(
        [
            html.Div(label, className="tile-label"),
            html.Div(value, className=f"tile-value {tone}".strip(), id=id),
            html.Div(detail, className="tile-detail", id=f"{id}-detail"),
        ],
        className="tile",
        title=hint,
    )


def fact(name: str, value: str, hint: str = "") -> Node:
    return html.Span([html.Span(name, className="fact-name"), html.Span(value)], className="fact", title=hint)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, text_columns: int = 1, id: str = "") -> Node:
    """A table of text; after the first ``text_columns`` the cells are numbers, but for remarks, whose column has no name. A row
    with its first cell alone is the heading of those below it.

    It is one component that carries its markup, which ``assets/markup.js`` puts into the page: for a component Dash takes time in
    proportion to the number of all of them, minutes for the cells of a run of 64 ranks.
    """
    is_text = [index < text_columns or not str(column).strip() for index, column in enumerate(columns)]
    head = _row("th", columns, is_text)
    body = "".join(_row("td", row, is_text) for row in rows)
    name = f' id="{escape(id)}"' if id else ""
    markup = f"<table{name}><thead>{head}</thead><tbody>{body}</tbody></table>"
    data: dict[str, Any] = {"data-markup": markup}
    return html.Div(className="table-box", **data)


_SHORT = 16
"""Characters of a text that stays on one line, such as ``stage 1``."""


def _row(tag: str, cells: Sequence[object], is_text: Sequence[bool]) -> str:
    kinds = (
        (' class="short"' if len(str(cell)) <= _SHORT else "") if text else ' class="number"'
        for cell, text in zip(cells, is_text, strict=True)
    )
    tags = (tag if str(cell).strip() else "td" for cell in cells)  # a column without a name has no header
    marked = zip(tags, kinds, map(escape, map(str, cells)), strict=True)
    heads = len(cells) > 1 and not any(str(cell).strip() for cell in cells[1:])
    return (
        f"<tr{' class=group' * heads}>{''.join(f'<{name}{kind}>{text}</{name}>' for name, kind, text in marked)}</tr>"
    )


def report_table(content: ReportTable, note: str = "") -> Node:
    """A table of the report in a panel; columns of bars, which pictures show, are left out."""
    columns, rows = content.without_bars()
    return panel(
        content.title,
        table(columns, rows, text_columns=content.num_labels, id=content.key),
        *(html.P(line, className="note") for line in content.notes),
        note=note,
    )


def graph(figure: Any, id: str) -> Node:
    """A figure without plotly's buttons, which leaves scrolling to the page."""
    options: Any = {"displayModeBar": False, "responsive": True}
    height = f"{figure.layout.height}px"
    # A responsive figure has else no height; --graph-height is for wide screens.
    style = {"height": height, "--graph-height": height}
    return dcc.Graph(id=id, figure=figure, config=options, style=style, className="graph")


def still_picture(figure: Any, id: str) -> Node:
    """A graph with its room, which the page has before its scripts have drawn anything: nothing below it jumps."""
    return html.Div(graph(figure, id), className="still", style={"minHeight": f"{figure.layout.height}px"})


def hang_panel(hang: Mapping[str, Any], *notes: Node) -> Node:
    """The verdict on a run that hung: a sentence with ``notes`` below it, a table, and a graph where the ranks are few."""
    graph, rows = wait_graph(hang), edge_rows(hang)
    columns = [name.capitalize() for name in EDGE_COLUMNS]
    content = [table(columns, rows, text_columns=len(columns), id="hang-edges")] if rows else []
    drawn: dict[str, Any] = {"data-markup": graph}
    content += [html.Div(id="hang-graph", **drawn)] if graph is not None else []
    red = "" if graph is None else ", red in the picture"
    guilty = [html.P(f"To blame{red}: {rank_text(hang['ranks'])}", className="note")] if hang["ranks"] else []
    return html.Section(
        [
            html.H2("The run hung"),
            html.P(html.Strong(str(hang["detail"])), id="hang-detail"),
            *guilty,
            *notes,
            html.Div(content, className="columns wide-left"),
        ],
        className="panel problem hang",
        id="hang",
    )


def lines(items: Sequence[str], id: str) -> Node:
    return html.Ul([html.Li(item) for item in items], id=id, className="lines")
