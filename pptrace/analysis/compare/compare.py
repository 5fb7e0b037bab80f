"""The comparison of two runs from their figures: the change of the step, of its parts, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp

import numpy as np

from pptrace.analysis.compare.bootstrap import (
    FEWEST_STEPS,
    Typical,
    difference,
    holm,
    relative_difference,
    typical_of,
)
from pptrace.analysis.compare.facts import Facts, differing
from pptrace.analysis.compare.figures import CAUSE, COMPUTE, EXPOSED, Series, StepFigures
from pptrace.analysis.compare.matching import match_figures, unmatched_names
from pptrace.analysis.compare.recording import RecordedApart, Recording
from pptrace.analysis.compare.result import (
    ChangeVerdict,
    Comparison,
    PartChange,
    SpanChange,
    StepCounts,
)
from pptrace.analysis.compare.undisturbed import OpTimes, least_disturbed
from pptrace.analysis.core_waits import CORE_WAIT, USUAL_CORE_WAIT
from pptrace.model.tables import Int64
from pptrace.model.wording import counted, listed, milliseconds, signed_milliseconds


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """One run as far as it is compared; ``warnings`` are lines about it.

    ``core_wait`` is the share of the time for which a rank waited for a core, the mean over ranks; None where it is not known.
    ``op_times`` are those of the ops of its plan, None where it has none; ``recording`` is None where nothing tells it.
    """

    figures: StepFigures
    schedule: str
    num_ranks: int
    facts: Facts = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    core_wait: float | None = None
    op_times: OpTimes | None = None
    recording: Recording | None = None

    @property
    def is_disturbed(self) -> bool:
        """Return whether its ranks waited for a core for longer than is usual."""
        return (self.core_wait or 0.0) > USUAL_CORE_WAIT

    @cached_property
    def undisturbed(self) -> Typical | None:
        """The step without what disturbed it; None where too few steps or no plan tell."""
        return None if self.op_times is None else self.op_times.undisturbed()

    def typical(self, series: Int64) -> Typical:
        """The typical value of a series of its steps. A wait for a core may be part of any figure of the step."""
        return typical_of(series, (self.core_wait or 0.0) * float(np.median(self.figures.window)))


def compare_runs(a: ComparedRun, b: ComparedRun) -> Comparison:
    """The change from A to B; both have a whole step."""
    undisturbed = _undisturbed(a, b)
    span_a, span_b, note = _lengths(a.figures, b.figures)
    lengths = undisturbed or (a.typical(span_a), b.typical(span_b))
    span = _span_change(*lengths, is_undisturbed=undisturbed is not None)
    apart = None if a.recording is None or b.recording is None else RecordedApart(a.recording, b.recording)
    parts = _part_changes(a, b, apart, is_undisturbed=undisturbed is not None)
    verdict = _verdict(span)
    warnings = (
        *_too_few(a, b),
        *_busy_machines(a, b, None if undisturbed is None else (_middle(span_a), _middle(span_b))),
        *(() if undisturbed is not None else note),
        *_other_ranks(a, b),
        *_not_compared(a, b),
        *(() if apart is None else apart.lines()),
        *_of_runs(a, b),
    )
    counts = StepCounts(a.figures.num_steps, b.figures.num_steps)
    return Comparison(
        verdict, _detail(verdict, span, parts), span, counts, parts, differing(a.facts, b.facts), warnings
    )


def _undisturbed(a: ComparedRun, b: ComparedRun) -> tuple[Typical, Typical] | None:
    """The steps of both without what disturbed them, where ranks of either waited for cores and both tell."""
    if not (a.is_disturbed or b.is_disturbed) or a.undisturbed is None or b.undisturbed is None:
        return None
    return a.undisturbed, b.undisturbed


def _middle(span: Int64) -> float:
    return typical_of(span).ns / 1e6


def _lengths(a: StepFigures, b: StepFigures) -> tuple[Int64, Int64, tuple[str, ...]]:
    """(the length of each step of A, of B, a line where that is not the span)."""
    if a.span is not None and b.span is not None:
        return a.span, b.span, ()
    lacking = listed(name for name, run in (("A", a), ("B", b)) if run.span is None)
    line = (
        f"the times of the ranks of {lacking} do not compare: steps are as long as the mean of the ranks' own windows, "
        "from first op to last"
    )
    return a.window, b.window, (line,)


def _span_change(a: Typical, b: Typical, is_undisturbed: bool) -> SpanChange:
    change = b.ns / a.ns - 1 if a.ns else None
    found = relative_difference(a, b)
    low, high = (None, None) if found is None else (exp(end) - 1 for end in found.interval())
    return SpanChange(a.ns, b.ns, change, low, high, is_undisturbed)


def _verdict(span: SpanChange) -> ChangeVerdict:
    if span.low is None or span.high is None or span.low <= 0 <= span.high:
        return ChangeVerdict.NO_DIFFERENCE
    return ChangeVerdict.SLOWER if span.low > 0 else ChangeVerdict.FASTER


def _part_changes(
    a: ComparedRun, b: ComparedRun, apart: RecordedApart | None, is_undisturbed: bool
) -> tuple[PartChange, ...]:
    """The parts that are known in whole steps of both runs and not 0 in both, largest change first.

    Of parts that may differ by what was recorded it is not known whether they do. With ``is_undisturbed`` what ops compute is
    that of the least disturbed steps.
    """
    matched = match_figures(a.figures, b.figures, a.schedule == b.schedule)
    known = [(part, _known(part.a), _known(part.b)) for part in matched]
    typical = [
        (part, *_typical_of_part(part.name, (a, of_a), (b, of_b), is_undisturbed))
        for part, of_a, of_b in known
        if _shows(of_a, of_b)
    ]
    found = [
        None if apart is not None and apart.hides(part.name, part.place) else difference(of_a, of_b)
        for part, of_a, of_b in typical
    ]
    marks = iter(holm([tests.p for tests in found if tests is not None]))
    changes = [
        PartChange(
            part.name, dict(part.place), of_a.ns, of_b.ns, of_b.ns - of_a.ns, None if tests is None else next(marks)
        )
        for (part, of_a, of_b), tests in zip(typical, found, strict=True)
    ]
    return tuple(sorted(changes, key=lambda part: (-abs(part.change_ns), part.name, str(part.where))))


def _typical_of_part(
    name: str, a: tuple[ComparedRun, Int64], b: tuple[ComparedRun, Int64], is_undisturbed: bool
) -> tuple[Typical, Typical]:
    (run_a, of_a), (run_b, of_b) = a, b
    if is_undisturbed and name == COMPUTE:
        least_a, least_b = least_disturbed(of_a), least_disturbed(of_b)
        if least_a is not None and least_b is not None:
            return least_a, least_b
    return run_a.typical(of_a), run_b.typical(of_b)


def _shows(a: Int64, b: Int64) -> bool:
    """Return whether a part is known in both runs and is not 0 in all steps of both."""
    return bool(len(a) and len(b) and (a.any() or b.any()))


def _known(series: Series) -> Int64:
    """The steps in which a figure is known, ns."""
    known: Int64 = np.rint(series[~np.isnan(series)]).astype(np.int64)
    return known


def _too_few(a: ComparedRun, b: ComparedRun) -> Iterator[str]:
    few = [
        f"{name} has {counted(run.figures.num_steps, 'whole step')}"
        for name, run in (("A", a), ("B", b))
        if run.figures.num_steps < FEWEST_STEPS
    ]
    if few:
        yield (
            f"not enough evidence: {' and '.join(few)}, and from {FEWEST_STEPS} on it shows how much steps vary; record more, as "
            "with pptrace run --steps 2:52"
        )


def _busy_machines(a: ComparedRun, b: ComparedRun, measured: tuple[float, float] | None) -> Iterator[str]:
    """A line about waits for cores; ``measured`` are the typical steps, ms, where undisturbed ones are compared."""
    waits = [(name, run.core_wait) for name, run in (("A", a), ("B", b)) if run.is_disturbed]
    if not waits:
        return
    listed_waits = listed(f"{name} for {wait:.1%}" for name, wait in waits)
    allowed = f"so {CORE_WAIT:.0%} of it is allowed for"
    if measured is not None:
        allowed = (
            "so the step and what it computes are compared as they were where nothing disturbed them, each op and message as in "
            f"the least disturbed steps; typical ones took {milliseconds(measured[0] * 1e6)} ms in A and "
            f"{milliseconds(measured[1] * 1e6)} ms in B"
        )
    yield (
        f"ranks waited for a core ({listed_waits} of the time), because of other work on the machine or more threads than "
        f"cores: that differs from run to run, {allowed}; use a quiet machine"
    )


def _other_ranks(a: ComparedRun, b: ComparedRun) -> Iterator[str]:
    if a.num_ranks != b.num_ranks:
        yield (
            f"A has {counted(a.num_ranks, 'rank')} and B {b.num_ranks}: parts are means over the ranks of each run, or of a stage"
        )


def _not_compared(a: ComparedRun, b: ComparedRun) -> Iterator[str]:
    """Parts that one run alone tells."""
    lacking: dict[str, list[str]] = {}
    for name, run in unmatched_names(a.figures, b.figures):
        lacking.setdefault(name, []).append(run)
    for name, runs in lacking.items():
        what = "not all of it was recorded" if name == EXPOSED else "it is not known"
        yield f"{name} is not compared where one run alone has it: {what} in {' and '.join(runs)}"


def _of_runs(a: ComparedRun, b: ComparedRun) -> Iterator[str]:
    """The lines about each run; those about both once."""
    for line in dict.fromkeys((*a.warnings, *b.warnings)):
        names = [name for name, run in (("A", a), ("B", b)) if line in run.warnings]
        yield f"{' and '.join(names)}: {line}"


def _detail(verdict: ChangeVerdict, span: SpanChange, parts: Sequence[PartChange]) -> str:
    """The verdict in a sentence."""
    step = "an undisturbed step" if span.is_undisturbed else "a typical step"
    lengths = f"{step} takes {milliseconds(span.a_ns)} ms in A and {milliseconds(span.b_ns)} ms in B"
    if span.change is not None:
        interval = (
            "" if span.low is None or span.high is None else f", 95 % interval {span.low:+.2%} to {span.high:+.2%}"
        )
        lengths += f" ({span.change:+.2%}{interval})"
    if span.low is None or span.high is None:
        return f"Too few steps to tell a difference: {lengths}"
    if verdict is ChangeVerdict.NO_DIFFERENCE:
        return f"No difference found: {lengths}"
    along = (part for part in parts if part.significant and part.change_ns * (span.b_ns - span.a_ns) > 0)
    largest = next((part for part in along if part.name != CAUSE), None)
    most = (
        ""
        if largest is None
        else f"; of its parts {part_label(largest)} changed most, {signed_milliseconds(largest.change_ns)} ms"
    )
    return f"B is {verdict}: {lengths}{most}"


def part_label(part: PartChange) -> str:
    """A part and its place in words: "compute B, stage 2"."""
    return f"{part.name} {place_label(part.where)}".strip()


def place_label(where: Mapping[str, int | str]) -> str:
    """A place in words: "B, stage 2"."""
    return ", ".join(
        str(value).replace("_", "-") if name in _PLAIN else f"{name} {value}" for name, value in where.items()
    )


_PLAIN = ("kind", "cause", "reason", "phase")
"""Coordinates whose values say by themselves what they are."""
