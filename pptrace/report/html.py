"""Single-file HTML: the report of a run, or the picture of a simulated schedule. Nothing is loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from plotly.offline import get_plotlyjs

from pptrace import __version__
from pptrace.analysis.analyse import Analysis
from pptrace.analysis.result import Finding, Report, StepReport
from pptrace.hang.words import rank_text
from pptrace.recognise.recognise import UNLABELLED
from pptrace.report import units
from pptrace.report.figures import CONFIG, timeline
from pptrace.report.hang_figure import EDGE_COLUMNS, edge_rows, wait_graph
from pptrace.report.html_style import DRAWING, STYLE
from pptrace.report.summary_figures import overview, waterfall
from pptrace.simulate import Simulation


def report_page(analysis: Analysis) -> str:
    """The report with a picture of every step; times are ms."""
    report = analysis.report
    parts = [_header(report), *([] if report.hang is None else [_hang(report.hang)])]
    typical = report.typical_step
    parts += [_step(step, analysis, is_open=step is typical) for step in report.steps]
    parts.append(_device(report))
    parts.append(_findings(report.findings))
    parts.append(_warnings(report))
    return _page(f"pptrace · {_title(report)}", parts)


def simulation_page(simulation: Simulation) -> str:
    """A simulated step: its numbers and its picture."""
    plan = simulation.plan
    facts = (
        ("ranks", str(plan.pp)),
        ("microbatches", str(plan.num_microbatches)),
        ("chunks per rank", str(plan.num_chunks)),
        ("makespan", f"{units.milliseconds(simulation.makespan_ns)} ms"),
        ("bubble ratio", units.ratio(simulation.bubble_ratio)),
        ("bubble share", units.percent(simulation.bubble_share)),
    )
    rows = [
        (
            rank.rank,
            units.milliseconds(rank.compute_ns),
            units.milliseconds(rank.bubble_ns),
            rank.peak_inflight_microbatches,
        )
        for rank in simulation.ranks
    ]
    parts = [
        f"<h1>{escape(plan.name)} <small>simulated</small></h1>{_facts(facts)}",
        _figure(timeline(simulation.ops())),
        _table(("rank", "compute ms", "bubble ms", "peak in flight"), rows),
    ]
    return _page(f"pptrace · {plan.name}", parts)


def _figure(figure: Any) -> str:
    """A figure as data, which the page draws when it is first seen (:data:`pptrace.report.html_style.DRAWING`)."""
    data = figure.to_json().replace("<", "\\u003c")  # no text in it may end the script
    height = figure.layout.height or _HEIGHT
    return (
        f'<div class="figure"><script type="application/json">{data}</script>'
        f'<div class="plot" style="height:{height}px">drawing …</div></div>'
    )


_HEIGHT = 450
"""plotly's own, px."""


def _header(report: Report) -> str:
    mesh, schedule, clock = report.mesh, report.schedule, report.clock
    facts = [("framework", report.framework), ("ranks", str(mesh.num_ranks))]
    sizes = [(axis, getattr(mesh, axis)) for axis in ("pp", "vpp", "tp", "cp", "dp", "ep")]
    facts += [(axis, str(size)) for axis, size in sizes if size is not None and (size > 1 or axis == "pp")]
    if schedule.num_microbatches is not None:
        facts += [("microbatches", str(schedule.num_microbatches)), ("stages", str(schedule.num_stages))]
    error = "unknown" if clock.uncertainty_ns is None else f"±{clock.uncertainty_ns / 1e3:.1f} µs"
    facts += [] if _has_no_pipeline(report) else [("plan from", str(schedule.source))]
    facts += [("clock", f"{clock.method}, {error}")]
    return f"<h1>{escape(_title(report))} <small>where the step went</small></h1>{_facts(facts)}"


def _has_no_pipeline(report: Report) -> bool:
    return bool(report.steps) and not any(step.has_pipeline for step in report.steps)


def _title(report: Report) -> str:
    """The schedule; of a run without a pipeline, what trains it."""
    if not _has_no_pipeline(report):
        return report.schedule.name
    return "Training steps" if report.framework == UNLABELLED else report.framework.rpartition(".")[2]


def _hang(hang: Mapping[str, Any]) -> str:
    """The verdict on a run that hung: in a sentence, as a table, and as a graph where the ranks are few."""
    graph = wait_graph(hang)
    rows = edge_rows(hang)
    blamed = f"<p>to blame: {escape(rank_text(hang['ranks']))}</p>" if hang["ranks"] else ""
    table = (
        f'<div class="waits">{_table(EDGE_COLUMNS, rows)}{_figure(graph) if graph is not None else ""}</div>'
        if rows
        else ""
    )
    return f'<section class="hang"><h2>The run hung</h2><p><b>{escape(str(hang["detail"]))}</b></p>{blamed}{table}</section>'


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f"<dl>{items}</dl>"


