"""A hang as a table and as a graph: who waits in which call for whom. Takes the JSON field ``hang``.

The verdict on a run that hung, as text and as JSON, ``pptrace.hang/1``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from pptrace.hang_diagnosis.field import lines, rank_text
from pptrace.model.units import text
from pptrace.report.charts.base import lay_out
from pptrace.report.colours import IDEAL, OTHER, WAIT
from pptrace.workflow.find_hang import HangResult

EDGE_COLUMNS = ("who waits", "in", "of group", "number", "for")

_MOST_ROWS = 60
_MOST_NODES = 16


def edge_rows(hang: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cells below :data:`EDGE_COLUMNS`: one row for all ranks that wait in one call, most ranks first."""
    ranks_by_call: dict[tuple[Any, ...], list[int]] = {}
    for edge in hang["edges"]:
        key = (edge["call"], edge["group"], edge["seq"], tuple(edge["waits_for"]))
        ranks_by_call.setdefault(key, []).append(edge["rank"])
    ordered = sorted(ranks_by_call.items(), key=lambda item: -len(item[1]))
    rows: list[tuple[str, ...]] = [
        (rank_text(ranks), *map(text, (call, group, seq)), rank_text(others) if others else "–")
        for (call, group, seq, others), ranks in ordered[:_MOST_ROWS]
    ]
    left = len(ordered) - len(rows)
    return [*rows, (f"{left} more", "", "", "", "")] if left else rows


def wait_graph(hang: Mapping[str, Any]) -> go.Figure | None:
    """Ranks on a circle with an arrow from each to those it waits for, the guilty ones red; None for too many ranks."""
    arrows = {(edge["rank"], other) for edge in hang["edges"] for other in edge["waits_for"] if other != edge["rank"]}
    ranks = sorted({rank for arrow in arrows for rank in arrow} | set(hang["ranks"]))
    if not arrows or len(ranks) > _MOST_NODES:
        return None
    turn = 2 * math.pi / len(ranks)
    position = {rank: (math.sin(turn * index), math.cos(turn * index)) for index, rank in enumerate(ranks)}
    figure = go.Figure(
        go.Scatter(
            x=[position[rank][0] for rank in ranks],
            y=[position[rank][1] for rank in ranks],
            mode="markers+text",
            text=[str(rank) for rank in ranks],
            textfont={"color": "#ffffff", "size": 14},
            marker={
                "size": 34,
                "color": [IDEAL if rank in hang["ranks"] else "#56708F" for rank in ranks],
                "line": {"color": WAIT, "width": 1},
            },
            hovertext=[f"rank {rank}: {'to blame' if rank in hang['ranks'] else 'waits'}" for rank in ranks],
            hoverinfo="text",
            cliponaxis=False,
        )
    )
    for waiting, other in sorted(arrows):
        (x0, y0), (x1, y1) = position[waiting], position[other]
        figure.add_annotation(
            x=x1, y=y1, ax=x0, ay=y0, xref="x", yref="y", axref="x", ayref="y", text="", standoff=19, startstandoff=19,
            showarrow=True, arrowhead=2, arrowsize=1.3, arrowwidth=1.5, arrowcolor=OTHER,
        )  # fmt: skip
    hidden = {"visible": False, "range": [-1.3, 1.3]}
    return lay_out(
        figure,
        300,
        margin={"l": 0, "r": 0, "t": 0, "b": 0},
        showlegend=False,
        xaxis=hidden,
        yaxis={**hidden, "scaleanchor": "x"},
    )


HANG_SCHEMA = "pptrace.hang/1"


def hang_text(report: HangResult) -> str:
    """The verdict in one sentence, and lines of who waits in which call."""
    if report.hang is None:
        seen = f" (read {rank_text(report.ranks)})" if report.ranks else ""
        return f"no hang: {report.reason}{seen}"
    return "\n".join([str(report.hang["detail"]), *(f"  {line}" for line in lines(report.hang))])


def hang_object(report: HangResult) -> dict[str, Any]:
    """The verdict as a JSON object."""
    return {
        "schema": HANG_SCHEMA,
        "hang": report.hang,
        "reason": report.reason or None,
        "ranks": list(report.ranks),
        "warnings": list(report.warnings),
    }
