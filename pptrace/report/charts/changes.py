"""Changes of a run by what they gain and what memory they take, with the front that nothing beats in both.

Two runs compared: the causes of their typical steps side by side, and the parts that changed most.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import plotly.graph_objects as go

from pptrace.analysis.compare.figures import CAUSE
from pptrace.analysis.compare.result import REMAINDER, Comparison
from pptrace.analysis.compare.sentence import part_label
from pptrace.analysis.whatif.result import Scenario, Standing, WhatIf
from pptrace.model.units import milliseconds, signed_milliseconds
from pptrace.model.wording import counted
from pptrace.report.charts.base import QUIET, add_bars, label_bars, lay_out, names_axis, plain
from pptrace.report.colours import COMPUTE, GAIN, IDEAL, OTHER, PART_COLOURS

_MOST_NAMES = 8
_NAME_PX = (6.2, 14.0)
"""Width of a character of a name, and its height."""
_PLOT_PX = (1000.0, 270.0)
"""The ground of the chart on a narrow screen: where names have room there, they have it on a wide one."""
_MARGIN = 0.09
_PLACES = {
    "top center": (0, 1),
    "bottom center": (0, -1),
    "top right": (1, 1),
    "bottom right": (1, -1),
    "top left": (-1, 1),
    "bottom left": (-1, -1),
    "middle left": (-1, 0),
    "middle right": (1, 0),
}
"""Places of a name, each with its side of the point: right, and up."""

Box = tuple[float, float, float, float]
"""Left, right, bottom and top, px."""
Whisker = tuple[float, float, float, float]
"""A point's memory, the lower end of its interval, its gain, and the upper end."""


def changes_chart(result: WhatIf) -> go.Figure | None:
    """Gain in ms with its 90 % interval over the memory of the fullest rank, choices, the front among them, and today's run.

    Memory is bytes where they are known of every choice, else activations of a microbatch of the run in 1/p of the model. Ideals
    and plans that the framework lacks are no choices and not in it. The axis of gains begins where the interval of the run as it
    was does: a line counts the changes that lose more. None without choices.
    """
    every = [one for one in result.scenarios if one.is_choice or one.standing is Standing.OVER_LIMIT]
    if not every or result.today is None:
        return None
    least = result.today.gain_ns + _bounds(result.today)[0]
    choices = [one for one in every if one.gain_ns >= least]
    unit = _unit([*every, result.today])
    front = sorted((one for one in choices if one.on_pareto_front), key=lambda one: _size(one, unit))
    others = [one for one in choices if not one.on_pareto_front]
    shown = [*choices, result.today]
    x_range = _padded([_size(one, unit) for one in shown])
    y_range = _padded([least / 1e6, *((one.gain_ns + _bounds(one)[1]) / 1e6 for one in shown)])
    at = [(_size(one, unit), one.gain_ns / 1e6) for one in front]
    names = _Names(x_range, y_range, [_whisker(one, unit) for one in shown], at)
    figure = go.Figure()
    figure.add_scatter(
        x=[x for x, _ in at],
        y=[y for _, y in at],
        mode="lines",
        line={"shape": "hv", "color": COMPUTE, "width": 1.5, "dash": "dot"},
        showlegend=False,
        hoverinfo="skip",
    )
    _add(figure, others, unit, ("beaten in both", OTHER, "circle"), None)
    _add(figure, [result.today], unit, ("the run as it was", IDEAL, "star"), names)
    _add(figure, front, unit, ("front: nothing takes less time and no more memory", COMPUTE, "diamond"), names)
    x = (
        "activations of a microbatch (in 1/p of the model) held by a rank"
        if unit is None
        else f"{unit[0]}, peak of the fullest rank"
    )
    if len(choices) < len(every):
        worse = [one for one in every if one.gain_ns < least]
        # of those on the front the best one, which takes least memory
        among = next((f", among them {one.name} with less memory" for one in worse if one.on_pareto_front), "")
        left_out = f"not shown: {counted(len(worse), 'change')} with a larger loss{among}"
        x += f'<br><span style="font-size: 11px; color: {QUIET}">{left_out}</span>'
    return lay_out(figure, 380, x, "gain, ms a step", xaxis_range=x_range, yaxis_range=y_range)


def _add(
    figure: go.Figure,
    shown: Sequence[Scenario],
    unit: _Unit | None,
    look: tuple[str, str, str],
    names: _Names | None,
) -> None:
    label, colour, symbol = look
    points = [(_size(one, unit), one.gain_ns / 1e6) for one in shown]
    named = shown[:_MOST_NAMES] if names is not None else ()
    places = [names.place(one.name, point) for one, point in zip(named, points, strict=False)] if names else []
    figure.add_scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode="markers+text" if names else "markers",
        text=[one.name if place else "" for one, place in zip(named, places, strict=True)],
        textposition=[place or "top center" for place in places] or None,
        textfont={"size": 11},
        name=label,
        marker={"color": colour, "symbol": symbol, "size": 11 if names else 8},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [_bounds(one)[1] / 1e6 for one in shown],
            "arrayminus": [-_bounds(one)[0] / 1e6 for one in shown],
            "color": QUIET,
            "thickness": 1,
            "width": 3,
        },
        customdata=[[one.name, milliseconds(one.length_ns)] for one in shown],
        hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]} ms, gain %{y:,.2f} ms<extra></extra>",
        cliponaxis=False,
    )


_Unit = tuple[str, float]
"""The unit of memory: its name, and how many bytes it has."""


