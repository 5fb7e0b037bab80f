"""The table of outliers and changes of level: what a step has more of than the usual one of its time.

Steps as rows, or as a distribution with its outliers.
"""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport, alike_steps
from pptrace.analysis.steps.step_series import FEWEST_OF_LEVEL
from pptrace.analysis.whole_run import Cause, StepChange, StepSeries
from pptrace.model import units
from pptrace.model.report_table import MAX_ROWS, Amount, ReportTable, mean

NO_LENGTH = (
    "No step's length is known: nothing relates the clocks of the ranks, or the devices' work was not recorded; the warnings of "
    "the report say which."
)
_MOST_DIFFERENCES = 4


def step_line(step: StepReport, series: StepSeries | None) -> str:
    """The length of a step against the others, in a sentence."""
    length, what = length_of(step, series)
    if length is None:
        return NO_LENGTH
    line = f"{what.capitalize()}{units.milliseconds(length)} ms"
    if series is None or not series.median_ns:
        return line
    if step.step in series.evaluations:
        return f"{line}; forwards alone: an evaluation, which trains nothing"
    outlier = next((one for one in series.outliers if one.step == step.step), None)
    if outlier is not None:
        excess = units.milliseconds(outlier.excess_ns)
        return f"{line}: an outlier, {excess} ms more than step {outlier.usual_step}, the usual one of its time"
    change = next((one for one in series.changes if one.step == step.step), None)
    if change is not None:
        after, before = units.milliseconds(change.after_ns), units.milliseconds(change.before_ns)
        return f"{line}: the first step of a new level, {after} ms after {before}"
    if series.num_steps == 1:
        return f"{line}; the only step"
    beyond = length / series.median_ns - 1
    share = units.percent(abs(beyond))
    distance = "" if share == units.percent(0) else f"{share} {'above' if beyond > 0 else 'below'} "
    line = f"{line}, {distance}the median"
    return line if series.num_steps < FEWEST_OF_LEVEL else f"{line}; no outlier"


def length_of(step: StepReport, series: StepSeries | None) -> tuple[int | None, str]:
    """Length by which steps are compared, ns, and its name where it is not the whole one, as that of a step is not known."""
    if series is None or series.measure != "span":
        return step.length_ns, ""
    return step.span_ns, "pipeline span " if step.has_pipeline else ""


def differences_table(series: StepSeries, step: int | None = None) -> ReportTable:
    """A row for each of the largest differences of every outlier, the longest first, and of every change; of one ``step`` all."""
    most = _MOST_DIFFERENCES if step is None else None
    rows: list[tuple[str, ...]] = []
    for outlier in series.outliers:
        if step in (None, outlier.step):
            head = ("outlier", str(outlier.step), f"step {outlier.usual_step}")
            rows += _rows(head, (outlier.span_ns, outlier.usual_ns), outlier.differences, most)
    for change in series.changes:
        if step in (None, change.step):
            head = ("new level", str(change.step), f"step {change.before_step}")
            rows += _rows(head, (change.after_ns, change.before_ns), change.differences, most)
    notes = [
        f"step {outlier.step}: most of the bubble that it has more is charged to {op.kind} of microbatch {op.microbatch} "
        f"on rank {op.rank}, stage {op.stage}: {units.milliseconds(op.ns)} ms"
        for outlier in series.outliers
        for op in outlier.ops[:1]
        if step in (None, outlier.step)
    ]
    columns = ("what", "step", "against", "difference", "ms", "usual ms", "more ms", "of the excess")
    title = "Outliers and changes of level" if step is None else f"What step {step} has more of"
    shown_notes = tuple(notes[:_MOST_DIFFERENCES])
    return ReportTable("step-differences", title, columns, tuple(rows), shown_notes, num_labels=4)


def _rows(
    head: tuple[str, str, str], lengths: tuple[int, int], differences: Sequence[Cause] | None, most: int | None
) -> list[tuple[str, ...]]:
    """Rows of the differences of a step that takes the first of ``lengths`` from one that takes the second, ns."""
    ns, usual_ns = lengths
    spans = (units.milliseconds(ns), units.milliseconds(usual_ns))
    if not differences:
        return [(*head, "not known" if differences is None else "–", *spans, "–", "–")]
    shown = [part for part in differences if part.ns][:most]
    rows = [
        (
            *head,
            ", ".join([part.cause, *(f"{kind} {name}" for kind, name in part.where.items())]),
            *spans,
            units.signed_milliseconds(part.ns),
            units.percent(part.ns / (ns - usual_ns) if ns != usual_ns else None),
        )
        for part in shown
    ]
    return [*rows[:1], *(("", "", "", row[3], "", "", *row[6:]) for row in rows[1:])]


