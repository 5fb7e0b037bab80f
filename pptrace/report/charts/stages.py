"""Cost of a microbatch in each stage, by kind of op, with its spread."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from pptrace.analysis.op_costs import OpCost
from pptrace.report.charts.base import QUIET, columns_axis, lay_out, plain
from pptrace.report.colours import KIND_COLOURS, KIND_NAMES, OTHER
from pptrace.report.units import milliseconds


def stages_chart(costs: Sequence[OpCost]) -> go.Figure | None:
    """The median op of each stage and kind, ms, with the tenth and the ninetieth percentile; None without ops of known stages."""
    if not costs:
        return None
    stages = sorted({cost.stage for cost in costs})
    figure = go.Figure()
    for kind in sorted({cost.kind for cost in costs}, key=_order):
        of_kind = {cost.stage: cost for cost in costs if cost.kind == kind}
        shown = [of_kind[stage] for stage in stages if stage in of_kind]
        figure.add_bar(
            x=[f"stage {cost.stage}" for cost in shown],
            y=[cost.median_ns / 1e6 for cost in shown],
            name=KIND_NAMES.get(kind, plain(kind)),
            marker={"color": KIND_COLOURS.get(kind, OTHER), "line": {"width": 0}},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [(cost.p90_ns - cost.median_ns) / 1e6 for cost in shown],
                "arrayminus": [(cost.median_ns - cost.p10_ns) / 1e6 for cost in shown],
                "color": QUIET,
                "thickness": 1.5,
                "width": 4,
            },
            customdata=[
                [*map(milliseconds, (cost.median_ns, cost.p10_ns, cost.p90_ns)), str(cost.count)] for cost in shown
            ],
            hovertemplate="<b>%{x}</b>: %{customdata[0]} ms, eight in ten ops %{customdata[1]} to %{customdata[2]} ms; "
            "%{customdata[3]} ops<extra></extra>",
        )
    return lay_out(
        figure,
        340,
        "",
        "ms of compute in an op, median",
        barmode="group",
        xaxis=columns_axis(len(stages), categoryarray=[f"stage {stage}" for stage in stages]),
        yaxis={"rangemode": "tozero"},
    )


def _order(kind: str) -> int:
    return list(KIND_COLOURS).index(kind) if kind in KIND_COLOURS else len(KIND_COLOURS)
