"""The timeline of a step: ranks as rows, time to the right.

One function draws measured, simulated and planned ops, since all have the schema OPS. A figure has a few traces however long
the step is: bars are arrays with a base and a width, one trace per kind of op and chunk, so that 50,000 ops stay fluent. From the
back to the front, each row holds its phases as bands, its bubbles (transparent, there only to answer the pointer), its ops, and
below the ops two thin lines, receives and then sends, each split into waiting and transferring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from pptrace.intervals import Int64, clip, subtract, union
from pptrace.recognise.schedule import COMPUTE_KINDS
from pptrace.report.colours import (
    COMMUNICATION,
    FONT,
    KIND_COLOURS,
    KIND_NAMES,
    OTHER,
    PHASE_COLOURS,
    WAIT,
    ink,
    shade,
)
from pptrace.report.summary_figures import overview, waterfall
from pptrace.timeline.lanes import Lane
from pptrace.timeline.phases import PhaseSpan, phase_spans
from pptrace.timeline.windows import StepWindow

__all__ = ["CONFIG", "overview", "row_labels", "timeline", "waterfall"]

CONFIG: Mapping[str, Any] = {
    "displaylogo": False,
    "scrollZoom": True,
    "responsive": True,
    "modeBarButtons": [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]],
    "toImageButtonOptions": {"format": "svg", "filename": "pptrace"},
    "doubleClick": "reset",
}
"""plotly.js options for a timeline: the wheel zooms time, dragging selects a stretch, a double click shows the whole step."""

_FEW_OPS = 12_000
"""Above this, microbatch numbers are left out: measuring the text of each bar is what takes the browser's time."""
_MOST_CHUNKS_NAMED = 3
"""With more chunks, the legend has one entry for all of a kind."""


@dataclass(frozen=True, slots=True)
class _Band:
    """A part of a row: its centre below the row's own, and its height; a row is 1 high, and down is positive."""

    centre: float
    height: float


_PHASES = _Band(0.0, 0.96)
_ALONE = _Band(0.0, 0.74)
_OPS = _Band(-0.12, 0.62)
_RECEIVES = _Band(0.27, 0.10)
_SENDS = _Band(0.39, 0.10)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Where each rank is drawn, and what time 0 is. A gap separates the pipelines of data-parallel replicas."""

    place: Mapping[int, float]
    origin_ns: int
    ops: _Band

    @property
    def height(self) -> float:
        return max(self.place.values(), default=0.0) + 1

    def y(self, ranks: pd.Series[int], band: _Band) -> Any:
        return ranks.map(self.place).to_numpy(dtype=np.float64) + band.centre

    def ms(self, times_ns: Any) -> Any:
        return (np.asarray(times_ns, dtype=np.int64) - self.origin_ns) / 1e6


def timeline(
    ops: pd.DataFrame,
    comms: pd.DataFrame | None = None,
    windows: Sequence[StepWindow] | None = None,
    lanes: Mapping[int, Lane] | None = None,
    extent_ns: int | None = None,
) -> go.Figure:
    """Draw one step.

    Args:
        ops: schema OPS with phases filled; rows outside the windows' step and ranks are left out.
        comms: schema COMMS on the same clock, with transfer starts; None draws the ops alone.
        windows: the step's windows, one per pipeline; None takes all of ``ops`` as one pipeline in one step.
        lanes: what each rank did, so that bubbles can be told from communication; None takes everything beside ops as bubble.
        extent_ns: how much of time to show, so that two pictures can be compared; None shows the longest window.

    Times of the picture are ms from the earliest window's start.
    """
    shown = tuple(windows) if windows is not None else _whole(ops)
    mine = _of_windows(ops, shown)
    if mine.empty:
        return note("No pipeline ops to draw")
    sent = _of_windows(comms, shown) if comms is not None else None
    has_comms = sent is not None and len(sent) > 0
    rows = _Rows(_places(shown), min(window.start_ns for window in shown), _OPS if has_comms else _ALONE)
    phases = {
        rank: phase_spans(own, window) for window in shown for rank, own in _compute_by_rank(mine, window).items()
    }
    traces = [*_phase_traces(phases, rows), *_bubble_traces(mine, phases, shown, lanes, rows), *_op_traces(mine, rows)]
    if has_comms:
        assert sent is not None
        traces += _comm_traces(sent, rows)
    figure = go.Figure(traces)
    _lay_out(figure, rows, row_labels(mine), shown, extent_ns, _last_ms(mine, sent, rows))
    return figure


def row_labels(ops: pd.DataFrame) -> dict[int, str]:
    """What stands beside each rank's row: the rank and its stages."""
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    labels = {}
    for rank, own in compute.groupby("rank"):
        stages = sorted(set(own["stage"].tolist()))
        names = ", ".join(map(str, stages)) if len(stages) <= 4 else f"{stages[0]}, {stages[1]} … {stages[-1]}"
        labels[int(str(rank))] = f"<b>rank {rank}</b>  stage{'s' if len(stages) > 1 else ''} {names}"
    return labels


