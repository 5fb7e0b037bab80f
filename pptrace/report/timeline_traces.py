"""Traces of a timeline: phases, bubbles, ops and communication, each as a few traces of many bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from pptrace.intervals import Int64, clip, subtract, union
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.report.colours import (
    COMMUNICATION,
    KIND_COLOURS,
    KIND_NAMES,
    OTHER,
    PHASE_COLOURS,
    WAIT,
    ink,
    shade,
)
from pptrace.report.detail import View, visible
from pptrace.timeline.lanes import Lane
from pptrace.timeline.phases import PhaseSpan
from pptrace.timeline.windows import StepWindow

_PALE_BUBBLE = "rgba(128, 134, 145, 0.16)"
_EXPOSED = "#C987AC"
_FEW_OPS = 12_000
"""Above this, microbatch numbers are left out: measuring the text of each bar dominates the browser's time."""
_MOST_CHUNKS_NAMED = 3
"""Number of chunks above which the legend has one entry for all of a kind."""


@dataclass(frozen=True, slots=True)
class Band:
    """A part of a row: its centre relative to the row's, downwards, and its height; a row is 1 high."""

    centre: float
    height: float


_PHASES = Band(0.0, 0.96)
ALONE = Band(0.0, 0.74)
OPS_BAND = Band(-0.12, 0.62)
_RECEIVES = Band(0.27, 0.10)
_SENDS = Band(0.39, 0.10)


@dataclass(frozen=True, slots=True)
class Rows:
    """Vertical position of each rank, and the origin of time. A gap separates the pipelines of data-parallel replicas."""

    position: Mapping[int, float]
    origin_ns: int
    ops: Band

    @property
    def height(self) -> float:
        return max(self.position.values(), default=0.0) + 1

    def y(self, ranks: pd.Series[int], band: Band) -> Any:
        return ranks.map(self.position).to_numpy(dtype=np.float64) + band.centre

    def ms(self, times_ns: Any) -> Any:
        return (np.asarray(times_ns, dtype=np.int64) - self.origin_ns) / 1e6


def compute_by_rank(ops: pd.DataFrame, window: StepWindow) -> dict[int, pd.DataFrame]:
    compute = ops[ops["kind"].isin(COMPUTE_KINDS) & ops["rank"].isin(window.ranks)]
    return {int(str(rank)): rank_ops for rank, rank_ops in compute.groupby("rank")}


def bars(y: Any, height: float, start_ms: Any, end_ms: Any, **options: Any) -> go.Bar:
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


def phase_traces(phases: Mapping[int, Sequence[PhaseSpan]], rows: Rows) -> Iterator[go.Bar]:
    for name, colour in PHASE_COLOURS.items():
        spans = [(rank, span) for rank, rank_spans in phases.items() for span in rank_spans if str(span.phase) == name]
        if not any(span.end_ns > span.start_ns for _, span in spans):
            continue
        yield bars(
            rows.y(pd.Series([rank for rank, _ in spans]), _PHASES),
            _PHASES.height,
            rows.ms([span.start_ns for _, span in spans]),
            rows.ms([span.end_ns for _, span in spans]),
            name=name,
            marker={"color": colour, "line": {"color": "rgba(128, 134, 145, 0.35)", "width": 0.5}},
            hoverinfo="skip",
            legendrank=2000,
        )


def bubble_traces(
    ops: pd.DataFrame,
    phases: Mapping[int, Sequence[PhaseSpan]],
    windows: Sequence[StepWindow],
    lanes: Mapping[int, Lane] | None,
    rows: Rows,
    view: View | None = None,
) -> Iterator[go.Bar]:
    """Pale bars over the bubbles between ops, split at the edges of phases; of a view, those that are visible in it."""
    ranks, parts = [], []
    names: list[str] = []
    for window in windows:
        for rank, rank_ops in compute_by_rank(ops, window).items():
            idle = _idle(rank_ops, window, lanes.get(rank) if lanes else None)
            spans = [(span.start_ns, span.end_ns, str(span.phase)) for span in phases.get(rank, ())]
            for start_ns, end_ns, name in spans or [(window.start_ns, window.end_ns, "phase not known")]:
                part = visible(clip(idle, start_ns, end_ns), view)
                parts.append(part)
                ranks += [rank] * len(part)
                names += [name] * len(part)
    if not ranks:
        return
    detail = "rank %{customdata[0]:d} · %{hovertext}"
    yield _bars_of_ranks("Bubble", _PALE_BUBBLE, ranks, parts, rows, detail, legendrank=1600, hovertext=names)


