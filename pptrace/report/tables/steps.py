"""Steps as rows, or as a distribution with its outliers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from pptrace.analysis.result import Report, StepReport
from pptrace.report import units
from pptrace.report.tables.table import MAX_ROWS, Amount, ReportTable, mean

_OUTLIER = 3.0
"""A step longer than the median by this many scaled median deviations, and by a tenth, is an outlier."""


def steps_table(report: Report, typical: StepReport, amount: Amount) -> ReportTable:
    """One row per step; brief, a distribution with its outliers."""
    steps: Sequence[StepReport] = report.steps
    notes = []
    labels = {id(typical): "shown below"} if len(steps) > 1 else {}
    if amount is Amount.BRIEF and len(steps) > MAX_ROWS // 2:
        steps, labels = _distribution(steps, typical)
        notes.append(f"{len(report.steps)} steps: {_spread(report.steps)}; --all lists them")
    if typical.has_pipeline:
        notes.append("ratio = bubble / compute, share = bubble / step; ideal: F = I = W, free messages")
        columns = ("step", "span ms", "bubble ratio", "ideal", "bubble share", "ideal ", "")
        rows = [(*_pipeline_step(step), labels.get(id(step), "")) for step in steps]
        return ReportTable("steps", "Steps", columns, tuple(rows), tuple(notes), leave_out=(5, 3, 2))
    columns = ("step", "longest ms", "compute ms", "exposed comm ms", "rest ms", "optimizer ms", "")
    rows = [(*_plain_step(step), labels.get(id(step), "")) for step in steps]
    return ReportTable("steps", "Steps, means over the ranks", columns, tuple(rows), tuple(notes), leave_out=(5, 4))


def _pipeline_step(step: StepReport) -> tuple[str, ...]:
    bubble = step.bubble
    return (
        str(step.step),
        units.milliseconds(step.span_ns),
        units.ratio(bubble.ratio),
        units.ratio(bubble.ideal_ratio),
        units.percent(bubble.share),
        units.percent(bubble.ideal_share),
    )


def _plain_step(step: StepReport) -> tuple[str, ...]:
    means = (
        mean(rank.compute_ns for rank in step.ranks),
        mean(rank.exposed_comm_ns for rank in step.ranks),
        mean(rank.bubble_ns for rank in step.ranks),
        mean(rank.spans.get("OPTIMIZER") for rank in step.ranks),
    )
    return (str(step.step), units.milliseconds(step.span_ns), *map(units.milliseconds, means))


def _distribution(steps: Sequence[StepReport], typical: StepReport) -> tuple[list[StepReport], dict[int, str]]:
    """The fastest, the typical and the slowest step and the outliers, in order, with a label for each."""
    measured = [step for step in steps if step.span_ns is not None] or list(steps)
    by_span = sorted(measured, key=lambda step: step.span_ns or 0)
    labels = {id(step): "outlier" for step in outliers(measured)[: MAX_ROWS - 3]}
    labels |= {id(by_span[0]): "fastest", id(by_span[-1]): f"slowest{', outlier' if id(by_span[-1]) in labels else ''}"}
    labels[id(typical)] = "typical, shown below"
    return [step for step in steps if id(step) in labels], labels


def outliers(steps: Sequence[StepReport]) -> list[StepReport]:
    """Steps far above the median span, longest first."""
    spans = [step.span_ns or 0 for step in steps]
    middle = median(spans)
    limit = middle + max(_OUTLIER * 1.4826 * median(abs(span - middle) for span in spans), middle / 10)
    return sorted((step for step in steps if (step.span_ns or 0) > limit), key=lambda step: -(step.span_ns or 0))


def _spread(steps: Sequence[StepReport]) -> str:
    spans = sorted(step.span_ns for step in steps if step.span_ns is not None)
    if not spans:
        return "no span is known"
    p90 = spans[min(len(spans) - 1, round(0.9 * (len(spans) - 1)))]
    far = len(outliers([step for step in steps if step.span_ns is not None]))
    return (
        f"span {units.milliseconds(spans[0])} to {units.milliseconds(spans[-1])} ms, median "
        f"{units.milliseconds(round(median(spans)))}, nine in ten at most {units.milliseconds(p90)}, "
        f"{units.counted(far, 'outlier')}"
    )