def steps_table(report: Report, typical: StepReport, amount: Amount, mark: str = "shown below") -> ReportTable:
    """One row per step, ``typical`` with a ``mark``; brief, a distribution with its outliers."""
    steps: Sequence[StepReport] = report.steps
    notes = []
    labels = {typical.step: mark} if len(steps) > 1 else {}
    if amount is Amount.BRIEF and len(steps) > MAX_ROWS // 2:
        steps, labels = _distribution(steps, typical, report.step_series)
        series = report.step_series
        spread = "no length is known"
        if series is not None:
            times = (series.min_ns, series.max_ns, series.median_ns, series.p90_ns)
            shortest, longest, middle, p90 = map(units.milliseconds, times)
            outliers = units.counted(len(series.outliers), "outlier")
            spread = f"{shortest} to {longest} ms, median {middle}, nine in ten at most {p90}, {outliers}"
        notes.append(f"{len(report.steps)} steps: {spread}; --all lists them")
    elif report.step_series:
        labels = _outliers(report.step_series) | labels
    if report.step_series:
        notes += map(_change, report.step_series.changes)
    rows: list[tuple[str, ...]] = []
    if typical.has_pipeline:
        notes.append("bubble: its share of the span; ideal: the schedule's own, with F = I = W and free messages")
        for step in steps:
            shares = map(units.percent, (step.bubble.share, step.bubble.ideal_share))
            lengths = map(units.milliseconds, (step.period_ns, step.span_ns))
            rows.append((str(step.step), *lengths, *shares, labels.get(step.step, "")))
        names = ("step", "step ms", "span ms", "bubble", "ideal", "")
        return ReportTable("steps", "Steps", names, tuple(rows), tuple(notes), leave_out=(4,))
    notes.append(
        "step: from its start to the start of the next one; window: a rank's range of the step, the longest of the ranks', of "
        "which compute, exposed communication and rest are the parts"
    )
    for step in steps:
        parts = [
            (rank.compute_ns, rank.exposed_comm_ns, rank.bubble_ns, rank.spans.get("OPTIMIZER")) for rank in step.ranks
        ]
        means = map(mean, zip(*parts, strict=True)) if parts else [None] * 4
        cells = map(units.milliseconds, (step.period_ns, step.span_ns, *means))
        rows.append((str(step.step), *cells, labels.get(step.step, "")))
    columns = ("step", "step ms", "window ms", "compute ms", "exposed comm ms", "rest ms", "optimizer ms", "")
    return ReportTable("steps", "Steps, means over the ranks", columns, tuple(rows), tuple(notes), leave_out=(6, 5))


def _distribution(
    steps: Sequence[StepReport], typical: StepReport, series: StepSeries | None
) -> tuple[list[StepReport], dict[int, str]]:
    """The fastest, the typical and the slowest step and the outliers, in order, with a label for each by its number."""
    measured = alike_steps(steps) or list(steps)
    by_span = sorted(measured, key=lambda step: step.length_ns or 0)
    labels = _outliers(series) if series else {}
    labels = dict(list(labels.items())[: MAX_ROWS - 3])
    slowest = by_span[-1].step
    labels |= {by_span[0].step: "fastest", slowest: ", ".join(filter(None, ("slowest", labels.get(slowest, ""))))}
    labels[typical.step] = "typical, shown below"
    return [step for step in steps if step.step in labels], labels


def _outliers(series: StepSeries) -> dict[int, str]:
    """Texts of each outlier, by its number, the longest first."""
    return {outlier.step: f"outlier{_largest(outlier.differences)}" for outlier in series.outliers}


def _largest(differences: Sequence[Cause] | None) -> str:
    """The largest difference, with its place."""
    for part in (differences or ())[:1]:
        place = " ".join(f"{kind} {name}" for kind, name in part.where.items())
        return f": {part.cause}{f' ({place})' if place else ''} {part.ns / 1e6:+.2f} ms"
    return ""


def _change(change: StepChange) -> str:
    before, after = units.milliseconds(change.before_ns), units.milliseconds(change.after_ns)
    return (
        f"from step {change.step} on steps take {after} ms (step {change.after_step}), until then {before} ms "
        f"(step {change.before_step}){_largest(change.differences)}"
    )
