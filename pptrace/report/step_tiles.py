"""Key figures of a step, each with its reference value, for pages and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from pptrace.analysis.result import Report, StepReport
from pptrace.model.units import milliseconds, percent
from pptrace.model.wording import numbered

_TIGHT = 1.25
"""A bubble above this many times its ideal is shown as a problem."""


@dataclass(frozen=True, slots=True)
class Tile:
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
    return (
        *_lengths(step, report),
        *((_bubble(step),) if step.has_pipeline else _plain(step)),
        _slowest(step),
        _exposed(step),
    )


def _lengths(step: StepReport, report: Report) -> Iterator[Tile]:
    """The step from its start to the next one's, where that is known; and its span."""
    periods = [other.period_ns for other in report.steps if other.period_ns is not None]
    if step.period_ns is not None:
        meaning = "From the start of the step to that of the next one: what counts for throughput"
        is_predicted = report.recording is not None and report.recording.figures == "unrecorded"
        among = f"{_among(periods)}; predicted without recording" if is_predicted else _among(periods)
        yield Tile("period", "Step", f"{milliseconds(step.period_ns)} ms", among, meaning)
    if step.has_pipeline or step.period_ns is None:
        spans = [other.span_ns for other in report.steps if other.span_ns is not None]
        meaning = "From the first op's start to the last one's end, over all ranks of the pipeline"
        yield Tile(
            "span",
            "Pipeline span" if step.has_pipeline else "Step",
            f"{milliseconds(step.span_ns)} ms",
            _among(spans),
            meaning if step.has_pipeline else "The longest of the ranks' steps",
        )


def _among(lengths: Sequence[int]) -> str:
    if len(lengths) < 2:
        return "the only step"
    return f"{milliseconds(min(lengths))} – {milliseconds(max(lengths))} ms over {len(lengths)} steps"


def _bubble(step: StepReport) -> Tile:
    bubble = step.bubble
    is_over = bubble.ratio is not None and bubble.ideal_ratio is not None and bubble.ratio > _TIGHT * bubble.ideal_ratio
    return Tile(
        "share",
        "Bubble",
        percent(bubble.share),
        f"ideal {percent(bubble.ideal_share)}",
        "Bubble over the pipeline's span, of all ranks. Ideal: this plan with F = I = W and free messages",
        is_over,
    )


def _plain(step: StepReport) -> tuple[Tile, Tile]:
    """Shares of the ranks' steps, all together."""
    return (
        Tile(
            "compute",
            "Compute",
            percent(_share(step, [rank.compute_ns for rank in step.ranks])),
            "of the ranks' steps",
            "Share of the steps in operators (host) or kernels (device), all ranks together",
        ),
        Tile(
            "rest",
            "Rest",
            percent(_share(step, [rank.bubble_ns for rank in step.ranks])),
            "other ranks, input, Python",
            "Share of the steps in neither compute nor exposed communication: waiting for other ranks, input, Python",
        ),
    )


def _share(step: StepReport, times: Sequence[int | None]) -> float | None:
    """The sum of the ranks' times as a share of their windows; None where a time is unknown."""
    window = sum(rank.window_ns for rank in step.ranks)
    measured = [time for time in times if time is not None]
    return sum(measured) / window if window and len(measured) == len(times) else None


def _slowest(step: StepReport) -> Tile:
    """The rank with the most compute, and its compute time."""
    compute = {rank.rank: rank.compute_ns for rank in step.ranks if rank.compute_ns is not None}
    value, detail = "–", "no compute is known"
    if compute:
        slowest = max(compute, key=lambda rank: compute[rank])
        mean = milliseconds(round(fmean(compute.values())))
        others = f"mean {mean}" if len(compute) > 1 else "the only rank with a trace"
        value, detail = f"rank {slowest}", f"{milliseconds(compute[slowest])} ms compute, {others}"
    return Tile("slowest", "Slowest rank", value, detail, "The rank with the most compute")


def _exposed(step: StepReport) -> Tile:
    unknown = [rank.rank for rank in step.ranks if rank.exposed_comm_ns is None]
    most = max(step.ranks, key=lambda rank: rank.exposed_comm_ns or 0, default=None)
    missing = f"not known of rank{'' if len(unknown) == 1 else 's'} {numbered(unknown)}"
    detail = "" if most is None else f"most on rank {most.rank}: {milliseconds(most.exposed_comm_ns)} ms"
    of_ranks = _share(step, [rank.exposed_comm_ns for rank in step.ranks])
    if (parts := step.parts) is not None and step.length_ns and of_ranks is not None:
        return Tile(
            "exposed",
            "Exposed communication",
            percent(parts["communication"] / step.length_ns),
            f"of the ranks' time {percent(of_ranks)}, {detail}",
            "What the step would be shorter by without transfers that no compute hides. Of the ranks' time: such transfers, all "
            "ranks together. Waiting for the other side is bubble",
        )
    return Tile(
        "exposed",
        "Exposed communication",
        percent(of_ranks),
        missing if unknown else detail,
        "Share of the step in transfers that overlap no compute, all ranks together. Waiting for the other side is bubble",
    )
