"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from pptrace.analysis.findings.root_causes import in_groups
from pptrace.analysis.findings.verdict import doubt_of_gain, verdict_lines
from pptrace.analysis.report import Report
from pptrace.analysis.result import Severity
from pptrace.hang_diagnosis.calls import lines
from pptrace.model import units
from pptrace.model.report_table import Amount, more
from pptrace.model.schedule_info import PlanSource
from pptrace.model.wording import as_ranges
from pptrace.report.recording import audit_line, recording_line
from pptrace.report.tables import tables_of, unknown_line, warning_lines
from pptrace.report.text_table import Stripped, render_table

if TYPE_CHECKING:
    from pptrace.analysis.compare.result import Comparison

_SEVERITY = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}
_SOURCES = {
    str(PlanSource.METADATA): "from metadata",
    str(PlanSource.RECOGNISED): "recognised by the order of ops",
    str(PlanSource.OPTION): "from --schedule",
}
_MOST_FINDINGS = 3
_MOST_WARNINGS = 8
"""Number of warnings of a brief report; the others are counted."""


def print_report(report: Report, console: Console, amount: Amount = Amount.BRIEF) -> None:
    """Print a report top-down: the verdict, what ran, the findings, then the tables and the warnings."""
    verdict = verdict_lines(report)
    parts: list[RenderableType] = [Text(verdict.made_of, style="bold")]
    parts += [Text.assemble(("Why: ", "bold"), verdict.cause)] if verdict.cause else []
    parts += [Text.assemble(("First: ", "bold"), verdict.first)] if verdict.first else []
    parts += [] if report.hang is None else [Padding(Text(line), (0, 0, 0, 2)) for line in lines(report.hang)]
    parts += [_header(report), _findings(report, amount)]
    parts += [render_table(table, console.width) for table in tables_of(report, report.typical_step, amount)]
    for part in (*parts, _warnings(warning_lines(report), amount)):
        console.print(Stripped(part))


def _header(report: Report) -> RenderableType:
    mesh, schedule = report.mesh, report.schedule
    sizes = {axis: size for axis, size in mesh.axes.items() if size is not None}
    axes = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "pp")
    ranks = units.counted(mesh.num_ranks, "rank")
    line = Text.assemble(("framework ", "dim"), f"{report.framework} · {ranks}", f" ({axes})" if axes else "")
    if schedule.num_microbatches is not None or schedule.candidates:
        line.append(f" · {schedule.title}", style="bold")
        if schedule.num_microbatches is not None:
            line.append(f", {units.counted(schedule.num_microbatches, 'microbatch', 'microbatches')}")
        if schedule.num_stages is not None:
            line.append(f", {units.counted(schedule.num_stages, 'stage')}")
        names = dict.fromkeys(candidate.name for candidate in schedule.candidates)
        line.append(f" ({_SOURCES.get(schedule.source) or ' or '.join(names) or schedule.source})")
    clock = report.clock
    error = "unknown" if clock.uncertainty_ns is None else units.uncertainty(clock.uncertainty_ns)
    lines = [line, Text(f"clock: {clock.method} ({error})", style="dim")]
    if line_of_recording := recording_line(report.recording):
        lines.append(Text(line_of_recording, style="dim"))
    if damage := audit_line(report.recording):
        lines.append(Text(damage, style="yellow"))
    lacking = ""
    if len(report.device) < mesh.num_ranks or any(info.warnings for info in report.inputs):
        lacking = "parts of the run are missing, damaged or left out"
    elif unknown := [step.step for step in report.steps if step.bubble.ratio is None and step.has_pipeline]:
        is_all = len(unknown) == sum(step.has_pipeline for step in report.steps)
        lacking = f"bubbles{'' if is_all else f' of step {as_ranges(unknown)}'} are not known"
    lines += [Text(f"{lacking}: see the warnings at the end", style="yellow")] if lacking else []
    return Group(*lines)


def _findings(report: Report, amount: Amount) -> RenderableType:
    shown = report.findings if amount is Amount.WHOLE else report.findings[:_MOST_FINDINGS]
    lines: list[RenderableType] = []
    for root, below in in_groups(report.root_causes, shown):
        if root is not None:
            lines.append(Text.assemble(("root cause: ", _SEVERITY[Severity.WARNING]), (root.title, "bold")))
            lines.append(Padding(Text(f"{root.detail}: {root.advice}", style="dim"), (0, 0, 0, 2)))
        for finding in below:
            most = "up to " if "gain_if_spread_ns" in finding.evidence else ""
            cost = "" if finding.gain_ns is None else f"{most}{units.milliseconds(finding.gain_ns)} ms a step"
            gain = f" ({' '.join(filter(None, (cost, doubt_of_gain(finding, report))))})" if cost else ""
            head = Text.assemble((f"{finding.severity}: ", _SEVERITY[finding.severity]), finding.title, (gain, "bold"))
            indent = 2 if root is not None else 0
            lines.append(Padding(head, (0, 0, 0, indent)))
            lines.append(Padding(Text(finding.detail, style="dim"), (0, 0, 0, indent + 2)))
    lines += [Text(note, style="dim") for note in more(len(report.findings) - len(shown))]
    if unknown := unknown_line(report):
        lines.append(Text(unknown, style="dim"))
    return Group(Text("\nFindings, gains as means over all steps", style="bold"), *lines) if lines else Group()


def _warnings(every: Sequence[str], amount: Amount) -> RenderableType:
    shown = every if amount is Amount.WHOLE else every[:_MOST_WARNINGS]
    if not shown:
        return Group()
    texts = [Text(line, style="yellow") for line in [*(f"! {line}" for line in shown), *more(len(every) - len(shown))]]
    return Group(Text("\nWarnings", style="bold"), *texts)


def print_comparison(comparison: Comparison, console: Console, amount: Amount = Amount.BRIEF) -> None:
    """Print a comparison: the verdict, the step, its parts, the facts that differ, the warnings."""
    from pptrace.report.tables.comparison import comparison_tables

    console.print(Stripped(Text(comparison.detail, style="bold")))
    for table in comparison_tables(comparison, amount):
        console.print(Stripped(render_table(table, console.width)))
    console.print(Stripped(_warnings(comparison.warnings, amount)))
