"""Key figures of a step, each with its reference value, and a bar of what it is made of, for pages and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from msgspec import Struct

from pptrace.analysis.part_words import cause_of_part, place_of_part, words_of_part
from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport
from pptrace.model.units import milliseconds, percent
from pptrace.model.wording import as_ranges
from pptrace.report.colours import OUTSIDE_COLOUR, PART_COLOURS, ink

_TIGHT = 1.25
"""A bubble above this many times its ideal is shown as a problem."""
_HAS_ROOM = 0.08
"""Share of the bar from which on a piece has room for its name."""


class Tile(Struct, frozen=True):
    """One figure. ``name`` identifies it, ``detail`` is its reference value, ``meaning`` its definition."""

    name: str
    label: str
    value: str
    detail: str
    meaning: str
    is_bad: bool = False


def step_tiles(step: StepReport, report: Report) -> tuple[Tile, ...]:
    """Length, span, bubble share, slowest rank and exposed communication of a step; "–" where unknown.

    A step without a pipeline has shares of compute and of the rest instead of bubbles.
    """
    compute = {rank.rank: rank.compute_ns for rank in step.ranks if rank.compute_ns is not None}
    value, detail = "–", "no compute is known"
    if compute:
        slowest = max(compute, key=lambda rank: compute[rank])
        mean = milliseconds(round(fmean(compute.values())))
        others = f"mean {mean}" if len(compute) > 1 else "the only rank with a trace"
        value, detail = f"rank {slowest}", f"{milliseconds(compute[slowest])} ms compute, {others}"
    return (
        *_lengths(step, report),
        *_shares(step),
        Tile("slowest", "Slowest rank", value, detail, "The rank with the most compute"),
        _exposed(step),
    )


def _lengths(step: StepReport, report: Report) -> Iterator[Tile]:
    """The step from its start to the next one's, where that is known; and its span."""
    if step.period_ns is not None:
        meaning = "From the start of the step to that of the next one: what counts for throughput"
        is_predicted = report.recording is not None and report.recording.figures == "unrecorded"
        among = _among([other.period_ns for other in report.steps if other.period_ns is not None])
        among += "; predicted without recording" if is_predicted else ""
        yield Tile("period", "Step", f"{milliseconds(step.period_ns)} ms", among, meaning)
    if step.has_pipeline or step.period_ns is None:
        among = _among([other.span_ns for other in report.steps if other.span_ns is not None])
        label, meaning = "Step", "The longest of the ranks' steps"
        if step.has_pipeline:
            label = "Pipeline span"
            meaning = "From the first op's start to the last one's end, over all ranks of the pipeline"
        yield Tile("span", label, f"{milliseconds(step.span_ns)} ms", among, meaning)


def _among(lengths: Sequence[int]) -> str:
    if len(lengths) < 2:
        return "the only step"
    return f"{milliseconds(min(lengths))} – {milliseconds(max(lengths))} ms over {len(lengths)} steps"


def _shares(step: StepReport) -> tuple[Tile, ...]:
    """The share of bubble; without a pipeline those of compute and of the rest in the ranks' steps, all together."""
    if step.has_pipeline:
        bubble = step.bubble
        ratio, ideal = bubble.ratio, bubble.ideal_ratio
        is_over = ratio is not None and ideal is not None and ratio > _TIGHT * ideal
        meaning = "Bubble over the pipeline's span, of all ranks. Ideal: this plan with F = I = W and free messages"
        detail = f"ideal {percent(bubble.ideal_share)}"
        return (Tile("share", "Bubble", percent(bubble.share), detail, meaning, is_over),)
    compute, rest = (percent(_share(step, field)) for field in ("compute_ns", "bubble_ns"))
    of_compute = "Share of the steps in operators (host) or kernels (device), all ranks together"
    of_rest = "Share of the steps in neither compute nor exposed communication: waiting for other ranks, input, Python"
    return (
        Tile("compute", "Compute", compute, "of the ranks' steps", of_compute),
        Tile("rest", "Rest", rest, "other ranks, input, Python", of_rest),
    )


def _share(step: StepReport, field: str) -> float | None:
    """The sum of a time of the ranks as a share of their windows; None where it is not known of one."""
    window = sum(rank.window_ns for rank in step.ranks)
    times = [getattr(rank, field) for rank in step.ranks]
    return sum(times) / window if window and None not in times else None


def _exposed(step: StepReport) -> Tile:
    unknown = [rank.rank for rank in step.ranks if rank.exposed_comm_ns is None]
    most = max(step.ranks, key=lambda rank: rank.exposed_comm_ns or 0, default=None)
    detail = "" if most is None else f"most on rank {most.rank}: {milliseconds(most.exposed_comm_ns)} ms"
    of_ranks = _share(step, "exposed_comm_ns")
    value = percent(of_ranks)
    meaning = "Share of the step in transfers that overlap no compute, all ranks together. Waiting for the other side is bubble"
    if (parts := step.parts) is not None and step.length_ns and of_ranks is not None:
        value, detail = percent(parts["communication"] / step.length_ns), f"of the ranks' time {value}, {detail}"
        meaning = (
            "What the step would be shorter by without transfers that no compute hides. Of the ranks' time: such transfers, all "
            "ranks together. Waiting for the other side is bubble"
        )
    elif unknown:
        detail = f"not known of rank{'' if len(unknown) == 1 else 's'} {as_ranges(unknown)}"
    return Tile("exposed", "Exposed communication", value, detail, meaning)


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
