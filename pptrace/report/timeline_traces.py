"""Traces of a timeline: phases, bubbles, ops, gaps in them and communication, each as a few traces of many bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from pptrace.intervals import EMPTY, Int64, clip, intersect, merge, subtract, union
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.report.blocks import WIDTH_PX
from pptrace.report.colours import (
    COMMUNICATION,
    KIND_COLOURS,
    KIND_NAMES,
    OTHER,
    PART_COLOURS,
    PHASE_COLOURS,
    WAIT,
    ink,
    shade,
)
from pptrace.timeline.lanes import Lane
from pptrace.timeline.phases import PhaseSpan
from pptrace.timeline.windows import StepWindow

_EDGE = {"color": "rgba(128, 134, 145, 0.35)", "width": 0.5}
_FEW_OPS = 12_000
"""Above this, microbatch numbers are left out: measuring the text of each bar dominates the browser's time."""
_MOST_GAPS = 20_000
"""Most gaps in ops that are drawn: of more, the longest."""
_MOST_CHUNKS_NAMED = 3
"""Number of chunks above which the legend has one entry for all of a kind."""

Band = tuple[float, float]
"""A part of a row: its centre relative to the row's, downwards, and its height; a row is 1 high."""
RankOps = tuple[StepWindow, int, pd.DataFrame]
"""A window, one of its ranks, and the compute ops of that rank."""
_PHASES: Band = (0.0, 0.96)
OPS_ALONE: Band = (0.0, 0.74)
OPS_ABOVE_COMMS: Band = (-0.12, 0.62)
_RECEIVES: Band = (0.27, 0.10)
_SENDS: Band = (0.39, 0.10)


@dataclass(frozen=True, slots=True)
class Rows:
    """Vertical position of each rank, and the origin of time. A gap separates the pipelines of data-parallel replicas."""

    position: Mapping[int, float]
    origin_ns: int
    ops: Band

    @property
    def height(self) -> float:
        return max(self.position.values(), default=0.0) + 1

    def ms(self, times_ns: Any) -> Any:
        return (np.asarray(times_ns, dtype=np.int64) - self.origin_ns) / 1e6

    def bars(self, ranks: Any, start_ns: Any, end_ns: Any, band: Band | None = None, **options: Any) -> go.Bar:
        """Horizontal bars from start to end, one trace; by default in the band of ops."""
        (centre, height), start = band or self.ops, self.ms(start_ns)
        y = pd.Series(ranks).map(self.position).to_numpy(dtype=np.float64) + centre
        x = self.ms(end_ns) - start
        return go.Bar(
            orientation="h", y=y, width=height, base=start, x=x, offset=-height / 2, cliponaxis=True, **options
        )


def phase_traces(phases: Mapping[int, Sequence[PhaseSpan]], rows: Rows) -> Iterator[go.Bar]:
    for name, colour in PHASE_COLOURS.items():
        spans = [(rank, span) for rank, of_rank in phases.items() for span in of_rank if str(span.phase) == name]
        if any(span.end_ns > span.start_ns for _, span in spans):
            yield rows.bars(
                [rank for rank, _ in spans],
                [span.start_ns for _, span in spans],
                [span.end_ns for _, span in spans],
                _PHASES,
                name=name,
                marker={"color": colour, "line": _EDGE},
                hoverinfo="skip",
                legendrank=2000,
            )


def bubble_traces(
    compute: Sequence[RankOps],
    phases: Mapping[int, Sequence[PhaseSpan]],
    lanes: Mapping[int, Lane],
    rows: Rows,
    pixel_ns: float,
) -> Iterator[go.Bar]:
    """Pale bars over the bubbles between ops, split at the edges of phases."""
    parts: list[tuple[int, Int64]] = []
    names: list[str] = []
    for window, rank, ops in compute:
        idle = subtract(union([window.start_ns], [window.end_ns]), union(ops["start_ns"], ops["end_ns"]))
        if rank in lanes:
            idle = subtract(idle, lanes[rank].exposed)
        spans = [(span.start_ns, span.end_ns, str(span.phase)) for span in phases.get(rank, ())]
        for start_ns, end_ns, name in spans or [(window.start_ns, window.end_ns, "phase not known")]:
            part = _wide(clip(idle, start_ns, end_ns), pixel_ns)
            parts.append((rank, part))
            names += [name] * len(part)
    yield from _gap_traces("Bubble", "rgba(128, 134, 145, 0.16)", parts, rows, 1600, names)


