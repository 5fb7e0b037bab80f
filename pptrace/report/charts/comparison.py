"""Two runs compared: the causes of their typical steps side by side, and the parts that changed most."""

from __future__ import annotations

import plotly.graph_objects as go

from pptrace.analysis.compare.compare import part_label
from pptrace.analysis.compare.figures import CAUSE
from pptrace.analysis.compare.result import Comparison
from pptrace.model.units import signed_milliseconds
from pptrace.report.charts.base import add_bars, label_bars, lay_out, names_axis, plain
from pptrace.report.colours import COMPUTE, GAIN, OTHER, PART_COLOURS

A_COLOUR, B_COLOUR = "#56708F", "#E69F00"
_MOST_PARTS = 14
_TEXT_PART = 0.8
"""Room for the texts beyond the ends of bars, in parts of what the bars take: names take half of the picture."""


def causes_of_both(comparison: Comparison) -> go.Figure | None:
    """The causes of a typical step of A and of B, ms each; None where they are not known of both."""
    causes = [part for part in comparison.parts if part.name == CAUSE]
    if not causes:
        return None
    order = list(PART_COLOURS)
    causes.sort(key=lambda part: order.index(str(part.where["cause"])) if part.where["cause"] in order else len(order))
    names = [plain(part.where["cause"]) for part in causes]
    figure = go.Figure()
    for label, colour, values in (
        ("A", A_COLOUR, [part.a_ns for part in causes]),
        ("B", B_COLOUR, [part.b_ns for part in causes]),
    ):
        hover = f"<b>{label}</b>: %{{x:,.2f}} ms<extra></extra>"
        add_bars(figure, [value / 1e6 for value in values], label, colour=colour, hovertemplate=hover)
    return lay_out(figure, 46 * len(names) + 110, "ms, median over steps", barmode="group", yaxis=names_axis(names))


def changes_of_parts(comparison: Comparison) -> go.Figure | None:
    """The parts of a step that changed most, ms; those that differ by more than chance are filled. None without parts."""
    parts = [part for part in comparison.parts if part.name != CAUSE and part.change_ns][:_MOST_PARTS]
    if not parts:
        return None
    values = [part.change_ns / 1e6 for part in parts]
    colours = []
    for part in parts:
        colour = PART_COLOURS["jitter"] if part.change_ns > 0 else GAIN
        colours.append(colour if part.significant else OTHER)
    figure = go.Figure()
    add_bars(figure, values, colour=colours, hovertemplate="%{x:+,.2f} ms<extra></extra>")
    texts = [f"{signed_milliseconds(part.change_ns)}{' *' if part.significant else ''}" for part in parts]
    label_bars(figure, values, texts)
    low, high = min(0, *values), max(0, *values)
    room = _TEXT_PART * (high - low)
    return lay_out(
        figure,
        28 * len(parts) + 80,
        "ms, B − A",
        showlegend=False,
        margin={"l": 16, "r": 16, "t": 10, "b": 46},
        xaxis={
            "range": [low - room if low else 0, high + room if high else 0],
            "zeroline": True,
            "zerolinecolor": COMPUTE,
        },
        yaxis=names_axis([plain(part_label(part)) for part in parts]),
    )
