"""The tables of a comparison: the typical step, its parts, and the facts in which the runs differ."""

from __future__ import annotations

from collections.abc import Iterator

from pptrace.analysis.compare.bootstrap import FEWEST_STEPS, RUN_TO_RUN
from pptrace.analysis.compare.figures import COMPUTE
from pptrace.analysis.compare.result import REMAINDER, Comparison, MeanChange, PartChange, SpanChange
from pptrace.analysis.compare.sentence import place_label
from pptrace.model import units
from pptrace.model.report_table import MAX_ROWS, Amount, ReportTable, more
from pptrace.model.wording import listed

_LEAST_SHARE = 0.001
"""A brief table leaves out parts that changed by less than this share of a step."""


def comparison_tables(comparison: Comparison, amount: Amount) -> list[ReportTable]:
    """The tables in reading order."""
    summed, parts = _sum_table(comparison, amount), _parts_table(comparison, amount)
    has_parts = bool(summed.rows or parts.rows)
    tables = [_steps_table(comparison, has_parts), *(table for table in (summed, parts) if table.rows)]
    if comparison.facts:
        facts = tuple((fact.name, fact.a or "–", fact.b or "–") for fact in comparison.facts)
        title = "Facts that differ"
        tables.append(ReportTable("compared-facts", title, ("fact", "A", "B"), facts, num_labels=3))
    return tables


def _steps_table(comparison: Comparison, has_parts: bool) -> ReportTable:
    span, counts, runs, deviations = comparison.span, comparison.num_steps, comparison.num_runs, comparison.run_to_run
    mean = comparison.mean
    of_a: list[str] = ["A", str(counts.a), units.milliseconds(span.a_ns), "", ""]
    of_b: list[str] = ["B", str(counts.b), units.milliseconds(span.b_ns), _signed(span.change), _interval(span)]
    columns = [
        "run",
        "whole steps",
        "undisturbed ms" if span.is_undisturbed else "typical ms",
        "change",
        "95 % interval",
    ]
    if mean is not None:
        of_a += [units.milliseconds(mean.a_ns), "", ""]
        of_b += [units.milliseconds(mean.b_ns), _signed(mean.change), _interval(mean)]
        columns += ["mean ms", "its change", "its interval"]
    if comparison.has_several_runs:
        for row, num, share in ((of_a, runs.a, deviations.a), (of_b, runs.b, deviations.b)):
            row += [str(num), "–" if share is None else f"{share:.2%}"]
        columns += ["runs", "run to run"]
    nothing = f"no part changed by {_LEAST_SHARE:.1%} of a step" if comparison.parts else "no part is known of both"
    notes: tuple[str, ...] = () if has_parts else (nothing,)
    notes = (*notes, *_notes_on_recording(comparison), *_notes_on_runs(comparison))
    return ReportTable("compared-steps", "Steps", tuple(columns), (tuple(of_a), tuple(of_b)), notes)


def _notes_on_recording(comparison: Comparison) -> Iterator[str]:
    """A line on what recording cost, where it was taken out of the steps of either side."""
    recording = comparison.recording
    sides = [(name, side) for name, side in (("A", recording.a), ("B", recording.b)) if side.source is not None]
    if not sides:
        return
    known = listed(
        f"{name}'s {side.source}"
        + ("" if side.recorded_ns is None else f" ({units.milliseconds(side.recorded_ns)} ms as recorded)")
        for name, side in sides
    )
    doubt = recording.deviation
    interval = f"; the change may be off by {doubt:.1%} for that, which the interval has" if doubt else ""
    yield f"steps are those without their recording: {known}{interval}; --as-recorded compares recordings"