def _unit(shown: Sequence[Scenario]) -> _Unit | None:
    """The unit in which tables have the largest of some peaks; None where one of them is not known in bytes."""
    peaks = [one.peak_memory_bytes for one in shown if one.peak_memory_bytes is not None]
    if len(peaks) < len(shown):
        return None
    return ("GB", 1e9) if max(peaks) >= 1e9 else ("MB", 1e6)


def _size(one: Scenario, unit: _Unit | None) -> float:
    return one.activations if unit is None else (one.peak_memory_bytes or 0) / unit[1]


def _bounds(one: Scenario) -> tuple[int, int]:
    """The interval of a gain around it, ns."""
    return one.length_ns - one.length_high_ns, one.length_ns - one.length_low_ns


def _whisker(one: Scenario, unit: _Unit | None) -> Whisker:
    low, high = ((one.gain_ns + bound) / 1e6 for bound in _bounds(one))
    return _size(one, unit), low, one.gain_ns / 1e6, high


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """The range of an axis with room around the values."""
    low, high = min(values), max(values)
    room = (high - low or abs(high) or 1.0) * _MARGIN
    return low - room, high + room


class _Names:
    """Places of names next to their points: none covers another name, another point or the line of the front, and each crosses as
    few whiskers as it can.
    """

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        whiskers: Sequence[Whisker],
        front: Sequence[tuple[float, float]],
    ) -> None:
        self._ranges = x, y
        self._taken: list[Box] = []
        self._whiskers: list[Box] = []
        for memory, low, gain, high in whiskers:
            (x_px, y_px), (_, low_px), (_, high_px) = (self._px((memory, value)) for value in (gain, low, high))
            self._taken.append((x_px - 6, x_px + 6, y_px - 6, y_px + 6))
            self._whiskers.append((x_px - 3, x_px + 3, low_px, high_px))
        for (left, low_y), (right, high_y) in pairwise(map(self._px, front)):  # along, then up
            self._taken.append((left, right, low_y - 1, low_y + 1))
            self._taken.append((right - 1, right + 1, min(low_y, high_y), max(low_y, high_y)))

    def place(self, name: str, point: tuple[float, float]) -> str | None:
        """Take a place for a name; None where there is no room: the pointer still tells it."""
        boxes = {place: self._box(name, self._px(point), side) for place, side in _PLACES.items()}
        free = [
            place
            for place, box in boxes.items()
            if box[0] >= 0 and box[1] <= _PLOT_PX[0] and box[2] >= 0 and box[3] <= _PLOT_PX[1]
            if not _num_crossed(box, self._taken)
        ]
        if not free:
            return None
        best = min(free, key=lambda place: _num_crossed(boxes[place], self._whiskers))
        self._taken.append(boxes[best])
        return best

    def _box(self, name: str, at: tuple[float, float], side: tuple[int, int]) -> Box:
        (x, y), (right, up), width, height = at, side, len(name) * _NAME_PX[0], _NAME_PX[1]
        middle_x, middle_y = x + right * (width / 2 + 8), y + up * (height / 2 + 7)
        return (middle_x - width / 2, middle_x + width / 2, middle_y - height / 2, middle_y + height / 2)

    def _px(self, point: tuple[float, float]) -> tuple[float, float]:
        x, y = (
            (value - low) / (high - low) * size
            for value, (low, high), size in zip(point, self._ranges, _PLOT_PX, strict=True)
        )
        return x, y


def _num_crossed(box: Box, others: Sequence[Box]) -> int:
    return sum(box[0] < other[1] and other[0] < box[1] and box[2] < other[3] and other[2] < box[3] for other in others)


A_COLOUR, B_COLOUR = "#56708F", "#E69F00"
_MOST_PARTS = 14
_TEXT_PART = 0.8
"""Room for the texts beyond the ends of bars, in parts of what the bars take: names take half of the picture."""


def causes_of_both(comparison: Comparison) -> go.Figure | None:
    """The causes of a typical step of A and of B, ms each, else the parts that sum to it; None where neither is known of both."""
    causes = [part for part in comparison.parts if part.name == CAUSE]
    order = list(PART_COLOURS)
    causes.sort(key=lambda part: order.index(str(part.where["cause"])) if part.where["cause"] in order else len(order))
    summed = sorted((part for part in comparison.parts if part.adds_up), key=lambda part: -max(part.a_ns, part.b_ns))
    causes = causes or summed
    if not causes:
        return None
    names = [plain(part.where.get("cause", part.name)) for part in causes]
    figure = go.Figure()
    for label, colour, values in (
        ("A", A_COLOUR, [part.a_ns for part in causes]),
        ("B", B_COLOUR, [part.b_ns for part in causes]),
    ):
        hover = f"<b>{label}</b>: %{{x:,.2f}} ms<extra></extra>"
        add_bars(figure, [value / 1e6 for value in values], label, colour=colour, hovertemplate=hover)
    unit = "ms" if summed else "ms, median over steps"
    return lay_out(figure, 46 * len(names) + 110, unit, barmode="group", yaxis=names_axis(names))


def changes_of_parts(comparison: Comparison) -> go.Figure | None:
    """The parts of a step that changed most, ms, those that sum to it where there are such; those that differ by more than chance
    are filled. None without parts.
    """
    adds_up = any(part.adds_up for part in comparison.parts)
    of_kind = (part for part in comparison.parts if part.adds_up is adds_up and part.name not in (CAUSE, REMAINDER))
    parts = [part for part in of_kind if part.change_ns][:_MOST_PARTS]
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
