"""Single-file HTML: the report of a run, or the picture of a simulated schedule. Nothing is loaded from elsewhere.

Timelines hold their tiles, and are drawn by the scripts of the dashboard (:mod:`pptrace.report.tiles.scripts`).

Style sheet and scripts are written into each file. Colours are those of the timeline's style sheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from pptrace.analysis.compare.result import Comparison
from pptrace.analysis.findings.root_causes import in_groups
from pptrace.analysis.findings.verdict import doubt_of_gain, verdict_lines
from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding, StepReport
from pptrace.analysis.whatif.result import WhatIf
from pptrace.hang_diagnosis.calls import rank_text
from pptrace.model import units
from pptrace.model.report_table import Amount, Bar, ReportTable
from pptrace.recognise.infer.locate import UNLABELLED
from pptrace.report.colours import BUBBLE, COMMUNICATION, COMPUTE, EITHER
from pptrace.report.hang import EDGE_COLUMNS, edge_rows, wait_graph
from pptrace.report.recording import recording_line
from pptrace.report.simulation_text import idle_table
from pptrace.report.step_tiles import bar_of
from pptrace.report.sweep.table import best_lines, costs_line, refused_lines, sweep_headline, sweep_tables
from pptrace.report.tables import tables_of_run, tables_of_step, unknown_line, warning_lines
from pptrace.report.tables.comparison import comparison_tables
from pptrace.report.tables.step_series import steps_table
from pptrace.report.tiles.inline import InlineTimeline, inline_run, inline_simulation
from pptrace.report.tiles.scripts import script, style
from pptrace.report.whatif import headline, replay_line, whatif_tables
from pptrace.simulator import Simulation
from pptrace.simulator.sweep.run import Sweep
from pptrace.version import __version__
from pptrace.workflow.analyse import Analysis

STYLE = """
:root { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--ground); }
body { margin: 0; }
main { max-width: 1320px; margin: 0 auto; padding: 24px 20px 48px; }
a { color: var(--accent); }
h1 { font-size: 26px; margin: 0 0 12px; }
h1 small { font-weight: 400; font-size: 17px; color: var(--soft); }
h2 { font-size: 19px; margin: 32px 0 8px; }
h3 { font-size: 15px; margin: 20px 0 6px; }
.verdict { font-size: 17px; margin: 0 0 8px; }
.verdict-bar { display: flex; height: 18px; gap: 1px; margin: 0 0 8px; font-size: 12px; line-height: 18px; text-align: center; }
.verdict-bar span { min-width: 1px; overflow: hidden; white-space: nowrap; }
.note { color: var(--soft); font-size: 13px; margin: 4px 0; }
main > dl { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 0 0 20px; }
main > dl div { display: flex; flex-direction: column; }
main > dl dt { font-size: 12px; color: var(--soft); }
main > dl dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
details,
.timeline { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; margin: 0 0 12px; padding: 0 16px; }
.timeline { padding: 10px 12px; font-size: 14px; }
details[open] { padding-bottom: 16px; }
summary { cursor: pointer; padding: 12px 0; font-weight: 600; font-variant-numeric: tabular-nums; }
.figure { margin: 8px 0; background: #fff; color-scheme: light; }
.scroll { overflow-x: auto; }
.scroll table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.scroll th { font-size: 12px; font-weight: 500; color: var(--soft); }
.scroll th { text-align: right; padding: 4px 14px 4px 0; white-space: nowrap; }
.scroll td { text-align: right; padding: 3px 14px 3px 0; white-space: nowrap; border-top: 1px solid var(--line); }
.scroll .label { text-align: left; }
.bar { display: flex; width: 260px; height: 13px; }
.bar-key { display: inline-block; width: 12px; height: 12px; margin: 0 5px 0 12px; vertical-align: -1px; }
h3 + .scroll { margin-bottom: 4px; }
.hang { background: var(--panel); border: 1px solid var(--line); border-left: 4px solid var(--bad); border-radius: 8px; }
.hang { margin: 0 0 16px; padding: 0 16px 12px; }
.hang h2 { margin: 12px 0 4px; color: var(--bad); }
.hang p { margin: 4px 0; }
.waits { display: flex; flex-wrap: wrap; gap: 8px 40px; align-items: center; }
.waits td, .waits th { text-align: left; }
.waits svg { flex: 0 1 320px; min-width: 240px; }
ul { padding-left: 20px; }
li p { margin: 2px 0 8px; color: var(--soft); }
.info { color: var(--accent); }
.warning, .warnings li { color: var(--warning); }
.warnings li { overflow-wrap: anywhere; }
.critical { color: var(--bad); font-weight: 700; }
footer { margin-top: 40px; color: var(--soft); font-size: 12px; }
@media print {
  :root { font-size: 11px; }
  main { max-width: none; padding: 0; }
  .scroll { overflow: visible; }
  .note, .scroll th { font-size: 10px; }
  .scroll th, .scroll td { padding-right: 8px; }
  .scroll .label { white-space: normal; }
  .bar { width: 120px; }
}
"""

TO_STEPS = """
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-step]");
  if (link) document.querySelector(".timeline").timeline.goToStep(Number(link.dataset.step));
});
"""
"""Shows a step in the timeline when its link is followed."""

DRAWING = """
for (const plot of document.querySelectorAll(".plot")) {
  const figure = JSON.parse(plot.previousElementSibling.textContent);
  plot.textContent = "";
  Plotly.newPlot(plot, figure.data, figure.layout, { displaylogo: false, responsive: true });
}
"""
"""Draws the figures."""


_HEIGHT = 450
"""plotly's default, px."""
_NO_SCRIPTS = '<p class="note">Pictures are not drawn: this browser runs no scripts. Texts and tables need none.</p>'
_BAR_COLOURS = {"compute": COMPUTE, "exposed": COMMUNICATION, "bubble": BUBBLE, "either of both": EITHER}


