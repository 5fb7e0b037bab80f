"""Colours and names in figures.

The kinds of ops take Okabe and Ito's palette, which is distinguishable with every common colour blindness and in grey: forward is
cold, backward is warm. Colours without a meaning are grey, and work on light and dark ground.
"""

from __future__ import annotations

from collections.abc import Mapping

KIND_COLOURS: Mapping[str, str] = {
    "F": "#0072B2",
    "B": "#D55E00",
    "I": "#E69F00",
    "W": "#009E73",
    "OVERLAP_F_B": "#8A4B9B",
    "GRAD_SYNC": "#CC79A7",
    "OPTIMIZER": "#66717F",
    "DATA": "#9AA3AD",
    "GC": "#F0E442",
    "RECOMPUTE": "#56B4E9",
}
KIND_NAMES: Mapping[str, str] = {
    "F": "Forward",
    "B": "Backward",
    "I": "Input gradient",
    "W": "Weight gradient",
    "OVERLAP_F_B": "Forward with backward",
    "GRAD_SYNC": "Gradient sync",
    "OPTIMIZER": "Optimizer",
    "DATA": "Data",
    "GC": "Garbage collection",
    "RECOMPUTE": "Recompute",
}
FONT = "'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
HOVER_LABEL: Mapping[str, object] = {
    "align": "left",
    "bgcolor": "#20242b",
    "bordercolor": "#4a525e",
    "font": {"size": 13, "color": "#f2f4f7"},
}
COMPUTE = "#2C7A8C"
COMMUNICATION = "#A9467F"
WAIT = "rgba(128, 134, 145, 0.42)"
BUBBLE = "rgba(128, 134, 145, 0.30)"
EITHER = "rgba(169, 70, 127, 0.22)"
"""Bubble or exposed communication, not known which: the colour of communication, as pale as a bubble."""
MEMORY = "#6E9F3D"
OTHER = "#7A838F"
OUTSIDE_COLOUR = "#8A6D3B"
IDEAL = "#E03C31"
GAIN = "#3A9B5C"
PART_COLOURS: Mapping[str, str] = {
    "compute": COMPUTE,
    "structural": "#8D97A5",
    "imbalance": "#E69F00",
    "straggler": "#CC79A7",
    "jitter": "#D55E00",
    "communication": COMMUNICATION,
    "host": "#56708F",
    "interaction": "#A68A64",
    "unexplained": "#B0B6BF",
}

_LIGHTEST = 0.62
_WHITE_WINS = 0.62


def shade(colour: str, index: int, count: int) -> str:
    """The ``index``-th of ``count`` shades of "#rrggbb": the colour itself, then lighter ones."""
    part = _LIGHTEST * index / max(count - 1, 2)
    mixed = (round(value + (255 - value) * part) for value in _channels(colour))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def ink(colour: str) -> str:
    """Black or white, whichever can be read on "#rrggbb"; white wins close calls.

    Contrasts are those of WCAG 2: (lighter luminance + 0.05) over (darker + 0.05).
    """
    linear = [
        (v / 255 / 12.92) if v / 255 <= 0.04045 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in _channels(colour)
    ]
    luminance = sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    on_white_ink, on_black_ink = 1.05 / (luminance + 0.05), (luminance + 0.05) / 0.05
    return "#ffffff" if on_white_ink >= _WHITE_WINS * on_black_ink else "#16181d"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


SCALE = [[0.0, "#f3f7fa"], [0.5, "#9fc5de"], [0.6, "#3f79aa"], [1.0, "#16334d"]]
"""Colours of a heat map, light for little and dark for much: it can be read in grey too. Few cells have the
shades between, on which plotly's texts, white or dark grey, are hard to read.
"""
DARK_SCALE = [
    [part / 8, colour]
    for part, colour in enumerate(
        ("#232b35", "#263f5a", "#29567e", "#2f709d", "#3e8ab8", "#59a5ce", "#7bc0df", "#a2d9ef", "#ccf1fd")
    )
]
"""Colours of a heat map on a dark page: from near its ground for little to light for much. Steps look equal (of one length in
OKLab) and each is lighter, so that it can be read with every common colour blindness.
"""
