"""A step in sums: what each rank did with it, and why it took as long as it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from pptrace.analysis.result import StepReport, Waterfall
from pptrace.report.colours import BUBBLE, COMMUNICATION, COMPUTE, FONT, GAIN, IDEAL, OTHER, PART_COLOURS
from pptrace.report.units import milliseconds, percent

_LABEL_WIDTH = 0.36
_GRID = "rgba(128, 134, 145, 0.25)"
_BASE: Mapping[str, Any] = {
    "template": "none",
    "font": {"family": FONT},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "hovermode": "closest",
    "hoverlabel": {"align": "left", "font": {"size": 13}},
}
_PARTS = (
    ("compute_ns", "Compute", COMPUTE),
    ("exposed_comm_ns", "Exposed communication", COMMUNICATION),
    ("bubble_ns", "Bubble", BUBBLE),
)
_CAUSES = {
    "compute": ("Ideal compute", "the ops' own time, spread evenly over the ranks"),
    "structural": ("Structural", "fill and drain of the schedule, every op of a kind at the same cost"),
    "imbalance": ("Imbalance", "stages that cost more than others"),
    "jitter": ("Jitter", "ops that take longer or shorter than their stage's mean"),
    "communication": ("Communication", "the measured transfers between stages"),
    "host": ("Host", "waiting for the host to launch work"),
    "unexplained": ("Unexplained", "what neither the ops nor the transfers show"),
}


def overview(step: StepReport) -> go.Figure:
    """Each rank's window as compute, exposed communication and bubble; a line marks where the ideal bubble would begin."""
    ranks = step.ranks
    names = [f"<b>rank {rank.rank}</b>{'' if rank.stage is None else f'  stage {rank.stage}'}" for rank in ranks]
    figure = go.Figure()
    for field, name, colour in _PARTS:
        values = [getattr(rank, field) for rank in ranks]
        shares = [value / rank.window_ns if rank.window_ns else 0.0 for value, rank in zip(values, ranks, strict=True)]
        figure.add_bar(
            orientation="h",
            y=list(range(len(ranks))),
            x=[value / 1e6 for value in values],
            name=name,
            marker={"color": colour, "line": {"width": 0}},
            width=0.7,
            text=[percent(share) for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": "#ffffff" if colour != BUBBLE else "#7f8794", "size": 13},
            customdata=[
                [rank.rank, milliseconds(value), percent(share)]
                for rank, value, share in zip(ranks, values, shares, strict=True)
            ],
            hovertemplate=f"<b>{name}</b><br>rank %{{customdata[0]}}: %{{customdata[1]}} ms, %{{customdata[2]}} of the step"
            "<extra></extra>",
        )
    _mark_ideal(figure, step)
    figure.update_layout(
        **_BASE,
        barmode="stack",
        height=round(min(max(210 / max(len(ranks), 1), 22), 70) * len(ranks) + 102),
        margin={"l": 16, "r": 16, "t": 42, "b": 46},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal"},
        uniformtext={"mode": "hide", "minsize": 10},
        dragmode=False,
        xaxis={
            "title": {"text": "ms", "standoff": 6},
            "range": [0, max((rank.window_ns for rank in ranks), default=0) / 1e6 * 1.005],
            "gridcolor": _GRID,
            "zeroline": False,
            "fixedrange": True,
        },
        yaxis={
            "tickmode": "array",
            "tickvals": list(range(len(ranks))),
            "ticktext": names,
            "range": [len(ranks) - 0.5, -0.5],
            "automargin": True,
            "zeroline": False,
            "showgrid": False,
            "fixedrange": True,
            "ticklabelstandoff": 6,
        },
    )
    return figure


def _mark_ideal(figure: go.Figure, step: StepReport) -> None:
    """Where each rank's bubble would begin if it had the plan's ideal share of the window."""
    share = step.bubble.ideal_share
    if share is None:
        return
    x: list[float | None] = []
    y: list[float | None] = []
    for place, rank in enumerate(step.ranks):
        begin = rank.window_ns * (1 - share) / 1e6
        x += [begin, begin, None]
        y += [place - 0.47, place + 0.47, None]
    figure.add_scatter(
        x=x,
        y=y,
        mode="lines",
        line={"color": IDEAL, "width": 2},
        name=f"Ideal bubble would begin here ({percent(share)})",
        hoverinfo="skip",
    )


def waterfall(step: StepReport) -> go.Figure:
    """The attribution of a step's span: each part begins where the one above it ends, and the last bar is the whole."""
    parts = step.bubble.waterfall_ns
    if parts is None:
        raise ValueError("the step has no waterfall")
    bars = _waterfall_bars(parts)
    total = step.span_ns or 1
    names = [_CAUSES[name][0] for name, _, _ in bars] + ["Measured step"]
    base = [min(start, start + value) / 1e6 for _, start, value in bars] + [0.0]
    size = [abs(value) / 1e6 for _, _, value in bars] + [step.span_ns / 1e6]
    colours = [PART_COLOURS[name] if value >= 0 else GAIN for name, _, value in bars] + [OTHER]
    labels = [_label(value, total, first=place == 0) for place, (_, _, value) in enumerate(bars)]
    figure = go.Figure(
        go.Bar(
            orientation="h",
            y=list(range(len(names))),
            base=base,
            x=size,
            width=0.64,
            marker={"color": colours, "line": {"width": 0}},
            customdata=[_CAUSES[name][1] for name, _, _ in bars] + ["from the first op's start to the last one's end"],
            text=[*labels, f"{milliseconds(step.span_ns)} ms"],
            textposition="none",
            hovertemplate="<b>%{text}</b><br>%{customdata}<extra></extra>",
        )
    )
    _label_bars(figure, base, size, [*labels, f"{milliseconds(step.span_ns)} ms"])
    _connect(figure, [start + value for _, start, value in bars])
    figure.update_layout(
        **_BASE,
        showlegend=False,
        height=34 * len(names) + 74,
        margin={"l": 16, "r": 16, "t": 12, "b": 46},
        dragmode=False,
        xaxis={
            "title": {"text": "ms", "standoff": 6},
            "range": [min(0.0, *base), max(_reach(parts), step.span_ns) / 1e6 * 1.03],
            "gridcolor": _GRID,
            "zeroline": False,
            "fixedrange": True,
        },
        yaxis={
            "tickmode": "array",
            "tickvals": list(range(len(names))),
            "ticktext": names,
            "range": [len(names) - 0.5, -0.5],
            "automargin": True,
            "zeroline": False,
            "showgrid": False,
            "fixedrange": True,
            "ticklabelstandoff": 6,
        },
    )
    return figure


def _waterfall_bars(parts: Waterfall) -> list[tuple[str, int, int]]:
    """(name, where it starts, its value) of each part that is known."""
    bars = []
    at = 0
    for name in _CAUSES:
        value = getattr(parts, name)
        if value is not None:
            bars.append((name, at, value))
            at += value
    return bars


def _reach(parts: Waterfall) -> int:
    return max(max(start, start + value) for _, start, value in _waterfall_bars(parts))


def _label(value: int, total: int, *, first: bool) -> str:
    sign = "−" if value < 0 else "" if first else "+"
    return f"{sign}{milliseconds(abs(value))} ms · {sign if value < 0 else ''}{percent(abs(value) / total)}"


def _label_bars(figure: go.Figure, base: list[float], size: list[float], labels: list[str]) -> None:
    """Each bar's numbers: right of it, else left of it, else inside, wherever there is room."""
    whole = max(start + length for start, length in zip(base, size, strict=True)) or 1.0
    places = [_label_place(start / whole, (start + length) / whole) for start, length in zip(base, size, strict=True)]
    figure.add_scatter(
        x=[
            start if place == "middle left" else start + length if place == "middle right" else start + length / 2
            for start, length, place in zip(base, size, places, strict=True)
        ],
        y=list(range(len(base))),
        mode="text",
        text=[f"  {label}  " for label in labels],
        textposition=places,
        textfont={"size": 12.5, "color": ["#ffffff" if place == "middle center" else "#3c434d" for place in places]},
        hoverinfo="skip",
        cliponaxis=False,
    )


def _label_place(start: float, end: float) -> str:
    """Where the label of a bar goes; ``start`` and ``end`` are parts of the whole width, of which a label takes a third."""
    if end <= 1 - _LABEL_WIDTH:
        return "middle right"
    return "middle left" if start >= _LABEL_WIDTH else "middle center"


def _connect(figure: go.Figure, ends_ns: list[int]) -> None:
    """Thin lines from the end of each part to the beginning of the next."""
    x: list[float | None] = []
    y: list[float | None] = []
    for place, end in enumerate(ends_ns):
        x += [end / 1e6, end / 1e6, None]
        y += [place, place + 1, None]
    figure.add_scatter(
        x=x, y=y, mode="lines", line={"color": "rgba(128, 134, 145, 0.7)", "width": 1, "dash": "dot"}, hoverinfo="skip"
    )
