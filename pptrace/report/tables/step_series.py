"""The table of outliers and changes of level: what a step has more of than the usual one of its time."""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.analysis.result import StepReport
from pptrace.analysis.step_parts import Cause
from pptrace.analysis.steps.step_series import FEWEST_OF_LEVEL
from pptrace.analysis.whole_run import StepSeries
from pptrace.model import units
from pptrace.model.report_table import ReportTable

NO_LENGTH = (
    "No step's length is known: nothing relates the clocks of the ranks, or the devices' work was not recorded; the warnings of "
    "the report say which."
)
_MOST_DIFFERENCES = 4


def step_line(step: StepReport, series: StepSeries | None) -> str:
    """The length of a step against the others, in a sentence."""
    length = step.span_ns if series is not None and series.measure == "span" else step.length_ns
    if length is None:
        return NO_LENGTH
    line = f"{units.milliseconds(length)} ms"
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
        f"step {outlier.step}: most of its bubble is charged to {op.kind} of microbatch {op.microbatch} on rank {op.rank}, stage "
        f"{op.stage}: {units.milliseconds(op.ns)} ms"
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
