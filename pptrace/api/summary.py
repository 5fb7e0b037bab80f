"""Summaries in a notebook of a run, a simulated step, the catalogue or a hang: a few figures and a table, without a script.

Colours are the notebook's own, so that light and dark themes both work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pptrace.analysis.findings.verdict import verdict_lines
from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding, StepReport
from pptrace.model import units
from pptrace.report.step_tiles import step_tiles
from pptrace.simulator import Simulation

_MOST_STEPS = 12
_MOST_FINDINGS = 3
_MOST_RANKS = 16
_CELL = "padding:2px 10px 2px 0;text-align:right;border:none"
_MUTED = "opacity:0.7"


def run_line(report: Report) -> str:
    """Describe in a line the run of a report: framework, ranks, schedule, steps."""
    has_pipeline = any(step.has_pipeline for step in report.steps)
    parts = [report.framework, units.counted(report.mesh.num_ranks, "rank")]
    parts += [report.schedule.title] if has_pipeline else []
    return ", ".join([*parts, _steps_text([step.step for step in report.steps])])


def _steps_text(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no steps"
    if len(numbers) <= 3:
        *most, last = map(str, numbers)
        return f"step{'s' if most else ''} {' and '.join([', '.join(most), last]) if most else last}"
    return f"{len(numbers)} steps, {numbers[0]} to {numbers[-1]}"


def run_summary(report: Report) -> str:
    """A run as HTML: the verdict, the tiles of the typical step, what would gain most, and the steps."""
    verdict = verdict_lines(report)
    lines = [
        ("", f"<b>{escape(verdict.made_of)}</b>"),
        ("Why: ", escape(verdict.cause)),
        ("First: ", escape(verdict.first)),
    ]
    parts = [*(_paragraph(f"{head}{text}") for head, text in lines if text), _note(run_line(report))]
    typical = report.typical_step
    if typical is not None:
        parts += [_tiles(typical, report), _findings(report.findings), _steps(report.steps, typical)]
    if num_warnings := len(report.warnings) + sum(len(info.warnings) for info in report.inputs):
        parts.append(_note(f"{units.counted(num_warnings, 'warning')}: report.warnings and report.inputs[…].warnings"))
    return f"<div>{''.join(parts)}</div>"


def _tiles(step: StepReport, report: Report) -> str:
    title = f"Step {step.step}" + (f", the median by span of {len(report.steps)}" if len(report.steps) > 1 else "")
    boxes = "".join(
        f'<div style="margin-right:28px" title="{escape(tile.meaning)}"><div style="{_MUTED}">{escape(tile.label)}</div>'
        f'<div style="font-size:1.4em;font-weight:600">{escape(tile.value)}</div>'
        f'<div style="{_MUTED}">{escape(tile.detail)}</div></div>'
        for tile in step_tiles(step, report)
        if not tile.value.startswith("–")
    )
    return f'{_note(title)}<div style="display:flex;flex-wrap:wrap;margin:4px 0 10px">{boxes}</div>'


def _findings(findings: Sequence[Finding]) -> str:
    items = "".join(
        f"<li>{escape(finding.title)}"
        + ("" if finding.gain_ns is None else f" <b>{units.milliseconds(finding.gain_ns)} ms a step</b>")
        + "</li>"
        for finding in sorted(findings, key=lambda finding: -(finding.gain_ns or 0))[:_MOST_FINDINGS]
    )
    left = len(findings) - _MOST_FINDINGS
    more = _note(f"{left} more in report.findings") if left > 0 else ""
    return (
        f"{_note('Findings, gains as means over all steps')}<ul style='margin:2px 0 8px'>{items}</ul>{more}"
        if items
        else ""
    )


def _steps(steps: Sequence[StepReport], typical: StepReport) -> str:
    columns = ["step", "step ms", "span ms"]
    has_pipeline = any(step.has_pipeline for step in steps)
    columns += ["bubble", "ideal"] if has_pipeline else []
    rows = []
    for step in steps[:_MOST_STEPS]:
        bubble = step.bubble
        cells = [f"<b>{step.step}</b>" if step is typical else str(step.step)]
        cells += [units.milliseconds(step.period_ns), units.milliseconds(step.span_ns)]
        if has_pipeline:
            cells += [units.percent(bubble.share), units.percent(bubble.ideal_share)]
        rows.append(cells)
    left = len(steps) - _MOST_STEPS
    return _table(columns, rows) + (_note(f"{left} more in report.steps") if left > 0 else "")


def simulation_summary(simulation: Simulation) -> str:
    """A simulated step as HTML: its size, its bubble, and its ranks."""
    plan = simulation.plan
    size = f"{units.counted(plan.pp, 'rank')}, {units.counted(plan.num_microbatches, 'microbatch', 'microbatches')}"
    head = (
        f"<b>{escape(plan.name)}</b> simulated, {size}: {units.milliseconds(simulation.makespan_ns)} ms, bubble ratio "
        f"<b>{units.ratio(simulation.bubble_ratio)}</b>, share {units.percent(simulation.bubble_share)}"
    )
    rows = [
        [
            str(rank.rank),
            units.milliseconds(rank.compute_ns),
            units.milliseconds(rank.bubble_ns),
            str(rank.peak_inflight_microbatches),
        ]
        for rank in simulation.ranks[:_MOST_RANKS]
    ]
    left = len(simulation.ranks) - _MOST_RANKS
    more = _note(f"{left} more in .ranks") if left > 0 else ""
    return f"<div>{_paragraph(head)}{_table(['rank', 'compute ms', 'bubble ms', 'peak in flight'], rows)}{more}</div>"


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts as HTML, its cells to the left."""
    return _table(columns, [[escape(cell) for cell in row] for row in rows]).replace(
        "text-align:right", "text-align:left"
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """``rows`` are HTML already."""
    head = "".join(f'<th style="{_CELL}">{escape(column)}</th>' for column in columns)
    lines = ["".join(f'<td style="{_CELL}">{cell}</td>' for cell in row) for row in rows]
    body = "".join(f"<tr>{cells}</tr>" for cells in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _paragraph(html: str) -> str:
    return f'<p style="margin:4px 0">{html}</p>'


def _note(text: str) -> str:
    return f'<div style="{_MUTED}">{escape(text)}</div>'
