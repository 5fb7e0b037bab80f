"""The table of a step's causes, each at each of its places."""

from __future__ import annotations

from pptrace.analysis.result import StepReport
from pptrace.report import units
from pptrace.report.tables.table import ReportTable
from pptrace.report.tables.waterfall import WATERFALL


def causes_table(step: StepReport) -> ReportTable:
    """A row for each cause and place, the largest first, with its share of the step; they sum to the span minus the ideal."""
    causes = sorted(step.causes or (), key=lambda cause: -cause.ns)
    rows = [
        (
            cause.cause,
            ", ".join(f"{kind} {name}" for kind, name in cause.where.items()),
            f"{cause.ns / 1e6:+,.2f}",
            units.percent(cause.ns / step.span_ns if step.span_ns else None),
            WATERFALL[cause.cause],
        )
        for cause in causes
    ]
    columns = ("cause", "where", "ms", "of the step", " ")
    return ReportTable("causes", "Causes and their places", columns, tuple(rows), num_labels=2)
