"""The common look of charts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from pptrace.report.colours import DARK_SCALE, FONT, HOVER_LABEL, SCALE

GRID = "rgba(128, 134, 145, 0.25)"
QUIET = "rgba(128, 134, 145, 0.7)"
"""Lines that are no data, on light and dark ground."""
MOST_TEXTS = 12
"""Most columns of a heat map whose cells have texts."""
MOST_NAMED = 8
"""Most columns of a matrix that have their whole names below them, next to one another."""
_MOST_NUMBERED = 24


def lay_out(
    figure: go.Figure, height: int, x: str = "", y: str = "", *, can_zoom: bool = False, **options: Any
) -> go.Figure:
    """The figure with the common look, ``height`` px high, and the titles of its axes; ``options`` are plotly's."""
    figure.update_layout(
        template="none",
        font={"family": FONT},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="closest",
        hoverlabel=dict(HOVER_LABEL),
        height=height,
        margin={"l": 16, "r": 16, "t": 42, "b": 46},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal"},
        dragmode="zoom" if can_zoom else False,
    )
    axis = {"gridcolor": GRID, "zeroline": False, "automargin": True, "fixedrange": not can_zoom}
    figure.update_xaxes(title={"text": x, "standoff": 8}, **axis)
    figure.update_yaxes(title={"text": y, "standoff": 8}, **axis)
    figure.update_layout(**options)
    return figure


def heat_map(
    x: Sequence[Any],
    y: Sequence[str],
    z: Sequence[Sequence[float | None]],
    unit: str,
    texts: Sequence[Sequence[str]],
    hovers: Sequence[Sequence[str]],
) -> go.Heatmap:
    """Cells from 0 to the largest, None ones empty; ``texts`` are written into them where there are few columns."""
    return go.Heatmap(
        x=list(x),
        y=y,
        z=z,
        zmin=0,
        zmax=max(value for row in z for value in row if value is not None),
        colorscale=SCALE,
        meta={"dark": DARK_SCALE},
        colorbar={"title": {"text": unit, "side": "right"}, "thickness": 12, "nticks": 5, "exponentformat": "SI"},
        text=texts,
        texttemplate="%{text}" if len(x) <= MOST_TEXTS else None,
        customdata=hovers,
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
        xgap=1,
        ygap=1,
    )


def matrix_columns(labels: Sequence[str]) -> dict[str, object]:
    """Names of columns that do not overlap: numbers alone where there are many, and not of each where there are very many."""
    if len(labels) <= MOST_NAMED:
        return {}
    named = labels[:: -(-len(labels) // _MOST_NUMBERED)]
    return {"tickvals": named, "ticktext": [label.split()[1].rstrip(",") for label in named], "tickangle": 0}


_LEAST_ROOM = 5
"""Number of bars side by side for which a picture has room, so that one bar alone is no wall."""


def columns_axis(num_columns: int, **options: Any) -> dict[str, Any]:
    """A horizontal axis with one name per column; few columns stand in the middle, as wide as those of a few more."""
    margin = max(_LEAST_ROOM - num_columns, 0) / 2
    span = {"range": [-0.5 - margin, num_columns - 0.5 + margin]}
    return {"type": "category", "showgrid": False, **(span if margin else {}), **options}


def names_axis(names: Sequence[str]) -> dict[str, Any]:
    """A vertical axis with one name per row, from the top down."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
        "ticklabelstandoff": 6,
    }


_SIGN = re.compile(r"(?<!\w)-(?=\d)")
MINUS = "−"
"""The sign that plotly writes on axes."""


def with_minus(text: str) -> str:
    """The text with the sign of the axes before its negative numbers."""
    return _SIGN.sub(MINUS, text)


def add_bars(figure: go.Figure, values: Sequence[float | None], name: str = "", **options: Any) -> None:
    """Add horizontal bars, one per row of :func:`names_axis`; ``colour`` is that of each, or one for all."""
    marker = {"color": options.pop("colour"), "line": {"width": 0}}
    figure.add_bar(
        orientation="h", y=list(range(len(values))), x=list(values), name=name or None, marker=marker, **options
    )


def add_lines(figure: go.Figure, lines: Iterable[tuple[float, float, float, float]], **options: Any) -> None:
    """Add lines, each from (x, y) to (x, y), as one trace."""
    x: list[float | None] = []
    y: list[float | None] = []
    for x0, y0, x1, y1 in lines:
        x += [x0, x1, None]
        y += [y0, y1, None]
    figure.add_scatter(x=x, y=y, mode="lines", hoverinfo="skip", **options)


def label_bars(figure: go.Figure, ends: Sequence[float], texts: Sequence[str]) -> None:
    """Write a text beyond the end of each horizontal bar, as text of the page and not of the bars, which have one colour each."""
    figure.add_scatter(
        x=list(ends),
        y=list(range(len(ends))),
        mode="text",
        text=[f"  {with_minus(text)}  " for text in texts],
        textposition=["middle right" if end >= 0 else "middle left" for end in ends],
        textfont={"size": 12},
        hoverinfo="skip",
        showlegend=False,
        cliponaxis=False,
    )


def plain(name: object) -> str:
    """A name of a trace as text for plotly, which else takes some of it for markup."""
    return escape(str(name), quote=False)
