"""Summary figures of a step: each rank's window in parts, and the waterfall of the span."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import plotly.graph_objects as go
from msgspec.structs import replace

from pptrace.analysis.part_words import IDLE_WORDS, cause_of_part, place_of_part, words_of_part
from pptrace.analysis.result import RankStep, StepReport
from pptrace.analysis.whole_run import OUTSIDE
from pptrace.model.units import counted, milliseconds, percent
from pptrace.report.charts.base import QUIET, add_lines, lay_out, names_axis
from pptrace.report.colours import (
    BUBBLE,
    COMMUNICATION,
    COMPUTE,
    EITHER,
    GAIN,
    IDEAL,
    OTHER,
    OUTSIDE_COLOUR,
    PART_COLOURS,
    shade,
)

MOST_BARS = 48
"""Most ranks that have a bar each."""
_MOST_TEXTS = 12
"""Most rows that are high enough for the texts of their bars."""
_TEXT_HEIGHT = 0.25
"""Half of a text's height, in rows."""
_LABEL_WIDTH = 0.36
"""Width of a label of the waterfall, as a share of the picture's."""
_PARTS = {
    "compute_ns": ("Compute", COMPUTE),
    "exposed_comm_ns": ("Exposed communication", COMMUNICATION),
    "bubble_ns": ("Bubble", BUBBLE),
}
_REST = ("Rest: other ranks, input, Python", BUBBLE)
"""The third part of a step without a pipeline, which has no bubbles."""
_EITHER = ("Bubble or exposed communication", EITHER)
_PALE = (BUBBLE, EITHER)
_Row = tuple[str, str, RankStep]
"""A row of the overview: its label, its name where it is pointed at, and the window that is drawn."""


def overview(step: StepReport) -> go.Figure:
    """Each rank's window as compute, exposed communication and bubble; a line marks where the ideal bubble would begin.

    Of more than :data:`MOST_BARS` ranks, the means of each stage, and below them the ranks that stand out.
    """
    if len(step.ranks) <= MOST_BARS:
        rows = [(rank_label(rank.rank, _stages_of(rank)), f"rank {rank.rank}", rank) for rank in step.ranks]
    else:
        rows = [*_means_of_stages(step), *_extremes(step)]
    ranks = [rank for _, _, rank in rows]
    parts = _PARTS | ({} if step.has_pipeline else {"bubble_ns": _REST})
    if any(_is_not_split(rank) for rank in ranks):
        parts |= {"not_compute_ns": _EITHER}
    bars = {field: _part_bars(rows, attrgetter(field), name, colour) for field, (name, colour) in parts.items()}
    kinds = [] if step.has_pipeline else [kind for kind in IDLE_WORDS if any(_idle_in(kind, rank) for rank in ranks)]
    if kinds:
        bars["bubble_ns"] = _part_bars(rows, _unnamed_rest, *_REST)
    of_kinds = [
        _part_bars(
            rows, partial(_idle_in, kind), IDLE_WORDS[kind].phrase.capitalize(), shade(OUTSIDE_COLOUR, at, len(kinds))
        )
        for at, kind in enumerate(kinds)
    ]
    figure = go.Figure([*list(bars.values())[:2], *of_kinds, *list(bars.values())[2:]])
    _mark_ideal(figure, step, ranks)
    return lay_out(
        figure,
        round(min(max(210 / max(len(ranks), 1), 22), 70) * len(ranks) + 102),
        "ms",
        barmode="stack",
        uniformtext={"mode": "hide", "minsize": 10},
        xaxis_range=[0, max((rank.window_ns for rank in ranks), default=0) / 1e6 * 1.005],
        yaxis=names_axis([label for label, _, _ in rows]),
    )


def is_drawn(key: str, step: StepReport) -> bool:
    """Return whether the figures of a step show a table of it: that of ranks where each has a bar."""
    return key == "waterfall" or (key == "ranks" and len(step.ranks) <= MOST_BARS)


def _means_of_stages(step: StepReport) -> Iterator[_Row]:
    """The mean window of the ranks of each stage; a part that one of them does not know is None."""
    groups: dict[int | None, list[RankStep]] = {}
    for rank in sorted(step.ranks, key=lambda rank: (rank.stage is None, rank.stage or 0, rank.rank)):
        groups.setdefault(rank.stage, []).append(rank)
    for members in groups.values():
        means: dict[str, Any] = {}
        for field in ("window_ns", *_PARTS, "not_compute_ns"):
            values = [getattr(rank, field) for rank in members]
            means[field] = None if None in values else round(sum(values) / len(values))
        means["idle_spans"] = {
            kind: sum(_idle_in(kind, rank) for rank in members) // len(members) for kind in IDLE_WORDS
        }
        name, count = _stages_text(_stages_of(members[0])) or "no stage", counted(len(members), "rank")
        yield f"<b>{name}</b>  {count}", f"{name}, mean of {count}", replace(members[0], **means)


