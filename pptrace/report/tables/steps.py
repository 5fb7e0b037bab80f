"""Steps as rows, or as a distribution with its outliers."""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport, alike_steps
from pptrace.analysis.step_parts import Cause
from pptrace.analysis.whole_run import StepChange, StepSeries
from pptrace.model import units
from pptrace.model.report_table import MAX_ROWS, Amount, ReportTable, mean


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
    for step in steps:
        parts = [
            (rank.compute_ns, rank.exposed_comm_ns, rank.bubble_ns, rank.spans.get("OPTIMIZER")) for rank in step.ranks
        ]
        means = map(mean, zip(*parts, strict=True)) if parts else [None] * 4
        cells = map(units.milliseconds, (step.span_ns, *means))
        rows.append((str(step.step), *cells, labels.get(step.step, "")))
    columns = ("step", "longest ms", "compute ms", "exposed comm ms", "rest ms", "optimizer ms", "")
    return ReportTable("steps", "Steps, means over the ranks", columns, tuple(rows), tuple(notes), leave_out=(5, 4))


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