def note(text: str, height: int = 160) -> go.Figure:
    """An empty picture that says why it is empty."""
    figure = go.Figure()
    figure.add_annotation(text=text, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font={"size": 14})
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        xaxis={"visible": False},
        yaxis={"visible": False},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    return figure


def _whole(ops: pd.DataFrame) -> tuple[StepWindow, ...]:
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    if compute.empty:
        return ()
    ranks = tuple(sorted(set(compute["rank"].tolist())))
    return (
        StepWindow(int(compute["step"].iloc[0]), ranks, int(compute["start_ns"].min()), int(compute["end_ns"].max())),
    )


def _of_windows(table: pd.DataFrame, windows: Sequence[StepWindow]) -> pd.DataFrame:
    ranks = {rank for window in windows for rank in window.ranks}
    steps = {window.step for window in windows}
    return table[table["rank"].isin(ranks) & table["step"].isin(steps)]


def _places(windows: Sequence[StepWindow]) -> dict[int, float]:
    places: dict[int, float] = {}
    for number, window in enumerate(windows):
        for rank in window.ranks:
            places.setdefault(rank, len(places) + 0.35 * number)
    return places


def _compute_by_rank(ops: pd.DataFrame, window: StepWindow) -> dict[int, pd.DataFrame]:
    compute = ops[ops["kind"].isin(COMPUTE_KINDS) & ops["rank"].isin(window.ranks)]
    return {int(str(rank)): own for rank, own in compute.groupby("rank")}


def _last_ms(ops: pd.DataFrame, comms: pd.DataFrame | None, rows: _Rows) -> float:
    ends = [int(ops["end_ns"].max())]
    if comms is not None and len(comms):
        ends.append(int(comms["end_ns"].max()))
    return float(rows.ms(max(ends)))


def _bars(y: Any, height: float, start_ms: Any, end_ms: Any, **options: Any) -> go.Bar:
    """Horizontal bars from start to end, one trace."""
    return go.Bar(
        orientation="h",
        y=y,
        width=height,
        base=start_ms,
        x=end_ms - start_ms,
        offset=-height / 2,
        cliponaxis=True,
        **options,
    )


def _phase_traces(phases: Mapping[int, Sequence[PhaseSpan]], rows: _Rows) -> Iterator[go.Bar]:
    for name, colour in PHASE_COLOURS.items():
        spans = [(rank, span) for rank, own in phases.items() for span in own if str(span.phase) == name]
        if not any(span.end_ns > span.start_ns for _, span in spans):
            continue
        yield _bars(
            rows.y(pd.Series([rank for rank, _ in spans]), _PHASES),
            _PHASES.height,
            rows.ms([span.start_ns for _, span in spans]),
            rows.ms([span.end_ns for _, span in spans]),
            name=name,
            marker={"color": colour, "line": {"color": "rgba(128, 134, 145, 0.35)", "width": 0.5}},
            hoverinfo="skip",
            legendrank=2000,
        )


def _bubble_traces(
    ops: pd.DataFrame,
    phases: Mapping[int, Sequence[PhaseSpan]],
    windows: Sequence[StepWindow],
    lanes: Mapping[int, Lane] | None,
    rows: _Rows,
) -> Iterator[go.Bar]:
    """Transparent bars over the bubbles between ops, cut at the edges of phases."""
    places, parts = [], []
    names: list[str] = []
    for window in windows:
        for rank, own in _compute_by_rank(ops, window).items():
            idle = _idle(own, window, lanes.get(rank) if lanes else None)
            for span in phases[rank]:
                part = clip(idle, span.start_ns, span.end_ns)
                parts.append(part)
                places += [rank] * len(part)
                names += [str(span.phase)] * len(part)
    if not places:
        return
    edges = np.concatenate(parts)
    start, end = rows.ms(edges[:, 0]), rows.ms(edges[:, 1])
    yield _bars(
        rows.y(pd.Series(places), rows.ops),
        rows.ops.height,
        start,
        end,
        name="Bubble",
        marker={"color": "rgba(0,0,0,0)", "line": {"width": 0}},
        customdata=np.stack((np.asarray(places), end - start), axis=1),
        hovertext=names,
        hovertemplate="<b>Bubble</b> · %{customdata[1]:.3f} ms<br>rank %{customdata[0]:d} · %{hovertext}<br>"
        "from %{base:.3f} ms<extra></extra>",
        showlegend=False,
    )