def gap_traces(
    compute: Sequence[RankOps],
    windows: Sequence[StepWindow],
    lanes: Mapping[int, Lane],
    rows: Rows,
    pixel_ns: float | None,
) -> Iterator[go.Bar]:
    """Bars over the gaps inside ops whose kernels were recorded, where they are wide enough to be seen, over the transfers that
    no compute hides, in ops too, and over the recompute in backwards.
    """
    starved: list[tuple[int, Int64]] = []
    others: list[tuple[int, Int64]] = []
    again: list[tuple[int, Int64]] = []
    for window, rank, ops in compute:
        lane = lanes.get(rank)
        if lane is not None and len(lane.recompute):
            again.append((rank, _wide(clip(lane.recompute, window.start_ns, window.end_ns), pixel_ns or 0.0)))
        if lane is None or not lane.on_device:
            continue
        busy = clip(merge(lane.compute, lane.exposed), window.start_ns, window.end_ns)
        inside = subtract(union(ops["start_ns"], ops["end_ns"]), busy)
        not_launched = EMPTY if lane.idle is None else intersect(inside, lane.idle.launch_starved)
        least_ns = max(window.span_ns, 1) / WIDTH_PX if pixel_ns is None else pixel_ns
        starved.append((rank, _wide(not_launched, least_ns)))
        others.append((rank, _wide(subtract(inside, not_launched), least_ns)))
    yield from _gap_traces(KIND_NAMES["RECOMPUTE"], KIND_COLOURS["RECOMPUTE"], again, rows, 1450, in_ops=True)
    yield from _gap_traces("Idle in an op: not launched", PART_COLOURS["host"], starved, rows, 1500, in_ops=True)
    yield from _gap_traces("No compute in an op", "rgba(255, 255, 255, 0.8)", others, rows, 1500, in_ops=True)
    exposed = [
        (rank, _wide(clip(lanes[rank].exposed, window.start_ns, window.end_ns), pixel_ns or 0.0))
        for window in windows
        for rank in window.ranks
        if rank in lanes
    ]
    yield from _gap_traces("Exposed transfer", "#C987AC", exposed, rows, 1550)


def _wide(intervals: Int64, least_ns: float) -> Int64:
    return intervals[intervals[:, 1] - intervals[:, 0] >= least_ns]


def _gap_traces(
    name: str,
    colour: str,
    parts: Sequence[tuple[int, Int64]],
    rows: Rows,
    legendrank: int,
    texts: Sequence[str] = (),
    *,
    in_ops: bool = False,
) -> Iterator[go.Bar]:
    """Bars over the intervals, ns, of some ranks, each with a text if there are ``texts``. ``in_ops``: with an edge, and of very
    many the longest alone.
    """
    edges = np.concatenate([part for _, part in parts]) if parts else EMPTY
    ranks = np.repeat([rank for rank, _ in parts], [len(part) for _, part in parts])
    if not len(edges):
        return
    if in_ops and len(edges) > _MOST_GAPS:
        longest = np.sort(np.argsort(edges[:, 0] - edges[:, 1], kind="stable")[:_MOST_GAPS])
        edges, ranks = edges[longest], ranks[longest]
    length_ms = rows.ms(edges[:, 1]) - rows.ms(edges[:, 0])
    yield rows.bars(
        ranks,
        edges[:, 0],
        edges[:, 1],
        name=name,
        marker={"color": colour, "line": _EDGE if in_ops else {"width": 0}},
        customdata=np.stack((ranks, length_ms), axis=1),
        hovertemplate=f"<b>{name}</b> · %{{customdata[1]:.3f}} ms<br>rank %{{customdata[0]:d}}"
        f"{' · %{hovertext}' if texts else ''}<br>from %{{base:.3f}} ms<extra></extra>",
        legendrank=legendrank,
        hovertext=texts or None,
    )


def op_traces(ops: pd.DataFrame, rows: Rows, num_chunks: int) -> Iterator[go.Bar]:
    drawn = ops[ops["kind"] != "STEP"]
    with_text = len(drawn) <= _FEW_OPS
    kinds = [kind for kind in KIND_COLOURS if (drawn["kind"] == kind).any()]
    for kind in (*kinds, *sorted(set(drawn["kind"]) - set(kinds))):
        of_kind = drawn[drawn["kind"] == kind]
        chunks = sorted(set(of_kind["chunk"].tolist()))
        for chunk in chunks:
            part = of_kind[of_kind["chunk"] == chunk]
            colour = shade(KIND_COLOURS.get(kind, OTHER), max(chunk, 0), num_chunks)
            yield _op_trace(kind, part, colour, rows, with_text=with_text, legend=_legend(kind, int(chunk), chunks))


