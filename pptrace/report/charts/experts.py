"""Experts: routes of each expert in each layer, rows of each rank and between ranks, and for how long others waited for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from pptrace.analysis.experts.show import layer_name, waits_for, why_late
from pptrace.analysis.experts.types import ExpertsReport, ExpertStep, RankLoad, TrafficMatrix
from pptrace.model import units
from pptrace.model.report_table import largest
from pptrace.model.tables import Int64
from pptrace.report.charts.base import (
    MOST_NAMED,
    MOST_TEXTS,
    QUIET,
    add_bars,
    heat_map,
    label_bars,
    lay_out,
    matrix_columns,
    names_axis,
)
from pptrace.report.colours import COMMUNICATION, COMPUTE, OTHER, WAIT

MOST_RANKS = 48
"""Most ranks that charts of ranks show: those for which others waited longest."""
MOST_IN_MATRIX = 64
"""Most ranks that the matrix shows: those of whole groups with most rows."""
_RANK_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Colours of the ranks that are late in most steps; all others are grey."""
_MANY_STEPS = 300
"""Most steps whose points are large and connected by a line."""


def routes_map(experts: ExpertsReport) -> go.Figure | None:
    """The routes of each expert over the mean of its layer as a heat map, layers as rows; None where none were counted."""
    layers = [layer for layer in experts.layers if layer.routes and sum(layer.routes)]
    if not layers:
        return None
    names = [f"layer {layer_name(layer.layer, layer.stage, layer.nth)}" for layer in layers]
    ratios: list[list[float]] = []
    hovers = []
    for layer, name in zip(layers, names, strict=True):
        routes = layer.routes or ()
        total = sum(routes)
        ratios.append([count * len(routes) / total for count in routes])
        by_expert = enumerate(routes)
        hovers.append([f"<b>expert {at}</b> in {name}<br>{count:,} routes of {total:,}" for at, count in by_expert])
    width = max(map(len, ratios))
    texts = [[f"{ratio:.2f}" for ratio in row] for row in ratios]
    figure = go.Figure(heat_map(range(width), names, ratios, "× mean", texts, hovers))
    return lay_out(
        figure,
        min(max(26 * len(names), 120), 620) + 96,
        "expert",
        margin={"l": 16, "r": 16, "t": 10, "b": 46},
        xaxis={"showgrid": False, "dtick": 1 if width <= MOST_TEXTS else None},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
    )


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


def late_steps_chart(experts: ExpertsReport) -> go.Figure | None:
    """The waits of every step in ms over its number, in the colour of the rank for which the others waited longest; None where
    calls are not matched.
    """
    steps = [step for step in experts.steps if step.wait_ns is not None]
    if not steps:
        return None
    often = Counter(step.late_rank for step in steps if step.late_rank is not None).most_common()
    colours = dict(zip((rank for rank, _ in often), _RANK_COLOURS, strict=False))
    figure, size = go.Figure(), 8 if len(steps) <= _MANY_STEPS else 5
    if len(steps) <= _MANY_STEPS:
        figure.add_scatter(
            x=[step.step for step in steps],
            y=[(step.wait_ns or 0) / 1e6 for step in steps],
            mode="lines",
            line={"width": 1, "color": QUIET},
            hoverinfo="skip",
            showlegend=False,
        )
    for rank, colour in colours.items():
        _late_points(figure, [step for step in steps if step.late_rank == rank], f"rank {rank}", colour, size)
    others = [step for step in steps if step.late_rank is not None and step.late_rank not in colours]
    _late_points(figure, others, "other ranks", OTHER, size)
    _late_points(figure, [step for step in steps if step.late_rank is None], "nobody", WAIT, size)
    ticks = {"tickvals": [step.step for step in steps]} if len(steps) <= MOST_TEXTS else {"tickformat": "d"}
    return lay_out(figure, 300, "step", "ms of waits, all ranks", xaxis=ticks, yaxis={"rangemode": "tozero"})


