"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pptrace.analysis.result import Report, ScheduleSummary, Severity
from pptrace.hang_diagnosis.words import lines
from pptrace.model.schedule_info import PlanSource
from pptrace.report import units
from pptrace.report.tables import Amount, Bar, Cell, ReportTable, tables_of, warning_lines
from pptrace.schedule.plan import Plan
from pptrace.simulator import Simulation

_COLOURS = {"compute": "#3b7dd8", "exposed": "#e08a2e", "bubble": "grey50", "either of both": "grey50"}
_GLYPHS = {
    "compute": "█",
    "exposed": "▒",
    "bubble": "░",
    "either of both": "·",
}  # so that a bar can be read without colours
_BAR_WIDTH = 30
_SEVERITY = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.CRITICAL: "bold red"}
_SOURCES = {
    str(PlanSource.METADATA): "from metadata",
    str(PlanSource.RECOGNISED): "recognised by the order of ops",
    str(PlanSource.OPTION): "from --schedule",
}
_MOST_WARNINGS = 8
"""Of a brief report; the others are counted."""


def print_report(report: Report, console: Console, amount: Amount = Amount.BRIEF) -> None:
    """Print a report top-down: the verdict, what ran, the findings, then the tables and the warnings."""
    for part in _parts(report, amount):
        console.print(part)


def _parts(report: Report, amount: Amount) -> Iterable[RenderableType]:
    yield Text(report.verdict, style="bold")
    if report.hang is not None:
        yield Group(*(Padding(Text(line), (0, 0, 0, 2)) for line in lines(report.hang)))
    yield _header(report)
    yield _findings(report)
    for table in tables_of(report, report.typical_step, amount):
        yield _table(table)
    yield _warnings(report, amount)


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
    error = "unknown" if clock.uncertainty_ns is None else f"±{clock.uncertainty_ns / 1e3:.1f} µs"
    lines = [line, Text(f"clock: {clock.method} ({error})", style="dim")]
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


def _table(table: ReportTable) -> RenderableType:
    """Any table of a report; with the legend of its bars below."""
    drawn = Table(
        title=f"\n{table.title}",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
    )
    for index, column in enumerate(table.columns):
        number = index >= table.num_labels and bool(column.strip())
        drawn.add_column(
            column,
            justify="right" if number else "left",
            no_wrap=True,
            min_width=max(len(column), 8) if number else None,
        )
    for row in table.rows:
        drawn.add_row(*map(_cell, row))
    names = dict.fromkeys(name for row in table.rows for cell in row if isinstance(cell, Bar) for name, _ in cell.parts)
    below = [_legend(names)] if len(names) > 1 else []
    return Group(drawn, *below, *(Text(note, style="dim") for note in table.notes))


def _cell(cell: Cell) -> RenderableType:
    return _bar(cell) if isinstance(cell, Bar) else cell


def _legend(names: Iterable[str]) -> Text:
    return Text.assemble(*(part for name in names for part in ((f"{_GLYPHS[name]} ", _COLOURS[name]), f"{name}  ")))


def _bar(bar: Bar) -> Text:
    """Shares of a row as a bar; rounding errors carry over, so that equal sums have equal widths."""
    text = Text()
    drawn, total = 0, 0.0
    for name, share in bar.parts:
        total += share
        end = round(_BAR_WIDTH * total)
        text.append(_GLYPHS[name] * (end - drawn), style=_COLOURS[name])
        drawn = end
    return text


def _findings(report: Report) -> RenderableType:
    lines: list[RenderableType] = []
    for finding in report.findings:
        gain = "" if finding.gain_ns is None else f" ({units.milliseconds(finding.gain_ns)} ms a step)"
        lines.append(
            Text.assemble((f"{finding.severity}: ", _SEVERITY[finding.severity]), finding.title, (gain, "bold"))
        )
        lines.append(Padding(Text(finding.detail, style="dim"), (0, 0, 0, 2)))
    return Group(Text("\nFindings, means over all steps", style="bold"), *lines) if lines else Text()


def _warnings(report: Report, amount: Amount) -> RenderableType:
    every = warning_lines(report)
    shown = every if amount is Amount.WHOLE else every[:_MOST_WARNINGS]
    if not shown:
        return Text()
    more = [f"… {len(every) - len(shown)} more: --all shows them"] if len(every) > len(shown) else []
    texts = (Text(line, style="yellow") for line in [*(f"! {line}" for line in shown), *more])
    return Group(Text("\nWarnings", style="bold"), *texts)


def simulation_table(simulation: Simulation) -> RenderableType:
    """A simulated step, a row per rank."""
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
    return Group(head, _table(ReportTable("ranks", "Ranks", columns, rows)))


def plan_size(plan: Plan) -> str:
    """p, m and v of a plan as text."""
    ranks, chunks = units.counted(plan.pp, "rank"), units.counted(plan.num_chunks, "chunk")
    return f"{ranks}, {units.counted(plan.num_microbatches, 'microbatch', 'microbatches')}, {chunks} per rank"