def report_page(analysis: Analysis) -> str:
    """The report as a page, with a timeline of all steps; times are ms."""
    report = analysis.report
    numbers = {id(finding): number for number, finding in enumerate(report.findings)}
    items = []
    for root, below in in_groups(report.root_causes, report.findings):
        of_root = "".join(_finding(finding, numbers[id(finding)], report) for finding in below)
        if root is None:
            items.append(of_root)
        else:
            text = f"{root.detail}: {root.advice}"
            items.append(f"<li><b>Root cause: {escape(root.title)}</b><p>{escape(text)}</p><ul>{of_root}</ul></li>")
    unknown = f"<p>{escape(line)}</p>" if (line := unknown_line(report)) else ""
    parts = [
        _header(report),
        *([] if report.hang is None else [_hang(report.hang)]),
        f"<h2>Findings</h2><ul>{''.join(items)}</ul>{unknown}" if items or unknown else "",
    ]
    if (timeline := inline_run(analysis)) is not None:
        parts.append(f'<h2 id="timeline">Timeline</h2>{_timeline(timeline)}')
    typical = report.typical_step
    if typical is not None and len(report.steps) > 1:
        parts.append(_report_table(steps_table(report, typical, Amount.WHOLE)))
    parts += [_step(step, is_open=step is typical, is_drawn=timeline is not None) for step in report.steps]
    parts += map(_report_table, tables_of_run(report, typical, Amount.WHOLE))
    parts.append(_warnings(warning_lines(report)))
    return _page(f"pptrace · {_title(report)}", parts)


def simulation_page(simulation: Simulation) -> str:
    """A simulated step as a page: its numbers and its timeline."""
    plan = simulation.plan
    facts = (
        ("ranks", str(plan.pp)),
        ("microbatches", str(plan.num_microbatches)),
        ("chunks per rank", str(plan.num_chunks)),
        ("makespan", f"{units.milliseconds(simulation.makespan_ns)} ms"),
        ("bubble ratio", units.ratio(simulation.bubble_ratio)),
        ("bubble share", units.percent(simulation.bubble_share)),
    )
    rows = []
    for rank in simulation.ranks:
        times = map(units.milliseconds, (rank.compute_ns, rank.bubble_ns))
        rows.append((rank.rank, *times, rank.peak_inflight_microbatches))
    parts = [
        f"<h1>{escape(plan.name)} <small>simulated</small></h1>{_facts(facts)}",
        _timeline(inline_simulation(simulation)),
        _table(("rank", "compute ms", "bubble ms", "peak in flight"), rows),
    ]
    if (idle := idle_table(simulation, units.milliseconds, "ms")) is not None:
        parts.append(_report_table(idle))
    return _page(f"pptrace · {plan.name}", parts)


def sweep_page(sweep: Sweep) -> str:
    """A sweep as a page: the table of bubbles, heat maps over m, throughput against p and costs, and what was refused."""
    from pptrace.report.sweep.figures import (  # with plotly, which other pages do without
        MOST_HEAT_MAPS,
        curves,
        heat_maps,
    )

    parts = [f"<h1>Schedules compared <small>simulated</small></h1><p>{escape(costs_line(sweep))}</p>"]
    parts += [f"<p>{escape(line)}</p>" for line in (sweep_headline(sweep), *best_lines(sweep))]
    maps = heat_maps(sweep)
    parts += [f"<h3>Bubble ratio, {escape(title)}</h3>{_figure(figure)}" for title, figure in maps]
    if len(maps) == MOST_HEAT_MAPS:
        parts.append(f'<p class="note">the first {MOST_HEAT_MAPS} heat maps; the CSV has every combination</p>')
    parts += [f"<h3>{escape(title)}</h3>{_figure(figure)}" for title, figure in curves(sweep)]
    parts += [_report_table(table) for table in sweep_tables(sweep, every_row=True)]
    parts.append(_warnings(refused_lines(sweep)))
    return _page("pptrace · schedules compared", parts)