def _late_points(figure: go.Figure, steps: Sequence[ExpertStep], name: str, colour: str, size: int) -> None:
    if not steps:
        return
    figure.add_scatter(
        x=[step.step for step in steps],
        y=[(step.wait_ns or 0) / 1e6 for step in steps],
        mode="markers",
        name=name,
        marker={"color": colour, "size": size},
        customdata=[_late_hover(step) for step in steps],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _late_hover(step: ExpertStep) -> str:
    head = f"<b>step {step.step}</b><br>{units.milliseconds(step.wait_ns)} ms of waits"
    if step.late_rank is None:
        return head
    why = why_late(step)
    late = f"{units.milliseconds(step.late_ns)} ms of them for rank {step.late_rank} ({units.percent(step.late_share)})"
    return f"{head}<br>{late}" + (f"<br>{why}" if why else "")


def traffic_map(matrix: TrafficMatrix | None) -> go.Figure | None:
    """Rows from rank to rank as a heat map, the ranks that send as rows; None where they are not known, or there are none.

    Of many ranks it shows those of the groups with most rows (:func:`ranks_in_matrix`).
    """
    if matrix is None or not matrix.rows.any():
        return None
    ranks = ranks_in_matrix(matrix)
    shown = np.isin(matrix.source, ranks) & np.isin(matrix.target, ranks)
    row, column = (np.searchsorted(ranks, cells[shown]) for cells in (matrix.source, matrix.target))
    size, names = len(ranks), [f"rank {rank}" for rank in ranks.tolist()]
    values: list[list[int | None]] = [[None] * size for _ in names]
    hovers = [[""] * size for _ in names]
    columns = (row, column, matrix.rows[shown], matrix.bytes[shown], matrix.sent[shown])
    for at, to, rows, num_bytes, sent in zip(*(column.tolist() for column in columns), strict=True):
        values[at][to] = rows
        travels = "" if num_bytes < 0 or at == to else f", {units.num_bytes(num_bytes)}"
        part = units.percent(rows / sent if sent else None)
        hovers[at][to] = (
            f"<b>{names[at]} → {names[to]}</b><br>{rows:,} rows{travels}<br>{part} of what {names[at]} sends"
        )
    texts = [["" if rows is None else _short(rows) for rows in line] for line in values]
    figure = go.Figure(heat_map(names, names, values, "rows", texts, hovers))
    return lay_out(
        figure,
        min(max(26 * size, 150), 540) + 96,
        "rank of the experts" if size <= MOST_NAMED else "rank of the experts, by number",
        "rank of the tokens",
        margin={"l": 16, "r": 16, "t": 10, "b": 46},
        xaxis={"type": "category", "showgrid": False, **matrix_columns(names)},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
    )


def ranks_in_matrix(matrix: TrafficMatrix) -> Int64:
    """The ranks that the matrix shows: all, or of more than :data:`MOST_IN_MATRIX` those of the groups with most rows, and of one
    larger group those that send and get most.
    """
    every = np.unique(np.concatenate((matrix.source, matrix.target)))
    if len(every) <= MOST_IN_MATRIX:
        return every
    ends = np.concatenate((matrix.source, matrix.target))
    amount = np.zeros(len(every), dtype=np.int64)
    np.add.at(amount, np.searchsorted(every, ends), np.tile(matrix.rows, 2))
    of_rank = dict(zip(every.tolist(), amount.tolist(), strict=True))
    groups = sorted(matrix.groups, key=lambda group: (-sum(of_rank.get(rank, 0) for rank in group), group))
    chosen = sorted(groups[0], key=lambda rank: (-of_rank.get(rank, 0), rank))[:MOST_IN_MATRIX]
    for group in groups[1:]:
        if len(chosen) + len(group) <= MOST_IN_MATRIX:
            chosen += group
    return np.array(sorted(chosen), dtype=np.int64)


def _short(rows: int) -> str:
    """A number for a cell."""
    return f"{rows:,}" if rows < 100_000 else f"{rows / 1e3:,.0f} k" if rows < 100_000_000 else f"{rows / 1e6:,.0f} M"


def shown_ranks(ranks: Sequence[RankLoad]) -> list[RankLoad]:
    """The ranks; of more than :data:`MOST_RANKS` those for which others waited longest."""
    return largest(ranks, MOST_RANKS, waits_for)


def _range(ends: Sequence[float]) -> dict[str, object]:
    """An axis with room for the texts beyond the bars."""
    return {"range": [0, 1.16 * max(max(ends), 1)]}


def _names(ranks: Sequence[RankLoad]) -> dict[str, object]:
    return names_axis(
        [f"rank {rank.rank}" + ("" if rank.stage is None else f" · stage {rank.stage}") for rank in ranks]
    )


def _bars(figure: go.Figure, label: str, colour: str, values: Sequence[float], unit: str) -> None:
    hover = f"<b>{label}</b><br>%{{x:,.2f}} {unit}<extra></extra>"
    add_bars(figure, values, label, colour=colour, width=0.62, hovertemplate=hover)
