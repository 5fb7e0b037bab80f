"""Cost of a microbatch in each stage, by kind of op, with its spread.

Compute of the stages by kind of work, stacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from pptrace.analysis.op_costs import OpCost, OpGroup, OpSample
from pptrace.analysis.stages.types import StageCompute
from pptrace.model.device import CLASSES, WorkClass
from pptrace.model.units import milliseconds, percent
from pptrace.report.charts.base import QUIET, columns_axis, lay_out, plain
from pptrace.report.colours import KIND_COLOURS, KIND_NAMES, OTHER

_GOLDEN = 0.618034


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


def stage_points(samples: Sequence[OpSample]) -> go.Figure | None:
    """Every op of each stage and kind as a point (of many as many quantiles), with the median of each group of costs; None
    where no costs are of two groups, which :func:`stages_chart` then describes.
    """
    if not any(sample.groups for sample in samples):
        return None
    stages = sorted({sample.stage for sample in samples})
    kinds = sorted({sample.kind for sample in samples}, key=_order)
    figure, room = go.Figure(), 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        of_kind = [sample for sample in samples if sample.kind == kind]
        middles = [stages.index(sample.stage) + (number + 0.5) * room - 0.4 for sample in of_kind]
        spread = []  # from −½ to ½, always the same, so that points of equal height are seen
        for middle, sample in zip(middles, of_kind, strict=True):
            jitter = np.arange(len(sample.costs_ns), dtype=np.float64) * _GOLDEN % 1.0 - 0.5
            spread.append(middle + 0.7 * room * jitter)
        figure.add_scatter(
            x=np.concatenate(spread),
            y=np.concatenate([sample.costs_ns for sample in of_kind]) / 1e6,
            customdata=[f"stage {sample.stage}" for sample in of_kind for _ in sample.costs_ns],
            mode="markers",
            name=KIND_NAMES.get(kind, plain(kind)),
            marker={"color": KIND_COLOURS.get(kind, OTHER), "size": 5, "opacity": 0.65},
            hovertemplate="<b>%{customdata}</b>: %{y:.3f} ms<extra></extra>",
        )
        figure.add_scatter(**_medians(of_kind, middles, room))
    options = columns_axis(
        len(stages), tickvals=list(range(len(stages))), ticktext=[f"stage {stage}" for stage in stages]
    )
    margin = options.get("range", [-0.5, len(stages) - 0.5])
    return lay_out(
        figure,
        340,
        "",
        "ms of compute in an op",
        xaxis=options | {"type": "linear", "range": margin},
        yaxis={"rangemode": "tozero"},
    )


def _medians(samples: Sequence[OpSample], middles: Sequence[float], room: float) -> dict[str, Any]:
    """Short lines at the median of each group of costs, of one group at that of all."""
    x: list[float | None] = []
    y: list[float | None] = []
    words: list[str] = []
    for sample, middle in zip(samples, middles, strict=True):
        for group in sample.groups or (OpGroup(len(sample.costs_ns), int(np.median(sample.costs_ns))),):
            x += [middle - 0.42 * room, middle + 0.42 * room, None]
            y += [group.median_ns / 1e6] * 2 + [None]
            number = f"{group.count} ops, " if sample.groups else ""
            words += [f"stage {sample.stage}: {number}median {milliseconds(group.median_ns)} ms"] * 3
    return {
        "x": x,
        "y": y,
        "customdata": words,
        "mode": "lines",
        "line": {"color": QUIET, "width": 3},
        "hovertemplate": "%{customdata}<extra></extra>",
        "showlegend": False,
    }


def group_lines(samples: Sequence[OpSample]) -> list[str]:
    """A line for each stage and kind whose ops are of two groups: how many of what median."""
    return [
        f"stage {sample.stage}, {KIND_NAMES.get(sample.kind, sample.kind)}: "
        + " and ".join(f"{group.count} ops of {milliseconds(group.median_ns)} ms" for group in sample.groups)
        for sample in samples
        if sample.groups
    ]


def _order(kind: str) -> int:
    return list(KIND_COLOURS).index(kind) if kind in KIND_COLOURS else len(KIND_COLOURS)


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
