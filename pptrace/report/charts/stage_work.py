"""Compute of the stages by kind of work, stacked."""

from __future__ import annotations

import plotly.graph_objects as go

from pptrace.analysis.stages.types import StageCompute
from pptrace.model.pieces import CLASSES, WorkClass
from pptrace.model.units import milliseconds, percent
from pptrace.report.charts.base import columns_axis, lay_out
from pptrace.report.colours import KIND_NAMES, OTHER

_MOST_COLUMNS = 64
_COLOURS = {
    WorkClass.MATMUL: "#2C7A8C",
    WorkClass.ATTENTION: "#0072B2",
    WorkClass.NORM: "#56B4E9",
    WorkClass.LOSS: "#D55E00",
    WorkClass.EMBEDDING: "#009E73",
    WorkClass.OPTIMIZER: "#CC79A7",
    WorkClass.ELEMENTWISE: "#E69F00",
    WorkClass.REDUCTION: "#8A6D3B",
    WorkClass.COPY: "#6E9F3D",
    WorkClass.RANDOM: "#A9467F",
    WorkClass.PYTHON: "#B9BEC6",
}


def stage_work_chart(compute: StageCompute) -> go.Figure | None:
    """The mean op of each stage and kind, ms, by kind of work; None where there are too many to show."""
    if len(compute.ops) > _MOST_COLUMNS:
        return None
    columns = [f"stage {ops.stage} {KIND_NAMES.get(ops.kind, ops.kind)}" for ops in compute.ops]
    figure = go.Figure()
    for name in map(str, CLASSES):
        found = [next((part.ns for part in ops.classes if part.name == name), 0) for ops in compute.ops]
        if not any(found):
            continue
        shown = [
            (column, ns / ops.count, ns / max(ops.compute_ns, 1))
            for column, ops, ns in zip(columns, compute.ops, found, strict=True)
        ]
        figure.add_bar(
            x=columns,
            y=[mean / 1e6 for _, mean, _ in shown],
            name=name,
            marker={"color": _COLOURS.get(WorkClass(name), OTHER), "line": {"width": 0}},
            customdata=[[milliseconds(round(mean)), percent(share)] for _, mean, share in shown],
            hovertemplate=f"<b>%{{x}}</b>: {name} %{{customdata[0]}} ms, %{{customdata[1]}} of the op<extra></extra>",
        )
    return lay_out(
        figure,
        360,
        "",
        "ms of compute in an op, mean",
        barmode="stack",
        xaxis=columns_axis(len(columns), categoryarray=columns),
        yaxis={"rangemode": "tozero"},
    )