def _step(step: StepReport, analysis: Analysis, is_open: bool) -> str:
    bubble = step.bubble
    windows = [window for window in analysis.windows if window.step == step.step]
    bubbles = (
        f" · bubble ratio {units.ratio(bubble.ratio)} (ideal {units.ratio(bubble.ideal_ratio)}) · share "
        f"{units.percent(bubble.share)} (ideal {units.percent(bubble.ideal_share)})"
    )
    head = f"<summary>Step {step.step}: {units.milliseconds(step.span_ns)} ms{bubbles if step.has_pipeline else ''}</summary>"
    body = [_figure(timeline(analysis.data.ops, analysis.data.comms, windows, analysis.data.lanes))] if windows else []
    body.append(_figure(overview(step)))
    if bubble.waterfall_ns is not None:
        body.append(_figure(waterfall(step)))
    if any(rank.bubble_ns is None and rank.not_compute_ns is not None for rank in step.ranks):
        body += ["<h3>Bubble, where the other sides of messages have no trace</h3>", _bounds(step)]
    if any(rank.phases for rank in step.ranks):
        body += ["<h3>Phases</h3>", _phases(step)]
    body += ["<h3>Communication</h3>", _comms(step)]
    return f"<details{' open' if is_open else ''}>{head}{''.join(body)}</details>"


def _bounds(step: StepReport) -> str:
    columns = (
        "rank",
        "pipeline rank",
        "not compute ms",
        "bubble ms, at least",
        "at most",
        "ideal, own window",
        "pipeline's",
    )
    rows = [
        (
            rank.rank,
            "–" if rank.pp_rank is None else rank.pp_rank,
            units.milliseconds(rank.not_compute_ns),
            units.milliseconds(rank.bubble_low_ns),
            units.milliseconds(rank.bubble_high_ns),
            units.percent(None if rank.ideal is None else rank.ideal.own_share),
            units.percent(None if rank.ideal is None else rank.ideal.share),
        )
        for rank in step.ranks
        if rank.bubble_ns is None
    ]
    return _table(columns, rows)


def _phases(step: StepReport) -> str:
    rows = [
        (
            rank.rank,
            name,
            units.milliseconds(phase.end_ns - phase.start_ns),
            phase.num_forward,
            phase.num_backward,
            units.milliseconds(phase.bubble_ns),
        )
        for rank in step.ranks
        for name, phase in rank.phases.items()
    ]
    return _table(("rank", "phase", "ms", "forwards", "backwards", "bubble ms"), rows)


def _comms(step: StepReport) -> str:
    times = ("time ms", "wait ms", "hidden ms", "exposed ms")
    columns = ("rank", "axis", "kind", "count", "bytes", *times, "overlap", "alg B/s", "bus B/s")
    rows = [
        (
            rank.rank,
            comm.axis,
            comm.kind,
            comm.count,
            units.num_bytes(comm.bytes),
            units.milliseconds(comm.total_ns),
            units.milliseconds(comm.wait_ns),
            units.milliseconds(comm.hidden_ns),
            units.milliseconds(comm.exposed_ns),
            units.percent(comm.overlap_ratio),
            units.bandwidth(comm.algbw_gbps),
            units.bandwidth(comm.busbw_gbps),
        )
        for rank in step.ranks
        for comm in rank.comms
    ]
    return _table(columns, rows) if rows else "<p>none recorded</p>"


def _device(report: Report) -> str:
    columns = ("rank", "busy ms", "compute ms", "communication ms", "memory ms", "idle ms", "overlap")
    rows = []
    for entry in report.device:
        part = entry.breakdown
        if part.busy_ns is not None:
            times = (part.busy_ns, part.compute_ns, part.communication_ns, part.memory_ns, part.idle_ns)
            rows.append((entry.rank, *map(units.milliseconds, times), units.percent(part.overlap_ratio)))
    return f"<h2>Device, whole trace</h2>{_table(columns, rows)}" if rows else ""


def _findings(findings: Sequence[Finding]) -> str:
    items = []
    for finding in findings:
        gain = "" if finding.gain_ns is None else f" <b>{units.milliseconds(finding.gain_ns)} ms a step</b>"
        title = f'<span class="{escape(finding.severity)}">{escape(finding.severity)}</span> {escape(finding.title)}'
        items.append(f"<li>{title}{gain}<p>{escape(finding.detail)}</p></li>")
    return f"<h2>Findings</h2><ul>{''.join(items)}</ul>" if items else ""


def _warnings(report: Report) -> str:
    lines = [*report.warnings, *(line for info in report.inputs for line in info.warnings)]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<h2>Warnings</h2><ul class="warnings">{items}</ul>' if items else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _page(title: str, parts: Sequence[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body><main>{''.join(parts)}<footer>pptrace {__version__}</footer></main>"
        f"<script>{get_plotlyjs()}</script><script>const CONFIG = {json.dumps(dict(CONFIG))};{DRAWING}</script></body></html>"
    )