def _notes_on_runs(comparison: Comparison) -> Iterator[str]:
    """Lines on how much runs differ, as far as that is known."""
    if not comparison.has_several_runs:
        steps = comparison.num_steps
        if comparison.span.low is not None and min(steps.a, steps.b) >= FEWEST_STEPS:
            yield (
                f"one run of each does not show how much runs differ from start to start: {RUN_TO_RUN:.1%} is allowed for; "
                "several runs of each, taken in turns, show it (pptrace compare --help)"
            )
        return
    yield "run to run: what one run deviates from another, beyond a line through all runs in time where one is taken out"
    if 1 in (comparison.num_runs.a, comparison.num_runs.b):
        yield "one run alone is taken to deviate as much as those of the other side do"
    if comparison.trend is not None:
        yield f"taken out: a change of {comparison.trend:+.2%} from each run to the next, whichever side it is of"


def _sum_table(comparison: Comparison, amount: Amount) -> ReportTable:
    """The parts that sum to the step, and the step; brief without those that are hardly any of it."""
    span, recording = comparison.span, comparison.recording
    least = _least_of(comparison) if amount is Amount.BRIEF else 0
    parts = [part for part in comparison.parts if part.adds_up]
    shown = [part for part in parts if max(abs(part.a_ns), abs(part.b_ns)) >= least]
    step = PartChange("step", {}, span.a_ns, span.b_ns, span.b_ns - span.a_ns, None)
    rows = tuple((part.name, *_cells(part)) for part in [*sorted(shown, key=_is_remainder), step]) if parts else ()
    notes = [
        f"of the median step (from {FEWEST_STEPS} steps on, of those in the middle by length), means over ranks; {_MARK}"
    ]
    if any(map(_is_remainder, shown)):
        is_measured = "measured" in (recording.a.source, recording.b.source)
        timed = ", timed without recording" * is_measured
        notes.append(f"{REMAINDER}: what they leave of the typical step{timed}")
    notes += more(len(parts) - len(shown))
    columns = ("part", *_COLUMNS)
    return ReportTable("compared-step", "Parts that sum to the step", columns, rows, tuple(notes))


def _parts_table(comparison: Comparison, amount: Amount) -> ReportTable:
    """The other parts, largest change first; brief, those that differ significantly or by most."""
    parts = shown = tuple(part for part in comparison.parts if not part.adds_up)
    if amount is Amount.BRIEF:
        least = _least_of(comparison)
        shown = tuple(part for part in parts if abs(part.change_ns) >= least)[:MAX_ROWS]
    rows = tuple((part.name, place_label(part.where), *_cells(part)) for part in shown)
    usual = "compute as in the least disturbed steps, else " if comparison.span.is_undisturbed else ""
    of_ops = "compute is that of all microbatches of a step; " if any(part.name == COMPUTE for part in parts) else ""
    is_within = len(parts) < len(comparison.parts)
    notes = [f"{usual}medians over steps of means over ranks, or over those of a stage; {of_ops}{_MARK}"]
    notes += more(len(parts) - len(shown))
    title = "Within these parts" if is_within else "Parts of a step"
    return ReportTable("compared-parts", title, ("part", "", *_COLUMNS), rows, tuple(notes), num_labels=2)


_COLUMNS = ("A ms", "B ms", "change ms", "change", " ")
_MARK = "* differs by more than chance, however many parts there are (Holm, 5 %)"


def _least_of(comparison: Comparison) -> float:
    return _LEAST_SHARE * max(comparison.span.a_ns, comparison.span.b_ns)


def _is_remainder(part: PartChange) -> bool:
    return part.name == REMAINDER


def _cells(part: PartChange) -> tuple[str, ...]:
    return (
        units.milliseconds(part.a_ns),
        units.milliseconds(part.b_ns),
        units.signed_milliseconds(part.change_ns),
        f"{part.change_ns / part.a_ns:+.1%}" if part.a_ns > 0 else "–",
        "*" if part.significant else "",
    )


def _signed(change: float | None) -> str:
    return "–" if change is None else f"{change:+.2%}"


def _interval(span: SpanChange | MeanChange) -> str:
    return "–" if span.low is None or span.high is None else f"{span.low:+.2%} to {span.high:+.2%}"
