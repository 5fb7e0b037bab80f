"""The overview page: key figures of one step, each rank's window, the waterfall, findings and warnings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import Dash, dcc, html

from dashboards.components import Node, hang_panel, lines, panel, report_table, still_picture, tile
from dashboards.evidence import evidence_of
from dashboards.exports import picture_files, table_files
from dashboards.parts import body_of_step, choose_step_on, shortened, with_files
from dashboards.store import Loaded, Store
from dashboards.tables import TABLES
from pptrace.analysis.findings.root_causes import in_groups
from pptrace.analysis.findings.verdict import doubt_of_gain, verdict_lines
from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding, StepReport
from pptrace.ingest.inputs.resolve import ranks_of_run
from pptrace.model.report_table import Amount, ReportTable
from pptrace.model.units import milliseconds
from pptrace.report.charts.steps import steps_line
from pptrace.report.recording import audit_line, recording_line
from pptrace.report.step_tiles import bar_of, step_tiles
from pptrace.report.summary_figures import MOST_BARS, is_drawn, overview, waterfall
from pptrace.report.tables import tables_of_run, tables_of_step, unknown_line, warning_lines
from pptrace.report.tables.step_series import length_of

_ELSEWHERE: Mapping[str, str] = {
    "blame": "Bubbles",
    "comms": "Communication",
    "links": "Communication",
    "late-ranks": "Communication",
    "collectives": "Communication",
    "interconnect": "Communication",
    "memory": "Memory",
    "stragglers": "Stages",
}
"""The page that has a table, by the table's key, besides those of experts: the overview has a link there in its place."""
_NOTES = {"phases": "F/B: forwards and backwards of the phase"}


def layout(*_: object) -> Node:
    return html.Div(id="overview-body")


def register(app: Dash, store: Store, *_: object) -> None:
    body_of_step(app, store, "overview", body)
    choose_step_on(app, "overview-steps")


def body(loaded: Loaded, number: int | None) -> list[Node]:
    """The page below the header; without steps, the tables of whole traces."""
    assert loaded.analysis is not None
    report = loaded.analysis.report
    step = loaded.step(number)
    if step is None:
        return [
            *_run_problem(loaded, report),
            html.Div(
                [html.H2("No pipeline steps in these traces"), html.P("Tables of the whole traces are shown below.")],
                className="panel problem",
                id="no-steps",
            ),
            *(_with_files(table, None) for table in tables_of_run(report, report.typical_step, Amount.WHOLE)),
            _messages(report),
        ]
    tiles = [
        tile(item.label, item.value, item.detail, item.meaning, f"tile-{item.name}", "bad" if item.is_bad else "")
        for item in step_tiles(step, report)
    ]
    return [
        *_run_problem(loaded, report),
        *([] if report.hang is not None else [_verdict(report)]),
        *_recording(report),
        html.Div(tiles, className="tiles"),
        _messages(report, step),
        html.Div([_bars(step), _waterfall(step)], className="columns wide-left") if step.has_pipeline else _bars(step),
        *_steps(report, step),
        *_tables(report, step),
    ]


def _verdict(report: Report) -> Node:
    """A bar of what the typical step is made of, and three lines: this, why, and what to do first with a link to its finding."""
    verdict = verdict_lines(report)
    parts: list[Node] = []
    pieces = [
        html.Span(
            part.label,
            style={"flex": f"{part.share:.4f}", "background": part.colour, "color": part.ink},
            title=part.text,
        )
        for part in bar_of(report.typical_step)
    ]
    name: Any = {"aria-label": verdict.made_of}
    parts += [html.Div(pieces, className="verdict-bar", role="img", **name)] if pieces else []
    parts.append(html.P(verdict.made_of, className="verdict"))
    parts += [html.P([html.Strong("Why: "), verdict.cause])] if verdict.cause else []
    if verdict.first:
        first: list[Node] = [html.Strong("First: "), verdict.first]
        if verdict.finding is not None:
            first += [" ", html.A("the finding", href=f"#finding-{verdict.finding}")]
        parts.append(html.P(first))
    return html.Div(parts, id="verdict")


def _recording(report: Report) -> list[Node]:
    """Show what recording did to the run, where that is known."""
    lines = {"recording": recording_line(report.recording), "audit": audit_line(report.recording)}
    return [html.P(f"{line[0].upper()}{line[1:]}.", className="note", id=name) for name, line in lines.items() if line]


def _steps(report: Report, step: StepReport) -> list[Node]:
    """All steps as a line to choose from."""
    figure = steps_line(report, step.step)
    if figure is None:
        return []
    length, what = length_of(step, report.step_series)
    number = f"{len(report.steps):,} steps, {what}{milliseconds(length)} ms the chosen one; click another one"
    names: Any = {"aria-label": "Length of every step"}
    return [panel("Steps", html.Div(still_picture(figure, "overview-steps"), role="figure", **names), note=number)]