def whatif_page(result: WhatIf, pictures: Sequence[tuple[str, Simulation]]) -> str:
    """Predictions as a page: the table, and replays of the typical step on one scale, each with its title; times are ms."""
    parts = [
        f'<h1>What would get it back <small>predicted from the run</small></h1><p class="verdict">{escape(headline(result))}</p>',
        f"<p>{escape(replay_line(result))}</p>",
        *(_report_table(table) for table in whatif_tables(result)),
    ]
    extent = max((simulation.makespan_ns for _, simulation in pictures), default=0)
    for title, simulation in pictures:
        timeline = inline_simulation(simulation, extent, name=title)
        parts.append(f"<h3>{escape(title[:1].upper() + title[1:])}</h3>{_timeline(timeline, extent)}")
    parts.append(_warnings(result.warnings))
    return _page("pptrace · what would get it back", parts)


def timeline_page(title: str, timeline: InlineTimeline, extent_ns: int = 0) -> str:
    """A timeline alone as a page; with ``extent_ns``, it begins with so much of time."""
    return _page(f"pptrace · {title}", [_timeline(timeline, extent_ns)])


def comparison_page(comparison: Comparison) -> str:
    """Comparison of two runs as a page; times are ms."""
    parts = [f'<h1>Comparison <small>B against A</small></h1><p class="verdict">{escape(comparison.detail)}</p>']
    parts += [_report_table(table) for table in comparison_tables(comparison, Amount.WHOLE)]
    parts.append(_warnings(comparison.warnings))
    return _page("pptrace · comparison, B against A", parts)


def _timeline(timeline: InlineTimeline, extent_ns: int = 0) -> str:
    """A timeline, which begins with its first step, or with ``extent_ns`` of time, so that two pictures can be compared."""
    margin = extent_ns // 64
    view = f' data-view="step=0&amp;from={-margin}&amp;to={extent_ns + margin}"' if extent_ns else ""
    note = f'<p class="note">{escape(timeline.lacks)}</p>' if timeline.lacks else ""
    return f'<div class="timeline"{view} data-tiles="{escape(timeline.data)}"></div>{note}'


def _figure(figure: Any) -> str:
    """A figure of plotly as data, which the page draws (:data:`pptrace.report.html.DRAWING`)."""
    data = figure.to_json().replace("<", "\\u003c")  # no text in it may end the script
    height = figure.layout.height or _HEIGHT
    return (
        f'<div class="figure"><script type="application/json">{data}</script>'
        f'<div class="plot" style="height:{height}px"></div></div>'
    )


def _header(report: Report) -> str:
    """The title, the verdict below a bar of what the step is made of, and the facts about the run."""
    mesh, schedule, clock = report.mesh, report.schedule, report.clock
    facts = [("framework", report.framework), ("ranks", str(mesh.num_ranks))]
    facts += [(axis, str(size)) for axis, size in mesh.axes.items() if size is not None and (size > 1 or axis == "pp")]
    if schedule.num_microbatches is not None:
        facts += [("microbatches", str(schedule.num_microbatches)), ("stages", str(schedule.num_stages))]
    error = "unknown" if clock.uncertainty_ns is None else units.uncertainty(clock.uncertainty_ns)
    facts += [] if _has_no_pipeline(report) else [("plan from", str(schedule.source))]
    facts += [("clock", f"{clock.method}, {error}")]
    verdict = verdict_lines(report)
    pieces = "".join(
        f'<span style="flex:{part.share:.4f};background:{part.colour};color:{part.ink}" title="{escape(part.text)}">'
        f"{escape(part.label)}</span>"
        for part in bar_of(report.typical_step if report.hang is None else None)
    )
    parts = [f"<h1>{escape(_title(report))} <small>where the step went</small></h1>"]
    if pieces:
        parts.append(f'<div class="verdict-bar" role="img" aria-label="{escape(verdict.made_of)}">{pieces}</div>')
    parts.append(f'<p class="verdict">{escape(verdict.made_of)}</p>')
    if verdict.cause:
        parts.append(f"<p><b>Why:</b> {escape(verdict.cause)}</p>")
    if verdict.first:
        link = "" if verdict.finding is None else f' <a href="#finding-{verdict.finding}">the finding</a>'
        parts.append(f"<p><b>First:</b> {escape(verdict.first)}{link}</p>")
    if line := recording_line(report.recording):
        parts.append(f'<p class="note">{escape(line.capitalize())}.</p>')
    return "".join([*parts, _facts(facts)])


