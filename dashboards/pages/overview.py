"""The overview: one step in numbers, what each rank did with it, and why it took as long as it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from dash import Dash, Input, Output, html
from dash.exceptions import PreventUpdate

from dashboards.components import Node, hang_panel, lines, panel, report_table, still_picture, tile
from dashboards.store import Loaded, Store
from pptrace.analysis.result import Finding, Report, StepReport
from pptrace.report.figures import overview, waterfall
from pptrace.report.tables import Amount, tables_of, tables_of_step, warning_lines
from pptrace.report.units import milliseconds, percent, ratio

_TIGHT = 1.25
"""A bubble above this many times its ideal is shown as a problem."""


def layout() -> Node:
    return html.Div(id="overview-body")


def register(app: Dash, store: Store) -> None:
    @app.callback(Output("overview-body", "children"), Input("step", "value"))
    def show(step: int | None) -> Any:
        loaded = store.get()
        if loaded.analysis is None or (step is None and loaded.steps):
            raise PreventUpdate
        return body(loaded, step)


def body(loaded: Loaded, number: int | None) -> list[Node]:
    """Everything below the header; without steps what the trace tells nevertheless."""
    assert loaded.analysis is not None
    report = loaded.analysis.report
    step = loaded.step(number) if number is not None else None
    if step is None:
        return [
            *_hang(report),
            *_run_problem(loaded),
            html.Div(
                [html.H2("No pipeline steps in these traces"), html.P("What they tell all the same is shown below.")],
                className="panel problem",
                id="no-steps",
            ),
            *_of_whole_traces(report),
            _messages(report),
        ]
    return [
        *_hang(report),
        *_run_problem(loaded),
        html.P(report.verdict, className="verdict", id="verdict"),
        _tiles(step, report),
        html.Div([_bars(step), _waterfall(step)], className="columns wide-left") if step.has_pipeline else _bars(step),
        html.Div([_findings(report.findings), _warnings(report)], className="columns wide-left ragged"),
        html.Div(_tables(step), className="columns ragged"),
        *_of_whole_traces(report),
    ]


def _hang(report: Report) -> list[Node]:
    return [] if report.hang is None else [hang_panel(report.hang)]


def _run_problem(loaded: Loaded) -> list[Node]:
    """What went wrong in the run itself, above everything else; nothing where all went well."""
    status = loaded.run.get("status")
    if status in (None, "ok"):
        return []
    entries = [entry for entry in loaded.run.get("ranks") or () if isinstance(entry, Mapping)]
    errors = [f"rank {entry.get('rank')}: {entry['error']}" for entry in entries if entry.get("error")]
    errors += [f"rank {entry.get('rank')} left no trace" for entry in entries if not entry.get("trace")]
    title = html.H2(f"The run is {status}" if status == "running" else f"The run ended as {status}")
    text = html.P("What was recorded until then is shown below.", className="note")
    found = [lines(errors, "run-errors")] if errors else []
    return [html.Section([title, text, *found], className="panel problem", id="run-problem")]


def _slowest(step: StepReport) -> tuple[str, str]:
    """The rank with the most compute, and how much that is."""
    compute = {rank.rank: rank.compute_ns for rank in step.ranks if rank.compute_ns is not None}
    if not compute:
        return "–", "no compute is known"
    slowest = max(compute, key=lambda rank: compute[rank])
    mean = round(fmean(compute.values()))
    return f"rank {slowest}", f"{milliseconds(compute[slowest])} ms compute, mean {milliseconds(mean)}"


def _tiles(step: StepReport, report: Report) -> Node:
    known = [rank.exposed_comm_ns for rank in step.ranks if rank.exposed_comm_ns is not None]
    window = sum(rank.window_ns for rank in step.ranks)
    most = max(step.ranks, key=lambda rank: rank.exposed_comm_ns or 0)
    spans = [other.span_ns for other in report.steps if other.span_ns is not None]
    among = (
        f"{min(spans) / 1e6:,.0f} – {max(spans) / 1e6:,.0f} ms over {len(spans)} steps"
        if len(spans) > 1
        else "the only step"
    )
    return html.Div(
        [
            tile(
                "Step span",
                f"{milliseconds(step.span_ns)} ms",
                among,
                "From the first op's start to the last one's end, over all ranks of the pipeline"
                if step.has_pipeline
                else "The longest of the ranks' steps",
                "tile-span",
            ),
            *(_bubble_tiles(step) if step.has_pipeline else _plain_tiles(step, window)),
            tile(
                "Slowest rank",
                *_slowest(step),
                "The rank with the most compute",
                "tile-slowest",
            ),
            tile(
                "Exposed communication",
                percent(sum(known) / window if window and len(known) == len(step.ranks) else None),
                f"most on rank {most.rank}: {milliseconds(most.exposed_comm_ns)} ms",
                "Share of the step in transfers beside no compute, all ranks together. Waiting for the other side is bubble",
                "tile-exposed",
            ),
        ],
        className="tiles",
    )


def _bubble_tiles(step: StepReport) -> list[Node]:
    bubble = step.bubble
    is_over = bubble.ratio is not None and bubble.ideal_ratio is not None and bubble.ratio > _TIGHT * bubble.ideal_ratio
    tone = "bad" if is_over else ""
    return [
        tile(
            "Bubble ratio",
            ratio(bubble.ratio),
            f"ideal {ratio(bubble.ideal_ratio)}",
            "Bubble over compute (Megatron's t_pb / t_id). Ideal: this plan with F = I = W and free messages",
            "tile-ratio",
            tone,
        ),
        tile(
            "Bubble share",
            percent(bubble.share),
            f"ideal {percent(bubble.ideal_share)}",
            "Bubble over the whole step. Ideal: this plan with F = I = W and free messages",
            "tile-share",
            tone,
        ),
    ]


def _plain_tiles(step: StepReport, window_ns: int) -> list[Node]:
    """What stands in place of bubbles for a step without a pipeline: shares of the ranks' steps, all together."""

    def share(times: Sequence[int | None]) -> str:
        known = [time for time in times if time is not None]
        return percent(sum(known) / window_ns if window_ns and len(known) == len(times) else None)

    return [
        tile(
            "Compute",
            share([rank.compute_ns for rank in step.ranks]),
            "of the ranks' steps",
            "Share of the steps in operators (host) or kernels (device), all ranks together",
            "tile-compute",
        ),
        tile(
            "Rest",
            share([rank.bubble_ns for rank in step.ranks]),
            "other ranks, input, Python",
            "Share of the steps in neither compute nor exposed communication: waiting for other ranks, input, Python",
            "tile-rest",
        ),
    ]