def _run_problem(loaded: Loaded, report: Report) -> list[Node]:
    """The run's hang and errors, shown above all else; empty for a successful run."""
    status = loaded.run.get("status")
    if status in (None, "ok"):
        return [] if report.hang is None else [hang_panel(report.hang)]
    entries = ranks_of_run(loaded.run)
    errors = [f"rank {entry.get('rank')}: {entry['error']}" for entry in entries if entry.get("error")]
    errors += [f"rank {entry.get('rank')} left no trace" for entry in entries if not entry.get("trace")]
    title = f"The run is {status}" if status == "running" else f"The run ended as {status}"
    text = "What was recorded until then is shown below."
    items = [lines(errors, "run-errors")] if errors else []
    if report.hang is not None:
        return [hang_panel(report.hang, html.P(f"{title}. {text}", className="note"), *items)]
    note = html.P(text, className="note")
    return [html.Section([html.H2(title), note, *items], className="panel problem", id="run-problem")]


def _bars(step: StepReport) -> Node:
    if not any(rank.compute_ns or rank.exposed_comm_ns or rank.bubble_ns for rank in step.ranks):
        reason = "Not known for this step: the traces have neither compute nor communication of both sides. The warnings say why."
        return panel("What each rank did", html.P(reason, className="empty", id="rank-bars"))
    picture = html.Div(still_picture(overview(step), "rank-bars"), className="picture-box")
    many = "means of each stage, then the ranks that stand out; share of the step"
    note = many if len(step.ranks) > MOST_BARS else "share of the step"
    return with_files(panel("What each rank did", picture, note=note), picture_files("rank-bars"))


def _waterfall(step: StepReport) -> Node:
    if step.span_parts is None:
        reason = "Not known for this step: the trace lacks ops of the plan, or there is no plan to compare with."
        return panel("Where the step went", html.P(reason, className="empty", id="waterfall"))
    note = "what the step would be shorter by without this cause alone, by replay of the plan"
    below = html.P(note, className="note")  # in the narrower column a head has no room for it
    picture = panel("Where the step went", still_picture(waterfall(step), "waterfall"), below)
    return with_files(picture, picture_files("waterfall"))


def _findings(report: Report, step: int | None) -> Node:
    numbers = {id(finding): number for number, finding in enumerate(report.findings)}
    cards: list[Node] = []
    for root, below in in_groups(report.root_causes, report.findings):
        of_root = [_finding(finding, numbers[id(finding)], report, step) for finding in below]
        if root is None:
            cards += of_root
            continue
        head = html.P([html.Span("root cause", className="badge warning"), " ", html.Strong(root.title)])
        text = html.P(f"{root.detail}: {root.advice}")
        cards.append(html.Div([head, text, html.Div(of_root, className="below-root")], className="finding"))
    shown = cards or [html.P("Nothing stands out.", className="empty")]
    unknown = [html.P(line, className="empty")] if (line := unknown_line(report)) else []
    return panel("Findings", *shown, *unknown, note="gains as means over all steps", id="findings")


def _finding(finding: Finding, number: int, report: Report, shown: int | None) -> Node:
    """A finding, with a link to the timeline at its evidence where there is a pipeline to look at."""
    doubt = doubt_of_gain(finding, report)
    gain = "" if finding.gain_ns is None else f"up to {milliseconds(finding.gain_ns)} ms a step {doubt}".rstrip()
    address = evidence_of(finding, report, shown)
    head = [
        html.Span(str(finding.severity), className=f"badge {finding.severity}"),
        html.Strong(finding.title),
        html.Span(gain, className="gain"),
        *([] if address is None else [dcc.Link("show me", href=address, className="show-me")]),
    ]
    parts = [html.Div(head, className="finding-head"), html.P(finding.detail)]
    return html.Div(parts, className="finding", id=f"finding-{number}")


def _messages(report: Report, step: StepReport | None = None) -> Node:
    items = warning_lines(report)
    none = "None but the root cause." if report.root_causes else "None."
    content = lines(items, "warning-lines") if items else html.P(none, className="empty")
    warnings = panel("Warnings", content, note="what the traces lack", id="warnings")
    findings = _findings(report, None if step is None else step.step)
    return html.Div([findings, warnings], className="columns wide-left ragged")


def _tables(report: Report, step: StepReport) -> list[Node]:
    """The tables that neither pictures nor other pages show, and links to those of other pages."""
    of_step = [table for table in tables_of_step(step, Amount.WHOLE) if not is_drawn(table.key, step)]
    doubled = {"device-host"} if any(rank.host is not None for rank in step.ranks) else set()
    of_run = tables_of_run(report, report.typical_step, Amount.WHOLE)
    here = [
        *(_with_files(table, step.step) for table in of_step if _page_of(table) is None),
        *(_with_files(table, None) for table in of_run if _page_of(table) is None and table.key not in doubled),
    ]
    titles: dict[str, list[str]] = {"Steps": ["All steps"]} if len(report.steps) > 1 else {}
    for table in (*of_step, *of_run):
        if (page := _page_of(table)) is not None:
            titles.setdefault(page, []).append(table.title)
    if not titles:
        return here
    items = [
        html.Li([dcc.Link(name, href=f"/{name.lower()}"), f": {'; '.join(of_page)}"])
        for name, of_page in titles.items()
    ]
    return [*here, panel("On other pages", html.Ul(items, className="lines"), id="other-pages")]


def _page_of(content: ReportTable) -> str | None:
    return "Experts" if content.key.startswith("expert") else _ELSEWHERE.get(content.key)


def _with_files(content: ReportTable, step: int | None) -> Node:
    """A table with its files, if it has any."""
    box, options = report_table(shortened(content), _NOTES.get(content.key, "")), {} if step is None else {"step": step}
    return with_files(box, table_files(content.key, options)) if content.key in TABLES else box