def _has_no_pipeline(report: Report) -> bool:
    return bool(report.steps) and not any(step.has_pipeline for step in report.steps)


def _title(report: Report) -> str:
    """The schedule; of a run without a pipeline, the framework."""
    if not _has_no_pipeline(report):
        return report.schedule.title
    return "Training steps" if report.framework == UNLABELLED else report.framework.rpartition(".")[2]


def _hang(hang: Mapping[str, Any]) -> str:
    """The verdict on a run that hung: in a sentence, as a table, and as a graph where the ranks are few."""
    graph, rows, table = wait_graph(hang), edge_rows(hang), ""
    blamed = f"<p>to blame: {escape(rank_text(hang['ranks']))}</p>" if hang["ranks"] else ""
    if rows:
        table = f'<div class="waits">{_table(EDGE_COLUMNS, rows)}{graph or ""}</div>'
    return f'<section class="hang"><h2>The run hung</h2><p><b>{escape(str(hang["detail"]))}</b></p>{blamed}{table}</section>'


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f"<dl>{items}</dl>"


def _step(step: StepReport, *, is_open: bool, is_drawn: bool) -> str:
    bubble = step.bubble
    bubbles = f" · bubble {units.percent(bubble.share)} (ideal {units.percent(bubble.ideal_share)})"
    head = f"<summary>Step {step.step}: {units.milliseconds(step.length_ns)} ms{bubbles if step.has_pipeline else ''}</summary>"
    body = [f'<p><a href="#timeline" data-step="{step.step}">in the timeline</a></p>'] if is_drawn else []
    body += [_report_table(table) for table in tables_of_step(step, Amount.WHOLE)]
    return f"<details{' open' if is_open else ''}>{head}{''.join(body)}</details>"


def _report_table(table: ReportTable) -> str:
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    drawn = dict.fromkeys(name for row in table.rows for cell in row if isinstance(cell, Bar) for name, _ in cell.parts)
    if len(drawn) > 1:
        keys = (f'<span class="bar-key" style="background:{_BAR_COLOURS[name]}"></span>{name}' for name in drawn)
        notes = f'<p class="note">{"".join(keys)}</p>{notes}'
    return f"<h3>{escape(table.title)}</h3>{_table(table.columns, table.rows, table.num_labels)}{notes}"


def _finding(finding: Finding, number: int, report: Report) -> str:
    doubt = doubt_of_gain(finding, report)
    gain = (
        "" if finding.gain_ns is None else f" <b>{units.milliseconds(finding.gain_ns)} ms a step</b> {doubt}".rstrip()
    )
    title = f'<span class="{escape(finding.severity)}">{escape(finding.severity)}</span> {escape(finding.title)}'
    return f'<li id="finding-{number}">{title}{gain}<p>{escape(finding.detail)}</p></li>'


def _warnings(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<h2>Warnings</h2><ul class="warnings">{items}</ul>' if items else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], num_labels: int = 0) -> str:
    """A table: to the left its first columns, which are labels, and remarks without a head; to the right numbers."""
    marks = [' class="label"' if index < num_labels or not name.strip() else "" for index, name in enumerate(columns)]

    def cells(tag: str, texts: Sequence[object]) -> str:
        each = zip(marks, texts, strict=True)
        return "".join(f"<{tag}{mark}>{_cell(text)}</{tag}>" for mark, text in each)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', columns)}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _cell(content: object) -> str:
    """The markup of a cell: text, or the shares of a bar."""
    if not isinstance(content, Bar):
        return escape(str(content))
    parts = (
        f'<span style="width:{share:.2%};background:{_BAR_COLOURS[name]}"></span>' for name, share in content.parts
    )
    return f'<div class="bar">{"".join(parts)}</div>'


def _page(title: str, parts: Sequence[str]) -> str:
    body = "".join(parts)
    scripts = [script(), TO_STEPS] if 'class="timeline"' in body else []
    if 'class="figure"' in body:
        from plotly.offline import get_plotlyjs

        scripts += [get_plotlyjs(), DRAWING]
    without = f"<noscript>{_NO_SCRIPTS}</noscript>" if scripts else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style()}{STYLE}</style></head>'
        f"<body><main>{without}{body}<footer>pptrace {__version__}</footer></main>"
        f"{''.join(f'<script>{text}</script>' for text in scripts)}</body></html>"
    )
