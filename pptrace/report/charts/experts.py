"""Experts: routes of each expert in each layer, rows of each rank, and for how long others waited for it."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from pptrace.analysis.expert_parts import ExpertsReport, LayerLoad, RankLoad
from pptrace.report import units
from pptrace.report.charts.base import MOST_TEXTS, heat_map, label_bars, lay_out, names_axis
from pptrace.report.colours import COMMUNICATION, COMPUTE, WAIT
from pptrace.report.tables.experts import layer_name

MOST_RANKS = 48
"""Most ranks that charts of ranks show: those for which others waited longest."""


def routes_map(experts: ExpertsReport) -> go.Figure | None:
    """The routes of each expert over the mean of its layer as a heat map, layers as rows; None where none were counted."""
    layers = [layer for layer in experts.layers if layer.routes and sum(layer.routes)]
    if not layers:
        return None
    names = [f"layer {layer_name(layer.layer, layer.stage, layer.nth)}" for layer in layers]
    ratios = [
        [count * len(layer.routes or ()) / sum(layer.routes or ()) for count in layer.routes or ()] for layer in layers
    ]
    width = max(map(len, ratios))
    figure = go.Figure(
        heat_map(
            range(width),
            names,
            ratios,
            "× mean",
            [[f"{ratio:.2f}" for ratio in row] for row in ratios],
            [[_hover(layer, expert) for expert in range(len(layer.routes or ()))] for layer in layers],
        )
    )
    return lay_out(
        figure,
        min(max(26 * len(names), 120), 620) + 96,
        "expert",
        margin={"l": 16, "r": 16, "t": 10, "b": 46},
        xaxis={"showgrid": False, "dtick": 1 if width <= MOST_TEXTS else None},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
    )


def _hover(layer: LayerLoad, expert: int) -> str:
    count = (layer.routes or ())[expert]
    name = layer_name(layer.layer, layer.stage, layer.nth)
    return f"<b>expert {expert}</b> in layer {name}<br>{count:,} routes of {sum(layer.routes or ()):,}"


def rows_chart(experts: ExpertsReport) -> go.Figure | None:
    """The rows that each rank's experts computed; None where none are known."""
    ranks = [rank for rank in shown_ranks(experts.ranks) if rank.rows is not None]
    if not ranks:
        return None
    figure = go.Figure()
    _bars(figure, "Rows in forwards", COMPUTE, [rank.rows or 0 for rank in ranks], "rows")
    texts = ["" if rank.ratio is None else f"{rank.ratio:.2f} × its group" for rank in ranks]
    label_bars(figure, [rank.rows or 0 for rank in ranks], texts)
    return lay_out(
        figure,
        34 * len(ranks) + 110,
        "rows, all steps",
        xaxis=_range([rank.rows or 0 for rank in ranks]),
        yaxis=_names(ranks),
    )


def lateness_chart(experts: ExpertsReport) -> go.Figure | None:
    """For how long others waited for each rank, before its experts and after them, ms; None where calls are not matched."""
    ranks = [rank for rank in shown_ranks(experts.ranks) if rank.caused_after_ns is not None]
    if not ranks:
        return None
    figure = go.Figure()
    before, after = (
        [(getattr(rank, name) or 0) / 1e6 for rank in ranks] for name in ("caused_before_ns", "caused_after_ns")
    )
    _bars(figure, "Late to the layer", WAIT, before, "ms")
    _bars(figure, "Late from its experts", COMMUNICATION, after, "ms")
    ends = [first + second for first, second in zip(before, after, strict=True)]
    label_bars(figure, ends, [f"{units.ratio(rank.slowness)} × others" if rank.slowness else "" for rank in ranks])
    axis = "ms that others waited for it, all steps"
    return lay_out(figure, 34 * len(ranks) + 110, axis, barmode="stack", xaxis=_range(ends), yaxis=_names(ranks))


def shown_ranks(ranks: Sequence[RankLoad]) -> list[RankLoad]:
    """The ranks; of more than :data:`MOST_RANKS` those for which others waited longest."""
    if len(ranks) <= MOST_RANKS:
        return list(ranks)
    worst = sorted(ranks, key=lambda rank: -((rank.caused_before_ns or 0) + (rank.caused_after_ns or 0)))[:MOST_RANKS]
    return [rank for rank in ranks if rank in worst]


def _range(ends: Sequence[float]) -> dict[str, object]:
    """An axis with room for the texts beyond the bars."""
    return {"range": [0, 1.16 * max(max(ends), 1)]}


def _names(ranks: Sequence[RankLoad]) -> dict[str, object]:
    return names_axis(
        [f"rank {rank.rank}" + ("" if rank.stage is None else f" · stage {rank.stage}") for rank in ranks]
    )


def _bars(figure: go.Figure, label: str, colour: str, values: Sequence[float], unit: str) -> None:
    figure.add_bar(
        orientation="h",
        y=list(range(len(values))),
        x=list(values),
        name=label,
        width=0.62,
        marker={"color": colour, "line": {"width": 0}},
        hovertemplate=f"<b>{label}</b><br>%{{x:,.2f}} {unit}<extra></extra>",
    )