def _bars_of_ranks(
    name: str, colour: str, ranks: Sequence[int], parts: Sequence[Int64], rows: Rows, detail: str, **options: Any
) -> go.Bar:
    """Bars over intervals, ns, of which ``ranks`` has the rank of each one."""
    edges = np.concatenate(parts)
    start, end = rows.ms(edges[:, 0]), rows.ms(edges[:, 1])
    return bars(
        rows.y(pd.Series(ranks), rows.ops),
        rows.ops.height,
        start,
        end,
        name=name,
        marker={"color": colour, "line": {"width": 0}},
        customdata=np.stack((np.asarray(ranks), end - start), axis=1),
        hovertemplate=f"<b>{name}</b> · %{{customdata[1]:.3f}} ms<br>{detail}<br>from %{{base:.3f}} ms<extra></extra>",
        **options,
    )


def exposed_traces(
    windows: Sequence[StepWindow], lanes: Mapping[int, Lane] | None, rows: Rows, view: View | None = None
) -> Iterator[go.Bar]:
    """Bars over the transfers that no compute hides, in ops too; of a view, those that are visible in it."""
    ranks, parts = [], []
    for window in windows:
        for rank, lane in ((rank, lane) for rank in window.ranks if (lane := (lanes or {}).get(rank)) is not None):
            part = visible(clip(lane.exposed, window.start_ns, window.end_ns), view)
            parts.append(part)
            ranks += [rank] * len(part)
    if not ranks:
        return
    yield _bars_of_ranks("Exposed transfer", _EXPOSED, ranks, parts, rows, "rank %{customdata[0]:d}", legendrank=1550)


def _idle(ops: pd.DataFrame, window: StepWindow, lane: Lane | None) -> Int64:
    """The intervals in which a rank has neither an op nor, where that is known, exposed communication."""
    idle = subtract(union([window.start_ns], [window.end_ns]), union(ops["start_ns"], ops["end_ns"]))
    return idle if lane is None else subtract(idle, lane.exposed)


def op_traces(ops: pd.DataFrame, rows: Rows, num_chunks: int) -> Iterator[go.Bar]:
    drawn = ops[ops["kind"] != "STEP"]
    with_text = len(drawn) <= _FEW_OPS
    drawn_kinds = [kind for kind in KIND_COLOURS if (drawn["kind"] == kind).any()]
    others = sorted(set(drawn["kind"]) - set(drawn_kinds))
    for kind in (*drawn_kinds, *others):
        of_kind = drawn[drawn["kind"] == kind]
        chunks = sorted(set(of_kind["chunk"].tolist()))
        for chunk in chunks:
            part = of_kind[of_kind["chunk"] == chunk]
            colour = shade(KIND_COLOURS.get(kind, OTHER), max(chunk, 0), num_chunks)
            legend = _legend(kind, int(chunk), chunks)
            yield _op_trace(kind, part, colour, rows, with_text=with_text, legend=legend)


def block_traces(blocks: pd.DataFrame, rows: Rows) -> Iterator[go.Bar]:
    """Blocks of many ops: stripes of the forward's and the backward's colour, as wide as their shares of the time."""
    if blocks.empty:
        return
    start, end = rows.ms(blocks["start_ns"]), rows.ms(blocks["end_ns"])
    numbers = (blocks["rank"], blocks["num_forward"], blocks["num_backward"])
    yield bars(
        rows.y(blocks["rank"], rows.ops),
        rows.ops.height,
        start,
        end,
        name="Many ops (zoom in)",
        marker={
            "color": KIND_COLOURS["F"],
            "line": {"width": 0},
            "pattern": {
                "shape": "/",
                "size": 7,
                "fillmode": "overlay",
                "bgcolor": KIND_COLOURS["F"],
                "fgcolor": KIND_COLOURS["B"],
                "fgopacity": 1,
                "solidity": blocks["backward_share"].to_numpy(),
            },
        },
        customdata=np.stack(numbers, axis=1),
        hovertemplate="<b>%{customdata[1]:d} forwards, %{customdata[2]:d} backwards</b><br>rank %{customdata[0]:d}<br>"
        "from %{base:.3f} ms; zoom in to see each<extra></extra>",
    )


