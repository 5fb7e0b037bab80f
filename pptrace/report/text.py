"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from pptrace.analysis.findings.root_causes import in_groups
from pptrace.analysis.findings.verdict import verdict_lines
from pptrace.analysis.result import Report, ScheduleSummary, Severity
from pptrace.hang_diagnosis.words import lines
from pptrace.model import units
from pptrace.model.report_table import MORE
from pptrace.model.schedule_info import PlanSource
from pptrace.report.idle import idle_table
from pptrace.report.recording.audit import audit_line
from pptrace.report.recording.line import recording_line
from pptrace.report.tables import Amount, Bar, ReportTable, tables_of, unknown_line, warning_lines
from pptrace.report.text_table import Stripped, render_table
from pptrace.schedule.plan import Plan
from pptrace.simulator import Simulation

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
    for part in _parts(report, amount, console.width):
        console.print(Stripped(part))


def _parts(report: Report, amount: Amount, width: int) -> Iterable[RenderableType]:
    yield from _verdict(report)
    if report.hang is not None:
        yield Group(*(Padding(Text(line), (0, 0, 0, 2)) for line in lines(report.hang)))
    yield _header(report)
    yield _findings(report, amount)
    for table in tables_of(report, report.typical_step, amount):
        yield render_table(table, width)
    yield _warnings(report, amount)


def _verdict(report: Report) -> Iterable[RenderableType]:
    verdict = verdict_lines(report)
    yield Text(verdict.made_of, style="bold")
    if verdict.cause:
        yield Text.assemble(("Why: ", "bold"), verdict.cause)
    if verdict.first:
        yield Text.assemble(("First: ", "bold"), verdict.first)


def _header(report: Report) -> RenderableType:
    mesh, schedule = report.mesh, report.schedule
    sizes = {axis: size for axis, size in mesh.axes.items() if size is not None}
    axes = " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "pp")
    ranks = units.counted(mesh.num_ranks, "rank")
    line = Text.assemble(("framework ", "dim"), f"{report.framework} · {ranks}", f" ({axes})" if axes else "")
    if schedule.num_microbatches is not None or schedule.candidates:
        line.append(f" · {schedule.name}", style="bold")
        line.append(_sizes(schedule))
    clock = report.clock
    error = "unknown" if clock.uncertainty_ns is None else units.uncertainty(clock.uncertainty_ns)
    lines = [line, Text(f"clock: {clock.method} ({error})", style="dim")]
    if line_of_recording := recording_line(report.recording):
        lines.append(Text(line_of_recording, style="dim"))
    if damage := audit_line(report.recording):
        lines.append(Text(damage, style="yellow"))
    if lacking := _lacking(report):
        lines.append(Text(f"{lacking}: see the warnings at the end", style="yellow"))
    return Group(*lines)


def _sizes(schedule: ScheduleSummary) -> str:
    """A schedule's known sizes and its source; its candidates where it is not certain."""
    sizes = ""
    if schedule.num_microbatches is not None:
        sizes += f", {units.counted(schedule.num_microbatches, 'microbatch', 'microbatches')}"
    if schedule.num_stages is not None:
        sizes += f", {units.counted(schedule.num_stages, 'stage')}"
    if schedule.source in _SOURCES:
        return f"{sizes} ({_SOURCES[schedule.source]})"
    names = dict.fromkeys(candidate.name for candidate in schedule.candidates)
    return f"{sizes} ({' or '.join(names)})" if names else f"{sizes} ({schedule.source})"


def _lacking(report: Report) -> str:
    """One line on what restricts the figures; "" where nothing does."""
    if len(report.device) < report.mesh.num_ranks or any(info.warnings for info in report.inputs):
        return "parts of the run are missing or damaged"
    if any(step.bubble.ratio is None and step.has_pipeline for step in report.steps):
        return "bubbles are not known"
    return ""


