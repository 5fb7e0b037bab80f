"""Charts of the last steps of a run that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import plotly.graph_objects as go

from pptrace.report.charts.base import QUIET, add_bars, lay_out, names_axis
from pptrace.report.colours import BUBBLE, COMMUNICATION, COMPUTE, IDEAL
from pptrace.workflow.live.follow import LiveStepFigures

_MOST_BARS = 48
_PACES = [[0.0, "#2166ac"], [0.5, "#f2f2f2"], [1.0, "#b2182b"]]
"""Blue for faster, red for slower than usual: it can be read with every common colour blindness."""
_DARK_PACES = [[0.0, "#63a8e8"], [0.5, "#2a2f38"], [1.0, "#ff8a66"]]
"""The same on a dark page, where the usual is dark."""
_MOST_PACE = 0.3
_MOST_TIMES = 3


def live_steps_chart(steps: Sequence[LiveStepFigures]) -> go.Figure:
    """The length of each step in ms over its number, with steps in which a rank was named."""
    figure = go.Figure()
    groups = (
        ("observed", [step for step in steps if step.observed and not step.slow_ranks], COMPUTE, "circle", 6),
        ("not observed", [step for step in steps if not step.observed], COMPUTE, "circle-open", 6),
        ("a slow rank", [step for step in steps if step.slow_ranks], IDEAL, "diamond", 9),
    )
    figure.add_scatter(
        x=[step.step for step in steps],
        y=[step.step_ns / 1e6 for step in steps],
        mode="lines",
        line={"width": 1, "color": QUIET},
        hoverinfo="skip",
        showlegend=False,
    )
    for name, of_group, colour, symbol, size in groups:
        figure.add_scatter(
            x=[step.step for step in of_group],
            y=[step.step_ns / 1e6 for step in of_group],
            mode="markers",
            name=name,
            marker={"color": colour, "symbol": symbol, "size": size},
            hovertemplate="<b>step %{x}</b><br>%{y:,.2f} ms<extra></extra>",
        )
    lengths = [step.step_ns / 1e6 for step in steps] or [1.0]
    # A few times the usual step, so that one long step, such as the first, does not flatten all others.
    axis = {"range": [0, 1.08 * min(max(lengths), _MOST_TIMES * median(lengths))]}
    return lay_out(figure, 280, "step", "ms", xaxis={"tickformat": "d"}, yaxis=axis, uirevision="live")


def live_paces_chart(steps: Sequence[LiveStepFigures]) -> go.Figure | None:
    """Heat map of the compute of each rank in each step, against its own median; None where no compute is known.

    Steps that were not observed are empty columns.
    """
    known = [step for step in steps if step.slowest_rank is not None]
    if not known:
        return None
    ranks = sorted({rank.rank for step in known for rank in step.ranks})
    compute = {(step.step, rank.rank): rank.compute_ns for step in known for rank in step.ranks}
    rows = []
    for rank in ranks:
        times = [compute.get((step.step, rank)) for step in steps]
        usual = median([ns for ns in times if ns]) if any(times) else 0
        rows.append([None if not ns or not usual else ns / usual - 1 for ns in times])
    figure = go.Figure(
        go.Heatmap(
            x=[step.step for step in steps],
            y=list(range(len(ranks))),
            z=rows,
            zmin=-_MOST_PACE,
            zmax=_MOST_PACE,
            colorscale=_PACES,
            meta={"dark": _DARK_PACES},
            colorbar={"tickformat": "+.0%", "thickness": 12},
            customdata=[[rank] * len(steps) for rank in ranks],
            hoverongaps=False,
            hovertemplate="<b>rank %{customdata}, step %{x}</b><br>%{z:+.1%} of its usual compute<extra></extra>",
        )
    )
    is_few = len(ranks) <= _MOST_BARS
    axis = (
        names_axis([f"rank {rank}" for rank in ranks])
        if is_few
        else {"autorange": "reversed", "title": {"text": "rank"}}
    )
    height = 110 + (24 * len(ranks) if is_few else 480)
    return lay_out(
        figure, height, "step", "", xaxis={"tickformat": "d", "showgrid": False}, yaxis=axis, uirevision="live"
    )


def live_ranks_chart(steps: Sequence[LiveStepFigures]) -> go.Figure | None:
    """The parts of the last observed step on each rank, as bars; None where they are not known, or of more than 48 ranks."""
    with_parts = (
        step
        for step in reversed(steps)
        if step.observed
        and step.ranks
        and all(None not in (rank.compute_ns, rank.exposed_comm_ns, rank.bubble_ns) for rank in step.ranks)
    )
    step = next(with_parts, None)
    if step is None or len(step.ranks) > _MOST_BARS:
        return None
    names = [f"rank {rank.rank}" for rank in step.ranks]
    figure = go.Figure()
    for name, colour, values in (
        ("compute", COMPUTE, [rank.compute_ns for rank in step.ranks]),
        ("exposed communication", COMMUNICATION, [rank.exposed_comm_ns for rank in step.ranks]),
        ("bubble", BUBBLE, [rank.bubble_ns for rank in step.ranks]),
    ):
        hover = f"{name}: %{{x:,.2f}} ms<extra></extra>"
        add_bars(figure, [(ns or 0) / 1e6 for ns in values], name, colour=colour, hovertemplate=hover)
    x = f"ms of the span of step {step.step}"
    return lay_out(figure, 110 + 26 * len(names), x, barmode="stack", bargap=0.25, yaxis=names_axis(names))