def _bars(step: StepReport) -> Node:
    return panel("What each rank did", still_picture(overview(step), "rank-bars"), note="share of the step")


def _waterfall(step: StepReport) -> Node:
    if step.bubble.waterfall_ns is None:
        reason = "Not known for this step: the trace lacks ops of the plan, or there is no plan to compare with."
        return panel("Where the step went", html.P(reason, className="empty", id="waterfall"))
    note = "the plan replayed with more and more of reality"
    return panel("Where the step went", still_picture(waterfall(step), "waterfall"), note=note)


def _findings(findings: Sequence[Finding]) -> Node:
    cards: list[Node] = [
        html.Div(
            [
                html.Div(
                    [
                        html.Span(str(finding.severity), className=f"badge {finding.severity}"),
                        html.Strong(finding.title),
                        html.Span(
                            "" if finding.gain_ns is None else f"up to {milliseconds(finding.gain_ns)} ms a step",
                            className="gain",
                        ),
                    ],
                    className="finding-head",
                ),
                html.P(finding.detail),
            ],
            className="finding",
        )
        for finding in findings
    ]
    return panel(
        "Findings", *(cards or [html.P("Nothing stands out.", className="empty")]), note="over all steps", id="findings"
    )


def _warnings(report: Report) -> Node:
    found = warning_lines(report)
    content = lines(found, "warning-lines") if found else html.P("None.", className="empty")
    return panel("Warnings", content, note="what the traces cannot tell", id="warnings")


def _messages(report: Report) -> Node:
    return html.Div([_findings(report.findings), _warnings(report)], className="columns wide-left ragged")


_NOTES = {
    "phases": "F/B: forwards and backwards of the phase",
    "comms": "overlap: hidden behind compute; bus B/s: bandwidth by the factors of nccl-tests, per second",
}


def _tables(step: StepReport) -> list[Node]:
    """The tables of a step but for those that pictures show."""
    wanted = [table for table in tables_of_step(step, Amount.WHOLE) if table.key not in ("ranks", "waterfall")]
    return [report_table(table, _NOTES.get(table.key, "")) for table in wanted]


def _of_whole_traces(report: Report) -> list[Node]:
    """The whole trace of each rank by what its device did, and where there are no steps its communication."""
    tables = tables_of(report, report.typical_step, Amount.WHOLE)
    return [report_table(table) for table in tables if table.key in ("device", "comm-totals")]