def _legend(kind: str, chunk: int, chunks: Sequence[int]) -> str | None:
    """The legend's words for a kind's ops of one chunk; None for no entry."""
    name = KIND_NAMES.get(kind, kind)
    if len(chunks) <= 1 or chunk < 0:
        return name
    if len(chunks) <= _MOST_CHUNKS_NAMED:
        return f"{name}, chunk {chunk}"
    return f"{name} (lighter: later chunk)" if chunk == chunks[0] else None


def _op_trace(kind: str, ops: pd.DataFrame, colour: str, rows: Rows, *, with_text: bool, legend: str | None) -> go.Bar:
    """All ops of one kind and chunk."""
    is_compute = kind in COMPUTE_KINDS
    start, end = rows.ms(ops["start_ns"]), rows.ms(ops["end_ns"])
    columns = (ops["rank"], ops["stage"], ops["chunk"], ops["microbatch"], ops["step"], end - start)
    has_microbatch = is_compute and bool((ops["microbatch"] >= 0).all())
    what = "microbatch %{customdata[3]:d}" if has_microbatch else "step %{customdata[4]:d}"
    where = " · stage %{customdata[1]:d} · chunk %{customdata[2]:d}" if has_microbatch else ""
    text: dict[str, Any] = {}
    if with_text and has_microbatch:
        text = {
            "texttemplate": "%{customdata[3]:d}",
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "insidetextfont": {"color": ink(colour), "size": 12},
        }
    name = KIND_NAMES.get(kind, kind)
    return bars(
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
    """Texts such as "steady · from its label, host clock"; of an overlapped pair both halves before it."""
    words = {"label": "from its label", "inferred": "inferred"}
    return [
        f"{f'{pair} · ' if pair else ''}{phase or 'outside the pipeline'} · {words.get(source, source)}"
        f"{'' if source == 'simulated' else f', {clock} clock'}"
        for phase, source, clock, pair in zip(ops["phase"], ops["source"], ops["clock"], ops["pair"], strict=True)
    ]


def comm_traces(comms: pd.DataFrame, rows: Rows) -> Iterator[go.Bar]:
    """Sends on one thin line, everything else on the other; waiting in grey around the transfer."""
    in_legend_already: set[str] = set()
    for kind in sorted(set(comms["kind"])):
        of_kind = comms[comms["kind"] == kind]
        before = of_kind.assign(from_ns=of_kind["start_ns"], to_ns=of_kind["transfer_start_ns"])
        during = of_kind.assign(from_ns=of_kind["transfer_start_ns"], to_ns=of_kind["transfer_end_ns"])
        after = of_kind.assign(from_ns=of_kind["transfer_end_ns"], to_ns=of_kind["end_ns"])
        for part, pieces in (("Waiting", pd.concat([before, after])), ("Transfer", during)):
            drawn = pieces[pieces["to_ns"] > pieces["from_ns"]]
            if len(drawn):
                yield _comm_trace(kind, part, drawn, rows, in_legend=part not in in_legend_already)
                in_legend_already.add(part)


def _comm_trace(kind: str, part: str, comms: pd.DataFrame, rows: Rows, *, in_legend: bool) -> go.Bar:
    """The waiting or the transferring of all communication of one kind, from ``from_ns`` to ``to_ns``."""
    band = _SENDS if kind == "send" else _RECEIVES
    transfer = comms["transfer_end_ns"] - comms["transfer_start_ns"]
    numbers = (
        comms["rank"],
        comms["peer"],
        comms["microbatch"],
        comms["bytes"],
        (comms["end_ns"] - comms["start_ns"] - transfer) / 1e6,
        transfer / 1e6,
        comms["group_size"],
    )
    names = {"send": "Send to rank %{customdata[1]:d}", "recv": "Receive from rank %{customdata[1]:d}"}
    title = names.get(kind, f"{kind} over %{{customdata[6]:d}} ranks")
    detail = " · microbatch %{customdata[2]:d}" if kind in names else ""
    return bars(
        rows.y(comms["rank"], band),
        band.height,
        rows.ms(comms["from_ns"]),
        rows.ms(comms["to_ns"]),
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