def _extremes(step: StepReport) -> Iterator[_Row]:
    """The ranks with the most compute, the least of it, and the most of the other parts."""
    rest = "bubble" if step.has_pipeline else "rest"
    for text, field, choose in (
        ("most compute", "compute_ns", max),
        ("least compute", "compute_ns", min),
        ("most exposed communication", "exposed_comm_ns", max),
        (f"most {rest}", "bubble_ns", max),
    ):
        known = {index: ns for index, rank in enumerate(step.ranks) if (ns := getattr(rank, field)) is not None}
        if known:
            rank = step.ranks[choose(known, key=known.__getitem__)]
            yield f"<b>rank {rank.rank}</b>  {text}", f"rank {rank.rank}, {text}", rank


def _is_not_split(rank: RankStep) -> bool:
    """Return whether only the sum of a rank's bubble and exposed communication is known."""
    return rank.bubble_ns is None and rank.not_compute_ns is not None


def _idle_in(kind: str, rank: RankStep) -> int:
    return (rank.idle_spans or {}).get(kind, 0)


def _unnamed_rest(rank: RankStep) -> int | None:
    """The rest of a rank's step without what ranges say of it, ns."""
    return None if rank.bubble_ns is None else rank.bubble_ns - sum((rank.idle_spans or {}).values())


def _part_bars(rows: Sequence[_Row], of_rank: Callable[[RankStep], int | None], name: str, colour: str) -> go.Bar:
    """One part of every row's window; unknown parts are left empty."""
    values, shares = [], []
    for _, _, rank in rows:
        values.append((of_rank(rank) or 0) if name != _EITHER[0] or _is_not_split(rank) else 0)
        shares.append(percent(values[-1] / rank.window_ns if rank.window_ns else 0.0))
    return go.Bar(
        orientation="h",
        y=list(range(len(rows))),
        x=[value / 1e6 for value in values],
        name=name,
        marker={"color": colour, "line": {"width": 0}},
        width=0.7,
        text=shares,
        textposition="inside",
        insidetextanchor="end" if colour in _PALE else "middle",  # away from the line of the ideal bubble
        textangle=0,
        insidetextfont={"color": "#5c6470" if colour in _PALE else "#ffffff", "size": 13},
        customdata=[
            [name, milliseconds(ns), share] for (_, name, _), ns, share in zip(rows, values, shares, strict=True)
        ],
        hovertemplate=f"<b>{name}</b><br>%{{customdata[0]}}: %{{customdata[1]}} ms, %{{customdata[2]}} of the step"
        "<extra></extra>",
    )


def rank_label(rank: int, stages: Sequence[int]) -> str:
    """The label of a rank's row: the rank and its stages."""
    return f"<b>rank {rank}</b>  {_stages_text(stages)}".rstrip()


def _stages_of(rank: RankStep) -> list[int]:
    return sorted({op.stage for op in rank.ops if op.stage is not None}) or ([] if rank.stage is None else [rank.stage])


def _stages_text(stages: Sequence[int]) -> str:
    if not stages:
        return ""
    names = ", ".join(map(str, stages)) if len(stages) <= 4 else f"{stages[0]}, {stages[1]} … {stages[-1]}"
    return f"stage{'s' if len(stages) > 1 else ''} {names}"


def _mark_ideal(figure: go.Figure, step: StepReport, windows: Sequence[RankStep]) -> None:
    """Draw a line in each row where the bubble would begin if it had the plan's ideal share of the window.

    It spares the middle of rows that have room for texts.
    """
    share = step.bubble.ideal_share
    if len(step.ranks) == 1 and _is_not_split(step.ranks[0]) and step.ranks[0].ideal is not None:
        share = step.ranks[0].ideal.own_share  # the window is that of this one rank
    if share is None:
        return
    above_and_below = ((-0.47, -_TEXT_HEIGHT), (_TEXT_HEIGHT, 0.47))
    parts = above_and_below if len(windows) <= _MOST_TEXTS else ((-0.47, 0.47),)
    starts = [rank.window_ns * (1 - share) / 1e6 for rank in windows]
    lines = [(x, row + begin, x, row + end) for row, x in enumerate(starts) for begin, end in parts]
    name = f"Ideal bubble would begin here ({percent(share)})"
    add_lines(figure, lines, line={"color": IDEAL, "width": 2}, name=name)


class _Part(NamedTuple):
    """One bar of the waterfall, ns: it begins where the one above it ends."""

    name: str
    detail: str
    colour: str
    start: int
    value: int
    label: str

    @property
    def low(self) -> int:
        return min(self.start, self.start + self.value)

    @property
    def high(self) -> int:
        return max(self.start, self.start + self.value)