def block_traces(blocks: pd.DataFrame, rows: Rows) -> Iterator[go.Bar]:
    """Blocks of many ops: stripes of the forward's and the backward's colour, as wide as their shares of the time."""
    if blocks.empty:
        return
    yield rows.bars(
        blocks["rank"],
        blocks["start_ns"],
        blocks["end_ns"],
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
        customdata=blocks[["rank", "num_forward", "num_backward"]].to_numpy(),
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
    length_ms = rows.ms(ops["end_ns"]) - rows.ms(ops["start_ns"])
    columns = (ops["rank"], ops["stage"], ops["chunk"], ops["microbatch"], ops["step"], length_ms)
    has_microbatch = kind in COMPUTE_KINDS and bool((ops["microbatch"] >= 0).all())
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
    words = {"label": "from its label", "inferred": "inferred"}
    details = [  # such as "steady · from its label, host clock"; of an overlapped pair both halves before it
        f"{f'{pair} · ' if pair else ''}{phase or 'outside the pipeline'} · {words.get(source, source)}"
        f"{'' if source == 'simulated' else f', {clock} clock'}"
        for phase, source, clock, pair in zip(ops["phase"], ops["source"], ops["clock"], ops["pair"], strict=True)
    ]
    return rows.bars(
        ops["rank"],
        ops["start_ns"],
        ops["end_ns"],
        name=legend or name,
        legendgroup=kind if legend is None or "lighter" in legend else legend,
        showlegend=legend is not None,
        marker={"color": colour, "line": {"color": "rgba(255,255,255,0.55)", "width": 0.5 if with_text else 0}},
        customdata=np.stack(columns, axis=1),
        hovertext=details,
        hovertemplate=f"<b>{name}</b> · {what}<br>rank %{{customdata[0]:d}}{where}<br>%{{hovertext}}"
        " · step %{customdata[4]:d}<br>from %{base:.3f} ms, %{customdata[5]:.3f} ms long<extra></extra>",
        **text,
    )


def comm_traces(comms: pd.DataFrame, rows: Rows) -> Iterator[go.Bar]:
    """Sends on one thin line, everything else on the other; waiting in grey around the transfer."""
    in_legend: set[str] = set()
    for kind in sorted(set(comms["kind"])):
        of_kind = comms[comms["kind"] == kind]
        before = of_kind.assign(from_ns=of_kind["start_ns"], to_ns=of_kind["transfer_start_ns"])
        during = of_kind.assign(from_ns=of_kind["transfer_start_ns"], to_ns=of_kind["transfer_end_ns"])
        after = of_kind.assign(from_ns=of_kind["transfer_end_ns"], to_ns=of_kind["end_ns"])
        for part, pieces in (("Waiting", pd.concat([before, after])), ("Transfer", during)):
            drawn = pieces[pieces["to_ns"] > pieces["from_ns"]]
            if len(drawn):
                yield _comm_trace(kind, part, drawn, rows, showlegend=part not in in_legend)
                in_legend.add(part)


def _comm_trace(kind: str, part: str, comms: pd.DataFrame, rows: Rows, *, showlegend: bool) -> go.Bar:
    """The waiting or the transferring of all communication of one kind, from ``from_ns`` to ``to_ns``."""
    transfer = comms["transfer_end_ns"] - comms["transfer_start_ns"]
    waits_ms, transfer_ms = (comms["end_ns"] - comms["start_ns"] - transfer) / 1e6, transfer / 1e6
    numbers = (*(comms[name] for name in ("rank", "peer", "microbatch", "bytes")), waits_ms, transfer_ms)
    names = {"send": "Send to rank %{customdata[1]:d}", "recv": "Receive from rank %{customdata[1]:d}"}
    title = names.get(kind, f"{kind} over %{{customdata[6]:d}} ranks")
    detail = " · microbatch %{customdata[2]:d}" if kind in names else ""
    words = {"F": "activations, ", "B": "gradients, "}
    texts = [
        f"{words.get(direction, '')}{axis} axis{'' if match >= 0 else ', other side not in the trace'}"
        for direction, axis, match in zip(comms["direction"], comms["axis"], comms["match"], strict=True)
    ]
    return rows.bars(
        comms["rank"],
        comms["from_ns"],
        comms["to_ns"],
        _SENDS if kind == "send" else _RECEIVES,
        name=part,
        legendgroup=part,
        showlegend=showlegend,
        marker={"color": WAIT if part == "Waiting" else COMMUNICATION, "line": {"width": 0}},
        customdata=np.stack((*numbers, comms["group_size"]), axis=1),
        hovertext=texts,
        hovertemplate=f"<b>{title}</b>{detail}<br>rank %{{customdata[0]:d}} · %{{hovertext}} · %{{customdata[3]:.3s}}B"
        "<br>waits %{customdata[4]:.3f} ms, transfers %{customdata[5]:.3f} ms<extra></extra>",
    )