def _idle(ops: pd.DataFrame, window: StepWindow, lane: Lane | None) -> Int64:
    """When a rank has neither an op nor, where that is known, exposed communication."""
    idle = subtract(union([window.start_ns], [window.end_ns]), union(ops["start_ns"], ops["end_ns"]))
    return idle if lane is None else subtract(idle, lane.exposed)


def _op_traces(ops: pd.DataFrame, rows: _Rows) -> Iterator[go.Bar]:
    drawn = ops[ops["kind"] != "STEP"]
    num_chunks = int(drawn["chunk"].max()) + 1 if len(drawn) else 1
    with_text = len(drawn) <= _FEW_OPS
    known = [kind for kind in KIND_COLOURS if (drawn["kind"] == kind).any()]
    others = sorted(set(drawn["kind"]) - set(known))
    for kind in (*known, *others):
        of_kind = drawn[drawn["kind"] == kind]
        chunks = sorted(set(of_kind["chunk"].tolist()))
        for chunk in chunks:
            part = of_kind[of_kind["chunk"] == chunk]
            colour = shade(KIND_COLOURS.get(kind, OTHER), max(chunk, 0), num_chunks)
            legend = _legend(kind, int(chunk), chunks)
            yield _op_trace(kind, part, colour, rows, with_text=with_text, legend=legend)


def _legend(kind: str, chunk: int, chunks: Sequence[int]) -> str | None:
    """The legend's words for a kind's ops of one chunk; None for no entry of its own."""
    name = KIND_NAMES.get(kind, kind)
    if len(chunks) <= 1:
        return name
    if len(chunks) <= _MOST_CHUNKS_NAMED:
        return f"{name}, chunk {chunk}"
    return f"{name} (lighter: later chunk)" if chunk == chunks[0] else None


def _op_trace(kind: str, ops: pd.DataFrame, colour: str, rows: _Rows, *, with_text: bool, legend: str | None) -> go.Bar:
    """All ops of one kind and chunk."""
    is_compute = kind in COMPUTE_KINDS
    start, end = rows.ms(ops["start_ns"]), rows.ms(ops["end_ns"])
    columns = (ops["rank"], ops["stage"], ops["chunk"], ops["microbatch"], ops["step"], end - start)
    what = "microbatch %{customdata[3]:d}" if is_compute else "step %{customdata[4]:d}"
    where = " · stage %{customdata[1]:d} · chunk %{customdata[2]:d}" if is_compute else ""
    text: dict[str, Any] = {}
    if with_text and is_compute:
        text = {
            "texttemplate": "%{customdata[3]:d}",
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "insidetextfont": {"color": ink(colour), "size": 12},
        }
    name = KIND_NAMES.get(kind, kind)
    return _bars(
        rows.y(ops["rank"], rows.ops),
        rows.ops.height,
        start,
        end,
        name=legend or name,
        legendgroup=kind if legend is None or "lighter" in legend else legend,
        showlegend=legend is not None,
        marker={"color": colour, "line": {"color": "rgba(255,255,255,0.55)", "width": 0.5 if with_text else 0}},
        customdata=np.stack(columns, axis=1),
        hovertext=_phase_and_source(ops),
        hovertemplate=f"<b>{name}</b> · {what}<br>rank %{{customdata[0]:d}}{where}<br>%{{hovertext}}"
        " · step %{customdata[4]:d}<br>from %{base:.3f} ms, %{customdata[5]:.3f} ms long<extra></extra>",
        **text,
    )


def _phase_and_source(ops: pd.DataFrame) -> list[str]:
    """Such as "steady · from its label, host clock"."""
    words = {"label": "from its label", "inferred": "inferred"}
    return [
        f"{phase or 'outside the pipeline'} · {words.get(source, source)}"
        f"{'' if source == 'simulated' else f', {clock} clock'}"
        for phase, source, clock in zip(ops["phase"], ops["source"], ops["clock"], strict=True)
    ]


