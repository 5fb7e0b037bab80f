"""A bar of what a step is made of, above the verdict of pages."""

from __future__ import annotations

from msgspec import Struct

from pptrace.analysis.part_words import cause_of_part, place_of_part, words_of_part
from pptrace.analysis.result import StepReport
from pptrace.model.units import milliseconds, percent
from pptrace.report.colours import OUTSIDE_COLOUR, PART_COLOURS, ink

_HAS_ROOM = 0.08
"""Share of the bar from which on a piece has room for its name."""


class BarPart(Struct, frozen=True):
    """One piece of the bar: its colour, that of text on it, what it says, its share, and the name that it has room for."""

    colour: str
    ink: str
    text: str
    share: float
    label: str = ""


def bar_of(step: StepReport | None) -> tuple[BarPart, ...]:
    """The parts of a step from left to right; what made it shorter has no length and is left out. () where they are not known."""
    if step is None or not (parts := step.parts) or not step.length_ns:
        return ()
    longer = {name: ns for name, ns in parts.items() if ns > 0}
    bar = []
    for name, ns in longer.items():
        words, share = words_of_part(step, name), ns / sum(longer.values())
        colour = PART_COLOURS.get(cause_of_part(step, name), OUTSIDE_COLOUR)
        text = f"{words.phrase}{place_of_part(step, name)}: {milliseconds(ns)} ms, {percent(ns / step.length_ns)}"
        bar.append(BarPart(colour, ink(colour), text, share, words.label if share >= _HAS_ROOM else ""))
    return tuple(bar)