def waterfall(step: StepReport, extent_ns: int = 0) -> go.Figure:
    """The attribution of a step: each part begins where the one above it ends, and the last bar is the whole.

    The axis has room for ``extent_ns``, so that two pictures can be compared.
    """
    measured, length = step.parts, step.length_ns
    if measured is None or length is None:
        return note("Not known: the trace lacks ops of the plan, or there is no plan")
    parts = _waterfall_parts(step, measured, length)
    whole = max(extent_ns, *(part.high for part in parts))
    positions = [_label_position(part, whole) for part in parts]
    figure = go.Figure(
        go.Bar(
            orientation="h",
            y=list(range(len(parts))),
            base=[part.low / 1e6 for part in parts],
            x=[(part.high - part.low) / 1e6 for part in parts],
            width=0.64,
            marker={"color": [part.colour for part in parts], "line": {"width": 0}},
            text=[part.label if position == "inside" else "" for part, position in zip(parts, positions, strict=True)],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"color": "#ffffff", "size": 12.5},
            customdata=[[part.name, part.label, part.detail] for part in parts],
            hovertemplate="<b>%{customdata[0]}</b> · %{customdata[1]}<br>%{customdata[2]}<extra></extra>",
        )
    )
    _label_outside_and_connect(figure, parts, positions)
    return lay_out(
        figure,
        34 * len(parts) + 74,
        "ms",
        showlegend=False,
        margin={"l": 16, "r": 16, "t": 12, "b": 46},
        xaxis_range=[min(part.low for part in parts) / 1e6, whole / 1e6 * 1.03],
        yaxis=names_axis([part.name for part in parts]),
    )


def _waterfall_parts(step: StepReport, measured: Mapping[str, int], length_ns: int) -> list[_Part]:
    """The parts in their order, and the whole."""
    parts: list[_Part] = []
    at = 0
    for part, value in measured.items():
        words = words_of_part(step, part)
        detail = words.phrase + (f" ({words.detail})" if words.detail else "") + place_of_part(step, part)
        name = words.label.capitalize().replace("Outside ", "Outside: ")
        colour = PART_COLOURS.get(cause_of_part(step, part), OUTSIDE_COLOUR) if value >= 0 else GAIN
        sign, share = "−" if value < 0 else "+" if parts else "", percent(abs(value) / (length_ns or 1))
        label = f"{sign}{milliseconds(abs(value))} ms · {'−' if value < 0 and share != percent(0) else ''}{share}"
        parts.append(_Part(name, detail, colour, at, value, label))
        at += value
    is_period = any(part.startswith(OUTSIDE) for part in measured)
    next_start, last_end = "its start to the start of the next one", "the first op's start to the last one's end"
    detail = f"from {next_start if is_period else last_end}"
    return [*parts, _Part("Step", detail, OTHER, 0, length_ns, f"{milliseconds(length_ns)} ms")]


def _label_position(part: _Part, whole: int) -> str:
    """Position of a label: right of the bar if it fits, else left of it, else inside."""
    if part.high <= (1 - _LABEL_WIDTH) * whole:
        return "middle right"
    return "middle left" if part.low >= _LABEL_WIDTH * whole else "inside"


def _label_outside_and_connect(figure: go.Figure, parts: Sequence[_Part], positions: Sequence[str]) -> None:
    """Draw the labels left or right of their bars, and thin lines from the end of each part to the beginning of the next."""
    outside = [(row, *both) for row, both in enumerate(zip(parts, positions, strict=True)) if both[1] != "inside"]
    figure.add_scatter(
        x=[(part.high if position == "middle right" else part.low) / 1e6 for _, part, position in outside],
        y=[row for row, _, _ in outside],
        mode="text",
        text=[f"  {part.label}  " for _, part, _ in outside],
        textposition=[position for _, _, position in outside],
        textfont={"size": 12.5},
        hoverinfo="skip",
        cliponaxis=False,
    )
    ends = [(part.start + part.value) / 1e6 for part in parts[:-1]]
    lines = [(end, row, end, row + 1) for row, end in enumerate(ends)]
    add_lines(figure, lines, line={"color": QUIET, "width": 1, "dash": "dot"})


STEP_FIGURES: Mapping[str, Callable[[StepReport], go.Figure]] = {"overview": overview, "waterfall": waterfall}
"""The figures of a step, by their names in the API."""


def note(text: str) -> go.Figure:
    """An empty picture that says why it is empty."""
    figure = go.Figure()
    figure.add_annotation(text=text, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper", font={"size": 14})
    margin = {"l": 8, "r": 8, "t": 8, "b": 8}
    return lay_out(figure, 160, margin=margin, xaxis_visible=False, yaxis_visible=False)