def _comm_traces(comms: pd.DataFrame, rows: _Rows) -> Iterator[go.Bar]:
    """Sends on one thin line, everything else on the other; waiting in grey before the transfer itself."""
    seen: set[str] = set()
    for kind in sorted(set(comms["kind"])):
        of_kind = comms[comms["kind"] == kind]
        for part, begin, finish in (
            ("Waiting", "start_ns", "transfer_start_ns"),
            ("Transfer", "transfer_start_ns", "end_ns"),
        ):
            own = of_kind[of_kind[finish] > of_kind[begin]]
            if len(own):
                yield _comm_trace(kind, part, own, (begin, finish), rows, in_legend=part not in seen)
                seen.add(part)


def _comm_trace(
    kind: str, part: str, comms: pd.DataFrame, columns: tuple[str, str], rows: _Rows, *, in_legend: bool
) -> go.Bar:
    """The waiting or the transferring of all communication of one kind."""
    band = _SENDS if kind == "send" else _RECEIVES
    numbers = (
        comms["rank"],
        comms["peer"],
        comms["microbatch"],
        comms["bytes"],
        (comms["transfer_start_ns"] - comms["start_ns"]) / 1e6,
        (comms["end_ns"] - comms["transfer_start_ns"]) / 1e6,
        comms["group_size"],
    )
    names = {"send": "Send to rank %{customdata[1]:d}", "recv": "Receive from rank %{customdata[1]:d}"}
    title = names.get(kind, f"{kind} over %{{customdata[6]:d}} ranks")
    detail = " · microbatch %{customdata[2]:d}" if kind in names else ""
    return _bars(
        rows.y(comms["rank"], band),
        band.height,
        rows.ms(comms[columns[0]]),
        rows.ms(comms[columns[1]]),
        name=part,
        legendgroup=part,
        showlegend=in_legend,
        marker={"color": WAIT if part == "Waiting" else COMMUNICATION, "line": {"width": 0}},
        customdata=np.stack(numbers, axis=1),
        hovertext=_direction_and_axis(comms),
        hovertemplate=f"<b>{title}</b>{detail}<br>rank %{{customdata[0]:d}} · %{{hovertext}} · %{{customdata[3]:.3s}}B"
        "<br>waits %{customdata[4]:.3f} ms, transfers %{customdata[5]:.3f} ms<extra></extra>",
    )


def _direction_and_axis(comms: pd.DataFrame) -> list[str]:
    words = {"F": "activations, ", "B": "gradients, "}
    return [
        f"{words.get(direction, '')}{axis} axis{'' if match >= 0 else ', other side not in the trace'}"
        for direction, axis, match in zip(comms["direction"], comms["axis"], comms["match"], strict=True)
    ]


def _lay_out(
    figure: go.Figure,
    rows: _Rows,
    labels: Mapping[int, str],
    windows: Sequence[StepWindow],
    extent_ns: int | None,
    last_ms: float,
) -> None:
    span_ms = (max(window.end_ns for window in windows) - rows.origin_ns) / 1e6
    shown_ms = span_ms if extent_ns is None else extent_ns / 1e6
    row_px = min(max(560 / rows.height, 26), 112)
    figure.update_layout(
        template="none",
        font={"family": FONT},
        barmode="overlay",
        height=round(row_px * rows.height + 110),
        margin={"l": 20, "r": 20, "t": 46, "b": 54},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="closest",
        hoverlabel={"align": "left", "font": {"size": 13}},
        dragmode="zoom",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#8a93a0", "activecolor": "#2C7A8C"},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "traceorder": "normal"},
        uniformtext={"mode": "hide", "minsize": 11},
        xaxis={
            "title": {"text": "ms from the start of the step", "standoff": 10},
            "range": [-0.008 * shown_ms, 1.008 * shown_ms],
            "minallowed": -0.05 * shown_ms,
            "maxallowed": 1.05 * max(last_ms, shown_ms),
            "showgrid": True,
            "gridcolor": "rgba(128, 134, 145, 0.25)",
            "zeroline": False,
            "ticks": "outside",
            "tickcolor": "rgba(128, 134, 145, 0.5)",
        },
        yaxis={
            "tickmode": "array",
            "tickvals": list(rows.place.values()),
            "ticktext": [labels.get(rank, f"<b>rank {rank}</b>") for rank in rows.place],
            "range": [rows.height - 0.5, -0.5],
            "fixedrange": True,
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
            "ticklabelstandoff": 6,
        },
    )
    if last_ms > span_ms:
        figure.add_vline(x=span_ms, line={"color": "rgba(128, 134, 145, 0.9)", "width": 1, "dash": "dot"})
