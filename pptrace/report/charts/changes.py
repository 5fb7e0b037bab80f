"""Changes of a run by what they gain and what memory they take, with the front that nothing beats in both."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from pptrace.analysis.whatif.result import Scenario, WhatIf
from pptrace.report.charts.base import QUIET, lay_out
from pptrace.report.colours import COMPUTE, IDEAL, OTHER
from pptrace.report.units import milliseconds

_MOST_NAMES = 8


def changes_chart(result: WhatIf) -> go.Figure | None:
    """Gain in ms with its 90 % interval over the memory of the fullest rank, choices, the front among them, and today's run.

    Memory is bytes where they are known of every choice, else activations of a microbatch of the run in 1/p of the model. Ideals
    are no choices and not in it. None without choices.
    """
    choices = [one for one in result.scenarios if not one.ideal]
    if not choices or result.today is None:
        return None
    in_bytes = all(one.peak_memory_bytes is not None for one in (*choices, result.today))
    front = sorted((one for one in choices if one.on_pareto_front), key=lambda one: _size(one, in_bytes))
    others = [one for one in choices if not one.on_pareto_front]
    figure = go.Figure()
    figure.add_scatter(
        x=[_size(one, in_bytes) for one in front],
        y=[one.gain_ns / 1e6 for one in front],
        mode="lines",
        line={"shape": "hv", "color": COMPUTE, "width": 1.5, "dash": "dot"},
        showlegend=False,
        hoverinfo="skip",
    )
    _add(figure, others, in_bytes, "beaten in both", OTHER, "circle", named=False)
    _add(figure, front, in_bytes, "front: nothing takes less time and no more memory", COMPUTE, "diamond", named=True)
    _add(figure, [result.today], in_bytes, "the run as it was", IDEAL, "star", named=True)
    x = (
        "GB, peak of the fullest rank"
        if in_bytes
        else "activations of a microbatch (in 1/p of the model) held by a rank"
    )
    return lay_out(figure, 380, x, "gain, ms a step")


def _add(
    figure: go.Figure, shown: Sequence[Scenario], in_bytes: bool, label: str, colour: str, symbol: str, named: bool
) -> None:
    names = [one.name if named and index < _MOST_NAMES else "" for index, one in enumerate(shown)]
    figure.add_scatter(
        x=[_size(one, in_bytes) for one in shown],
        y=[one.gain_ns / 1e6 for one in shown],
        mode="markers+text" if named else "markers",
        text=names,
        textposition="top center",
        textfont={"size": 11},
        name=label,
        marker={"color": colour, "symbol": symbol, "size": 11 if named else 8},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [(one.span_ns - one.low_ns) / 1e6 for one in shown],
            "arrayminus": [(one.high_ns - one.span_ns) / 1e6 for one in shown],
            "color": QUIET,
            "thickness": 1,
            "width": 3,
        },
        customdata=[[one.name, milliseconds(one.span_ns)] for one in shown],
        hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]} ms, gain %{y:,.2f} ms<extra></extra>",
        cliponaxis=False,
    )


def _size(one: Scenario, in_bytes: bool) -> float:
    return (one.peak_memory_bytes or 0) / 1e9 if in_bytes else one.activations
