"""Figures of a sweep: heat maps of the bubble over m and v, and curves of throughput against p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from pptrace.model import units
from pptrace.report.charts.base import heat_map, lay_out
from pptrace.report.sweep.layout import Axis, M, N, P, cost_axes, row_name, varying
from pptrace.simulator.sweep.run import Sweep, SweptPoint

MOST_HEAT_MAPS = 24
_MOST_TEXTS = 400
_MOST_M = 4
"""Most values of m of which curves are drawn."""
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56708F", "#8A4B9B", "#66717F")
_DASHES = ("solid", "dash", "dot", "dashdot")
_MARGIN = {"l": 20, "r": 20, "t": 16, "b": 54}
_THROUGHPUTS = (
    ("Throughput per rank", "throughput_per_rank", "of a rank that never waits"),
    ("Throughput of all ranks", "throughput", "in ranks that never wait"),
)


def heat_maps(sweep: Sweep) -> list[tuple[str, go.Figure]]:
    """For each p, and each combination of costs, the bubble ratio over m with a row for each schedule and v; with titles.

    All have one scale. A combination that was refused is left empty, and its hover text says why. None where m has one value.
    """
    if not varying(sweep, (M,)) or not sweep.simulated:
        return []
    axes = [P, *cost_axes(sweep), *varying(sweep, (N,))]
    groups: dict[tuple[Any, ...], list[SweptPoint]] = {}
    for swept in sweep.points:
        groups.setdefault(tuple(axis.value(swept) for axis in axes), []).append(swept)
    most = max(swept.step.bubble_ratio for swept in sweep.simulated if swept.step) or 1.0
    return [
        (", ".join(axis.label(members[0]) for axis in axes), _heat_map(members, most))
        for members in list(groups.values())[:MOST_HEAT_MAPS]
    ]


def _heat_map(members: Sequence[SweptPoint], most: float) -> go.Figure:
    numbers = sorted({swept.point.num_microbatches for swept in members})
    at = {(row_name(swept), swept.point.num_microbatches): swept for swept in members}
    simulated = {row_name(swept) for swept in members if swept.step is not None}
    rows = [name for name in dict.fromkeys(map(row_name, members)) if name in simulated]
    cells = [[at.get((name, m)) for m in numbers] for name in rows]
    steps = [[None if swept is None else swept.step for swept in row] for row in cells]
    texts = [["" if step is None else f"{step.bubble_ratio:.2f}" for step in row] for row in steps]
    cells_map = heat_map(
        [str(number) for number in numbers],
        rows,
        [[None if step is None else step.bubble_ratio for step in row] for row in steps],
        "bubble ratio",
        texts,
        [[_hover(swept) for swept in row] for row in cells],
    )
    few = len(rows) * len(numbers) <= _MOST_TEXTS
    cells_map.update(zmax=most, hoverongaps=True, texttemplate="%{text}" if few else None)
    return lay_out(
        go.Figure(cells_map),
        130 + 30 * len(rows),
        "microbatches m",
        can_zoom=True,
        margin=_MARGIN,
        xaxis={"type": "category", "showgrid": False},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
    )


def _hover(swept: SweptPoint | None) -> str:
    if swept is None:
        return "not asked for"
    head = f"<b>{row_name(swept)}</b>, p={swept.point.pp}, m={swept.point.num_microbatches}"
    if swept.step is None:
        return f"{head}<br>refused: {swept.refused}"
    step = swept.step
    return (
        f"{head}<br>bubble ratio {units.ratio(step.bubble_ratio)}, {units.percent(step.bubble_share)} of the step"
        f"<br>step {units.milliseconds(round(step.makespan_ns))} ms, {step.microbatches_per_s:,.1f} microbatches/s"
        f"<br>holds {step.peak_activations:g} activations of a microbatch in 1/p of the model"
    )


def curves(sweep: Sweep) -> list[tuple[str, go.Figure]]:
    """Throughput of a rank and of all ranks against each axis of p and the costs that has several values; with titles."""
    found = [*varying(sweep, (P,)), *cost_axes(sweep)]
    return [
        (f"{title} against {axis.name}", _curves(sweep, axis, field, label))
        for axis in found
        for title, field, label in _THROUGHPUTS
        if sweep.simulated
    ]


def _curves(sweep: Sweep, axis: Axis, field: str, label: str) -> go.Figure:
    """A line for each schedule, v, m (of many a few) and what else varies."""
    several = [*varying(sweep, (P, M, N)), *cost_axes(sweep)]
    lines: dict[str, list[SweptPoint]] = {}
    values = sorted({swept.point.microbatches for swept in sweep.points})
    if len(values) > _MOST_M:  # of many the least and the most, and the first multiples of p
        fixed = [value for value in values if not value.times_p]
        values = [*fixed[:1], *fixed[-1:], *[value for value in values if value.times_p][: _MOST_M - 2]]
    for swept in (swept for swept in sweep.simulated if swept.point.microbatches in values):
        name = ", ".join([row_name(swept), *(other.label(swept) for other in several if other is not axis)])
        lines.setdefault(name, []).append(swept)
    figure = go.Figure()
    for number, (name, members) in enumerate(lines.items()):
        members.sort(key=axis.value)
        dash = _DASHES[number // len(_LINES) % len(_DASHES)]
        figure.add_scatter(
            x=[axis.value(swept) for swept in members],
            y=[getattr(swept.step, field) for swept in members],
            mode="lines+markers",
            name=name,
            line={"color": _LINES[number % len(_LINES)], "dash": dash, "width": 2},
            customdata=[_hover(swept) for swept in members],
            hovertemplate="%{customdata}<br>" + label + ": %{y:.3f}<extra></extra>",
        )
    ticks = sorted({axis.value(swept) for swept in sweep.simulated})
    return lay_out(
        figure,
        380,
        "pipeline ranks p" if axis is P else axis.name,
        label,
        can_zoom=True,
        margin=_MARGIN,
        legend={"orientation": "v", "x": 1.02, "yanchor": "auto"},
        xaxis={
            "type": "log" if axis is P and ticks[-1] >= 4 * ticks[0] else "linear",
            **({"tickvals": ticks} if len(ticks) <= 16 else {}),
        },
        yaxis={"rangemode": "tozero"},
        showlegend=True,
    )
