"""The comparison of two runs from their figures: the change of the step, of its parts, and a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import exp, hypot

import numpy as np
from msgspec.structs import replace

from pptrace.analysis.compare.bootstrap import FEWEST_STEPS, Typical, difference, holm, relative_difference
from pptrace.analysis.compare.facts import differing, work_of
from pptrace.analysis.compare.figures import COMPUTE, EXPOSED, RANGE, WINDOW, Series, StepFigures
from pptrace.analysis.compare.matching import MatchedPart, lines_on_windows, match_figures, unmatched_names
from pptrace.analysis.compare.recording import RecordedBoth
from pptrace.analysis.compare.result import REMAINDER, Comparison, MeanChange, OfBoth, PartChange, SpanChange, Work
from pptrace.analysis.compare.run_to_run import Order, TypicalOfSides, changes_otherwise, typical_of_sides
from pptrace.analysis.compare.sentence import sentence_of, verdict_of
from pptrace.analysis.compare.side import ComparedRun, Side, describe_counts, order_of, side_of
from pptrace.analysis.shared_devices import CORE_WAIT
from pptrace.model.known import all_known
from pptrace.model.tables import Int64
from pptrace.model.wording import counted, listed, milliseconds


def compare_sides(runs_a: Sequence[ComparedRun], runs_b: Sequence[ComparedRun]) -> Comparison:
    """The change from A to B, of each of which there is a run or several; all have a whole step.

    Raises:
        TraceError: the runs of a side are of different programs, or copies; the message is one line.
    """
    a, b = side_of("A", runs_a), side_of("B", runs_b)
    order = order_of(a, b)
    undisturbed = all_known((a.undisturbed(), b.undisturbed())) if a.is_disturbed or b.is_disturbed else None
    span_a, span_b, note = _lengths(a.figures, b.figures)
    usual = typical_of_sides(a.typical_steps(span_a), b.typical_steps(span_b), order)
    lengths = usual if undisturbed is None else typical_of_sides(undisturbed[0], undisturbed[1], order)
    recorded = RecordedBoth(a.recording, b.recording)
    of_a = _off_by(recorded.deviation, lengths.a)
    span = SpanChange(of_a.ns, lengths.b.ns, *_change(of_a, lengths.b), undisturbed is not None)
    off_ns = recorded.deviation * max(lengths.a.ns, lengths.b.ns)
    matched = match_figures(a.figures, b.figures, a.schedule == b.schedule, (span_a, span_b))
    changes = _part_changes(a, b, matched, recorded, order, off_ns, is_undisturbed=undisturbed is not None)
    parts = _with_remainder(changes, span)
    mean = _mean_change(a, b, order, recorded.deviation)
    about_sides = _warnings(a, b, order, None if undisturbed is None else usual, note)
    warnings = (*about_sides, *recorded.lines(), *_of_runs(a, b))
    work = work_of(a.runs[0].facts, b.runs[0].facts)
    if work.is_same is None and _has_copies(a, b):
        work = Work(True, _COPIES)
    return Comparison(
        verdict_of(span),
        sentence_of(span, mean, parts, describe_counts(a, b), work),
        span,
        OfBoth(a.figures.num_steps, b.figures.num_steps),
        parts,
        differing([run.facts for run in a.runs], [run.facts for run in b.runs]),
        warnings,
        OfBoth(len(a.runs), len(b.runs)),
        OfBoth(_share(lengths.deviation_a, lengths.a.ns), _share(lengths.deviation_b, lengths.b.ns)),
        _share(lengths.trend, lengths.a.ns),
        recorded.recordings,
        mean,
        work,
    )


_COPIES = "the same steps, to the nanosecond"


def _has_copies(a: Side, b: Side) -> bool:
    """Return whether a recording is on both sides."""
    both = product((run.figures for run in a.runs), (run.figures for run in b.runs))
    return any(one.is_copy(other) for one, other in both)


def _share(ns: float | None, of_ns: int) -> float | None:
    return None if ns is None or of_ns <= 0 else ns / of_ns


def _lengths(a: StepFigures, b: StepFigures) -> tuple[Int64, Int64, tuple[str, ...]]:
    """(the length of each step of A, of B, a line where that is not the period)."""
    if a.period is not None and b.period is not None:
        return a.period, b.period, ()
    if a.span is not None and b.span is not None:
        lacking = listed(name for name, run in (("A", a), ("B", b)) if run.period is None)
        line = f"when the next step begins is not known of all steps of {lacking}: steps are as long as from first op to last"
        return a.span, b.span, (line,)
    lacking = listed(name for name, run in (("A", a), ("B", b)) if run.span is None)
    line = (
        f"the times of the ranks of {lacking} do not compare: steps are as long as the mean of the ranks' own windows, "
        "from first op to last"
    )
    return a.window, b.window, (line,)


def _change(a: Typical, b: Typical) -> tuple[float | None, float | None, float | None]:
    """(b / a − 1, the ends of its interval)."""
    found = relative_difference(a, b)
    low, high = (None, None) if found is None else (exp(end) - 1 for end in found.interval())
    return b.ns / a.ns - 1 if a.ns else None, low, high


def _mean_change(a: Side, b: Side, order: Order | None, deviation: float) -> MeanChange | None:
    """The change of the mean step, which may be off by this share for what recording cost."""
    of_a, of_b = a.mean_steps(), b.mean_steps()
    if of_a is None or of_b is None:
        return None
    means = typical_of_sides([run.mean for run in of_a], [run.mean for run in of_b], order)
    change = _change(_off_by(deviation, means.a), means.b)
    return MeanChange(means.a.ns, means.b.ns, *change, is_otherwise=changes_otherwise(of_a, of_b))


def _off_by(deviation: float, typical: Typical) -> Typical:
    """The value that may be off besides by this share of it, a standard deviation."""
    return replace(typical, run_to_run=hypot(typical.run_to_run, deviation * typical.ns))


def _part_changes(
    a: Side,
    b: Side,
    matched: Iterable[MatchedPart],
    recorded: RecordedBoth,
    order: Order | None,
    off_ns: float,
    is_undisturbed: bool,
) -> list[PartChange]:
    """The parts that are known in whole steps of all runs and not 0 in all.

    Of parts that may differ by what was recorded it is not known whether they do. With ``is_undisturbed`` what ops compute is
    that of the least disturbed steps. ``off_ns`` is by how much the change of the step may be off for what recording cost.
    """
    has_devices = bool(a.recording.has_devices and b.recording.has_devices)
    typical = [
        (part, typical_of_sides(of_runs[0], of_runs[1], order))
        for part in matched
        if shows(part.a, part.b) and (of_runs := _runs_of_part(part, a, b, is_undisturbed)) is not None
    ]
    found = [
        None
        if recorded.hides(part.name if part.lengths is None else WINDOW, part.place)
        else difference(_off_by_recording(part.name, both, off_ns, has_devices), both.b)
        for part, both in typical
    ]
    marks = iter(holm([tests.p for tests in found if tests is not None]))
    return [
        PartChange(
            part.name,
            dict(part.place),
            both.a.ns,
            both.b.ns,
            both.b.ns - both.a.ns,
            None if tests is None else next(marks),
            adds_up=part.lengths is not None,
        )
        for (part, both), tests in zip(typical, found, strict=True)
    ]


def _with_remainder(changes: Sequence[PartChange], span: SpanChange) -> tuple[PartChange, ...]:
    """The parts, largest change first, with what those that sum to the step leave of the median one, or have too much."""
    summed = [part for part in changes if part.adds_up]
    a_ns, b_ns = span.a_ns - sum(part.a_ns for part in summed), span.b_ns - sum(part.b_ns for part in summed)
    if summed and (a_ns or b_ns):
        changes = [*changes, PartChange(REMAINDER, {}, a_ns, b_ns, b_ns - a_ns, None, adds_up=True)]
    return tuple(sorted(changes, key=lambda part: (-abs(part.change_ns), part.name, str(part.where))))


def _off_by_recording(name: str, both: TypicalOfSides, step_ns: float, has_devices: bool) -> Typical:
    """The part of A, with what its difference to that of B may be off by for what recording cost: what waits by as much as the
    step, times of hosts by no more than they are long, times of devices by nothing.
    """
    if name == COMPUTE and has_devices:
        return both.a
    most = max(both.a.ns, both.b.ns) if name in (COMPUTE, RANGE) else step_ns
    return replace(both.a, run_to_run=hypot(both.a.run_to_run, min(step_ns, most)))


def _runs_of_part(part: MatchedPart, a: Side, b: Side, is_undisturbed: bool) -> list[list[Typical]] | None:
    """A part of the step in each run of A and of B; None where a run lacks it."""
    if part.lengths is not None:
        return all_known((a.typical_part(part.a, part.lengths[0]), b.typical_part(part.b, part.lengths[1])))
    if part.name != COMPUTE:
        return all_known((a.typical(part.a), b.typical(part.b)))
    if is_undisturbed and (least := all_known((a.least_disturbed(part.a), b.least_disturbed(part.b)))) is not None:
        return least
    return all_known((a.typical_compute(part.a), b.typical_compute(part.b)))


def shows(a: Series, b: Series) -> bool:
    """Return whether a part is not 0 in all steps of both."""
    return any(bool(np.rint(np.nan_to_num(series)).any()) for series in (a, b))


def _too_few(a: Side, b: Side) -> Iterator[str]:
    few = [side for side in (a, b) if side.fewest_steps < FEWEST_STEPS]
    if few:
        counts = listed(
            f"{side.name} has {'' if len(side.runs) == 1 else 'a run of '}{counted(side.fewest_steps, 'whole step')}"
            for side in few
        )
        known: dict[str, list[str]] = {}
        for side in few:
            prior, is_by_ops = side.prior
            by = "as far as ops tell" if is_by_ops else "as is assumed where no ops tell"
            known.setdefault(f"by {prior.deviation:.0%} and a whole run by {prior.lasting:.0%} ({by})", []).append(
                side.name
            )
        doubts = ", ".join(f"those of {' and '.join(names)} {doubt}" for doubt, names in known.items())
        yield (
            f"little evidence: {counts}, and from {FEWEST_STEPS} on it shows how much steps vary; until then they are taken to "
            f"deviate like two more, {doubts}; record more, as with pptrace run --steps 2:52"
        )


def _warnings(
    a: Side, b: Side, order: Order | None, measured: TypicalOfSides | None, note: Sequence[str]
) -> Iterator[str]:
    """Lines on what makes the comparison doubtful; ``measured`` and ``note`` are of typical steps, the former where undisturbed
    ones are compared.
    """
    if _has_copies(a, b):
        yield f"A and B have {_COPIES}: they are one recording, or copies of it, and show nothing of how runs differ"
    yield from _too_few(a, b)
    if len(a.runs) + len(b.runs) > 2 and order is not None and not order.is_in_turns:
        first, second = (a, b) if order.apart > 0 else (b, a)
        yield (
            f"the runs of {first.name} were taken before those of {second.name}: whatever else changed with time counts as a "
            "change; take runs in turns, one of A and one of B"
        )
    yield from _busy_machines(a, b, measured)
    yield from note if measured is None else ()
    if a.num_ranks != b.num_ranks:
        yield (
            f"A has {counted(a.num_ranks, 'rank')} and B {b.num_ranks}: parts are means over the ranks of each run, or of a stage"
        )
    yield from lines_on_windows(a.figures, b.figures)
    lacking: dict[str, list[str]] = {}
    for name, run in unmatched_names(a.figures, b.figures):
        lacking.setdefault(name, []).append(run)
    for name, runs in lacking.items():
        what = "not all of it was recorded" if name == EXPOSED else "it is not known"
        yield f"{name} is not compared where one run alone has it: {what} in {' and '.join(runs)}"


def _busy_machines(a: Side, b: Side, measured: TypicalOfSides | None) -> Iterator[str]:
    """A line about waits for cores; ``measured`` are the typical steps where undisturbed ones are compared."""
    disturbed = [side for side in (a, b) if side.is_disturbed]
    if not disturbed:
        return
    most = {side.name: max(run.core_wait or 0.0 for run in side.runs) for side in disturbed}
    listed_waits = listed(
        f"{side.name} for {'' if len(side.runs) == 1 else 'up to '}{most[side.name]:.1%}" for side in disturbed
    )
    allowed = f"so {CORE_WAIT:.0%} of it is allowed for"
    if len(a.runs) + len(b.runs) > 2:
        allowed = "as the runs themselves show"
    if measured is not None:
        allowed = (
            "so the step and what it computes are compared as they were where nothing disturbed them, each op and message as in "
            f"the least disturbed steps; typical ones took {milliseconds(measured.a.ns)} ms in A and "
            f"{milliseconds(measured.b.ns)} ms in B"
        )
    yield (
        f"ranks waited for a core ({listed_waits} of the time, the threads of each added up), because of other work on the "
        f"machine or more threads than cores: that differs from run to run, {allowed}; use a quiet machine"
    )


def _of_runs(a: Side, b: Side) -> Iterator[str]:
    """The lines about the runs of each side; those about both once."""
    of_lines: dict[str, list[str]] = {}
    for side in (a, b):
        for line, runs in side.lines():
            of_lines.setdefault(line, []).append(runs)
    for line, sides in of_lines.items():
        yield f"{' and '.join(sides)}: {line}"
