"""The tables of a report, made once: the terminal, the HTML page and the dashboard each render all of them in one way.

A table is either whole or brief. A brief one has at most :data:`MAX_ROWS` rows whatever the size of the run: steps become a
distribution with its outliers, ranks are grouped by stage with the extremes named, communication is summed by axis and
kind. Means are over what is known.
"""

from __future__ import annotations

from pptrace.analysis.questions import tables_of_answers
from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport
from pptrace.model.report_table import Amount, ReportTable
from pptrace.report.tables.communication import comm_totals_table, comms_table, device_table, host_window_table
from pptrace.report.tables.ranks import bounds_table, device_host_table, host_table, phases_table, ranks_table
from pptrace.report.tables.step_series import steps_table
from pptrace.report.tables.waterfall import blame_table, waterfall_table


def tables_of(report: Report, step: StepReport | None, amount: Amount) -> list[ReportTable]:
    """All tables of a report in reading order; ``step`` is the one to show in full, None where there is none."""
    of_run = tables_of_run(report, step, amount)
    if step is None:
        return of_run
    again = None if report.recompute is None else report.recompute.mean_of_ranks(step.step)
    of_step = tables_of_step(step, amount, of_several=len(report.steps) > 1, recompute_ns=again)
    return [steps_table(report, step, amount), *of_step, *of_run]


def tables_of_run(report: Report, step: StepReport | None, amount: Amount) -> list[ReportTable]:
    """The tables that are not of one step, in reading order; ``step`` is the one whose tables come before them, if any."""
    tables = []
    if step is None:
        if any(entry.on_host is not None for entry in report.device):
            tables.append(host_window_table(report, amount))
        if any(entry.comms for entry in report.device):
            tables.append(comm_totals_table(report, amount))
    tables += tables_of_answers(report, amount)
    if any(entry.breakdown.busy_ns is not None for entry in report.device):
        tables.append(device_table(report, amount))
    is_shown = step is not None and any(rank.host is not None for rank in step.ranks)
    if any(entry.host is not None for entry in report.device) and (amount is Amount.WHOLE or not is_shown):
        tables.append(device_host_table(report, amount))
    return tables


def tables_of_step(
    step: StepReport, amount: Amount, of_several: bool = False, recompute_ns: int | None = None
) -> list[ReportTable]:
    """The tables of one step in reading order; ``recompute_ns`` is the recompute of a rank in it, in the mean."""
    tables = [ranks_table(step, amount, of_several)]
    if any(rank.bubble_ns is None and rank.not_compute_ns is not None for rank in step.ranks):
        tables.append(bounds_table(step, amount))
    if any(rank.phases for rank in step.ranks):
        tables.append(phases_table(step, amount))
    if step.span_parts is not None:
        tables.append(waterfall_table(step, amount, recompute_ns))
    if any(rank.host is not None for rank in step.ranks):
        tables.append(host_table(step, amount))
    if step.blame is not None and step.blame.total_ns > 0:
        tables.append(blame_table(step, amount))
    if any(rank.comms for rank in step.ranks):
        tables.append(comms_table(step, amount))
    return tables


def warning_lines(report: Report) -> list[str]:
    """The warnings of a report: those of the run that no root cause states already, then those of its files."""
    stated = tuple(root.title for root in report.root_causes)
    lines = [line for line in report.warnings if not line.startswith(stated)]
    for info in report.inputs:
        lines += [line if info.path in line else f"{info.path}: {line}" for line in info.warnings]
    return lines


def unknown_line(report: Report) -> str:
    """The kinds of findings that the run has too little evidence for, in one line; "" where there are none."""
    reasons = "; ".join(kinds.reason for kinds in report.missing_evidence)
    return f"not enough evidence: {reasons}" if reasons else ""