def _findings(report: Report, amount: Amount) -> RenderableType:
    shown = report.findings if amount is Amount.WHOLE else report.findings[:_MOST_FINDINGS]
    lines: list[RenderableType] = []
    for root, below in in_groups(report.root_causes, shown):
        if root is not None:
            lines.append(Text.assemble(("root cause: ", _SEVERITY[Severity.WARNING]), (root.title, "bold")))
            lines.append(Padding(Text(f"{root.detail}: {root.advice}", style="dim"), (0, 0, 0, 2)))
        for finding in below:
            most = "up to " if "gain_if_spread_ns" in finding.evidence else ""
            gain = "" if finding.gain_ns is None else f" ({most}{units.milliseconds(finding.gain_ns)} ms a step)"
            head = Text.assemble((f"{finding.severity}: ", _SEVERITY[finding.severity]), finding.title, (gain, "bold"))
            indent = 2 if root is not None else 0
            lines.append(Padding(head, (0, 0, 0, indent)))
            lines.append(Padding(Text(finding.detail, style="dim"), (0, 0, 0, indent + 2)))
    if left_out := len(report.findings) - len(shown):
        lines.append(Text(MORE.format(left_out), style="dim"))
    if unknown := unknown_line(report):
        lines.append(Text(unknown, style="dim"))
    return Group(Text("\nFindings, gains as means over all steps", style="bold"), *lines) if lines else Group()


def _warnings(report: Report, amount: Amount) -> RenderableType:
    return _warning_lines(warning_lines(report), amount)


def _warning_lines(every: Sequence[str], amount: Amount) -> RenderableType:
    shown = every if amount is Amount.WHOLE else every[:_MOST_WARNINGS]
    if not shown:
        return Group()
    more = [MORE.format(len(every) - len(shown))] if len(every) > len(shown) else []
    texts = (Text(line, style="yellow") for line in [*(f"! {line}" for line in shown), *more])
    return Group(Text("\nWarnings", style="bold"), *texts)


def print_comparison(comparison: Comparison, console: Console, amount: Amount = Amount.BRIEF) -> None:
    """Print a comparison: the verdict, the step, its parts, the facts that differ, the warnings."""
    from pptrace.report.tables.comparison import comparison_tables

    console.print(Stripped(Text(comparison.detail, style="bold")))
    for table in comparison_tables(comparison, amount):
        console.print(Stripped(render_table(table, console.width)))
    console.print(Stripped(_warning_lines(comparison.warnings, amount)))


def simulation_table(simulation: Simulation, width: int) -> RenderableType:
    """A simulated step, a row per rank, in at most ``width`` columns of text."""
    plan = simulation.plan
    head = Text.assemble(
        (plan.name, "bold"),
        f": {plan_size(plan)} · "
        f"{units.milliseconds(simulation.makespan_ns)} ms · bubble ratio {units.ratio(simulation.bubble_ratio)}, "
        f"share {units.percent(simulation.bubble_share)}",
    )
    rows = tuple(
        (
            str(rank.rank),
            units.milliseconds(rank.compute_ns),
            units.milliseconds(rank.bubble_ns),
            units.percent(rank.bubble_ns / simulation.makespan_ns),
            str(rank.peak_inflight_microbatches),
            Bar(
                (
                    ("compute", rank.compute_ns / simulation.makespan_ns),
                    ("bubble", rank.bubble_ns / simulation.makespan_ns),
                )
            ),
        )
        for rank in simulation.ranks
    )
    columns = ("rank", "compute ms", "bubble ms", "bubble share", "peak in flight", "")
    tables = [ReportTable("ranks", "Ranks", columns, rows), idle_table(simulation, units.milliseconds, "ms")]
    return Stripped(Group(head, *(render_table(table, width) for table in tables if table is not None)))


def plan_size(plan: Plan) -> str:
    """p, m and v of a plan as text."""
    ranks, chunks = units.counted(plan.pp, "rank"), units.counted(plan.num_chunks, "chunk")
    return f"{ranks}, {units.counted(plan.num_microbatches, 'microbatch', 'microbatches')}, {chunks} per rank"
