"""The verdict as a page shows it: a bar of what the step is made of, above its three lines."""

from __future__ import annotations

from dataclasses import dataclass

from pptrace.analysis.part_words import cause_of_part, place_of_part, words_of_part
from pptrace.analysis.result import StepReport
from pptrace.report.colours import OUTSIDE_COLOUR, PART_COLOURS
from pptrace.report.units import milliseconds, percent


@dataclass(frozen=True, slots=True)
class BarPart:
    """One piece of the bar: its colour, what it says, and its share of all pieces."""

    colour: str
    text: str
    share: float


def bar_of(step: StepReport | None) -> tuple[BarPart, ...]:
    """The parts of a step from left to right; what made it shorter has no length and is left out. () where they are not known."""
    if step is None or not (parts := step.parts) or not step.length_ns:
        return ()
    longer = {name: ns for name, ns in parts.items() if ns > 0}
    return tuple(
        BarPart(
            PART_COLOURS.get(cause_of_part(step, name), OUTSIDE_COLOUR),
            f"{words_of_part(step, name).phrase}{place_of_part(step, name)}: {milliseconds(ns)} ms, "
            f"{percent(ns / step.length_ns)}",
            ns / sum(longer.values()),
        )
        for name, ns in longer.items()
    )
