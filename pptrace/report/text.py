"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pptrace.analysis.result import CommSummary, RankStep, Report, ScheduleSummary, Severity, StepReport
from pptrace.hang.words import lines
from pptrace.recognise.schedule import PlanSource
from pptrace.report import units
from pptrace.schedule.plan import Plan
from pptrace.simulate import Simulation

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
_WATERFALL = {
    "compute": "the ops themselves, spread evenly over the ranks",
    "structural": "fill and drain of the schedule",
    "imbalance": "stages that cost more than others",
    "jitter": "ops that cost more than their stage's mean",
    "communication": "transfers that nothing hides",
    "host": "launching, where the trace tells",
    "unexplained": "the rest",
}


def print_report(report: Report, console: Console) -> None:
    """Print all of a report: what ran, its steps, the typical step in detail, findings, warnings."""
    for part in _parts(report):
        console.print(part)


def _parts(report: Report) -> Iterable[RenderableType]:
    if report.hang is not None:
        yield _hang(report.hang)
    yield _header(report)
    if (typical := report.typical_step) is not None:
        single = len(report.steps) == 1
        if typical.has_pipeline:
            yield _steps(report.steps, typical)
            yield _ranks(typical, single=single)
        else:
            yield _plain_steps(report.steps, typical)
            yield _plain_ranks(typical, single=single)
        if any(rank.bubble_ns is None and rank.not_compute_ns is not None for rank in typical.ranks):
            yield _bounds(typical)
        if any(rank.phases for rank in typical.ranks):
            yield _phases(typical)
        if typical.bubble.waterfall_ns is not None:
            yield _waterfall(typical)
        if any(rank.comms for rank in typical.ranks):
            yield _comms(typical)
    if any(entry.breakdown.busy_ns is not None for entry in report.device):
        yield _device(report)
    if report.typical_step is None and any(entry.comms for entry in report.device):
        yield _comm_totals(report)
    yield _findings(report)
    yield _warnings(report)


def _hang(hang: Mapping[str, Any]) -> RenderableType:
    verdict = Text.assemble(("hang ", "bold red"), str(hang["detail"]))
    return Group(verdict, *(Padding(Text(line), (0, 0, 0, 2)) for line in lines(hang)))


def _header(report: Report) -> RenderableType:
    mesh, schedule = report.mesh, report.schedule
    sizes = {axis: size for axis, size in asdict(mesh).items() if axis != "num_ranks" and size is not None}
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
    """A schedule's sizes as far as they are known, and where it is taken from; the candidates where nothing is certain."""
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
    """What a reader should know before any figure; "" where nothing lacks."""
    if len(report.device) < report.mesh.num_ranks or any(info.warnings for info in report.inputs):
        return "parts of the run are missing or damaged"
    if any(step.bubble.ratio is None and step.has_pipeline for step in report.steps):
        return "bubbles are not known"
    return ""


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        number = index >= left and bool(column)
        width = max(len(column), 8) if number else None
        table.add_column(column, justify="right" if number else "left", no_wrap=True, min_width=width)
    return table


def _steps(steps: Sequence[StepReport], typical: StepReport) -> RenderableType:
    table = _table("\nSteps", "step", "span ms", "bubble ratio", "ideal", "bubble share", "ideal ", "")
    for step in steps:
        bubble = step.bubble
        table.add_row(
            str(step.step),
            units.milliseconds(step.span_ns),
            units.ratio(bubble.ratio),
            units.ratio(bubble.ideal_ratio),
            units.percent(bubble.share),
            units.percent(bubble.ideal_share),
            Text("shown below", style="dim") if step is typical and len(steps) > 1 else "",
        )
    note = Text(
        "ratio = bubble / compute, share = bubble / step; ideal: this plan with F = I = W and free messages", "dim"
    )
    return Group(table, note)


def _ranks(step: StepReport, single: bool) -> RenderableType:
    title = "\nRanks" if single else f"\nRanks, step {step.step}"
    table = _table(title, "rank", "stage", "compute ms", "exposed comm ms", "bubble ms", "of window", "", left=2)
    for rank in step.ranks:
        table.add_row(
            str(rank.rank),
            "–" if rank.stage is None else str(rank.stage),
            units.milliseconds(rank.compute_ns),
            units.milliseconds(rank.exposed_comm_ns),
            units.milliseconds(rank.bubble_ns),
            units.percent(None if rank.bubble_ns is None else rank.bubble_ns / rank.window_ns),
            _bar(rank),
        )
    is_open = any(rank.bubble_ns is None for rank in step.ranks)
    shown = {name: glyph for name, glyph in _GLYPHS.items() if is_open or name != "either of both"}
    legend = Text.assemble(
        *(part for name, glyph in shown.items() for part in ((f"{glyph} ", _COLOURS[name]), f"{name}  "))
    )
    return Group(table, legend)


def _bar(rank: RankStep) -> Text:
    """The rank's window as a bar; rounding is carried along so that it always has the same width."""
    bar = Text()
    parts = [] if rank.compute_ns is None else [("compute", rank.compute_ns)]
    if rank.exposed_comm_ns is not None and rank.bubble_ns is not None:
        parts += [("exposed", rank.exposed_comm_ns), ("bubble", rank.bubble_ns)]
    elif rank.compute_ns is not None and rank.not_compute_ns is not None:
        parts.append(("either of both", rank.not_compute_ns))
    drawn = total = 0
    for name, value in parts:
        total += value
        end = round(_BAR_WIDTH * total / rank.window_ns)
        bar.append(_GLYPHS[name] * (end - drawn), style=_COLOURS[name])
        drawn = end
    return bar


def _bounds(step: StepReport) -> RenderableType:
    """What is waiting and exposed transfer together, on ranks whose messages lack their other sides."""
    columns = ("rank", "pipeline rank", "not compute ms", "of window", "bubble ms, at least", "at most", "of window ")
    table = _table("\nBubble, where the other sides of messages have no trace", *columns, "ideal", "of pipeline's")
    for rank in step.ranks:
        if rank.bubble_ns is not None or rank.not_compute_ns is None:
            continue
        low, high = rank.bubble_low_ns or 0, rank.bubble_high_ns or 0
        table.add_row(
            str(rank.rank),
            "–" if rank.pp_rank is None else str(rank.pp_rank),
            units.milliseconds(rank.not_compute_ns),
            units.percent(_share(rank.not_compute_ns, rank.window_ns)),
            units.milliseconds(low),
            units.milliseconds(high),
            f"{units.percent(_share(low, rank.window_ns))} … {units.percent(_share(high, rank.window_ns))}",
            units.percent(None if rank.ideal is None else rank.ideal.own_share),
            units.percent(None if rank.ideal is None else rank.ideal.share),
        )
    note = Text(
        "not compute = bubble + exposed transfer, in the window of the ranks with a trace; ideal: the rank's bubble with "
        "F = I = W and free messages, of its own window and of the whole pipeline's",
        "dim",
    )
    return Group(table, note)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _phases(step: StepReport) -> RenderableType:
    names = ("warmup", "steady", "cooldown")
    table = _table("\nPhases", "rank", *(f"{name} ms (F/B) bubble" for name in names))
    for rank in step.ranks:
        cells = []
        for name in names:
            if (phase := rank.phases.get(name)) is None:
                cells.append("–")
                continue
            span = units.milliseconds(phase.end_ns - phase.start_ns)
            counts = f"({phase.num_forward}/{phase.num_backward})"
            cells.append(f"{span} {counts:>7} {units.milliseconds(phase.bubble_ns):>8}")
        table.add_row(str(rank.rank), *cells)
    return table


def _waterfall(step: StepReport) -> RenderableType:
    table = _table("\nWhere the step went", "", "ms", "share", "")
    assert step.bubble.waterfall_ns is not None
    assert step.span_ns is not None  # a waterfall attributes it
    parts = {name: value for name, value in asdict(step.bubble.waterfall_ns).items() if value is not None}
    for name, value in parts.items():
        share = value / step.span_ns
        bar = "█" * round(abs(share) * _BAR_WIDTH)
        explained = Text.assemble((bar + " " if bar else "", _COLOURS["compute"]), (_WATERFALL[name], "dim"))
        table.add_row(name, units.milliseconds(value), units.percent(share), explained)
    return Group(table, Text(_against_ideal(step.span_ns, parts), style="dim"))


def _against_ideal(span_ns: int, parts: Mapping[str, int]) -> str:
    """Why the step is not what the schedule's closed form says, in one sentence."""
    ideal = parts["compute"] + parts["structural"]
    beyond = {name: value for name, value in parts.items() if name not in ("compute", "structural")}
    listed = ", ".join(f"{name} {value / 1e6:+,.2f}" for name, value in beyond.items())
    return (
        f"With every op at the mean of its kind and free messages, this plan takes {units.milliseconds(ideal)} ms; "
        f"measured {(span_ns - ideal) / 1e6:+,.2f} ms: {listed}"
    )


def _plain_steps(steps: Sequence[StepReport], typical: StepReport) -> RenderableType:
    """Steps of a run without a pipeline: means over the ranks."""
    columns = ("step", "longest ms", "compute ms", "exposed comm ms", "rest ms", "optimizer ms", "")
    table = _table("\nSteps, means over the ranks", *columns)
    for step in steps:
        table.add_row(
            str(step.step),
            units.milliseconds(step.span_ns),
            units.milliseconds(_mean([rank.compute_ns for rank in step.ranks])),
            units.milliseconds(_mean([rank.exposed_comm_ns for rank in step.ranks])),
            units.milliseconds(_mean([rank.bubble_ns for rank in step.ranks])),
            units.milliseconds(_mean([rank.spans.get("OPTIMIZER") for rank in step.ranks])),
            Text("shown below", style="dim") if step is typical and len(steps) > 1 else "",
        )
    return table


def _mean(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) // len(known) if known and len(known) == len(values) else None


def _plain_ranks(step: StepReport, single: bool) -> RenderableType:
    title = "\nRanks" if single else f"\nRanks, step {step.step}"
    table = _table(title, "rank", "step ms", "compute ms", "exposed comm ms", "rest ms", "")
    for rank in step.ranks:
        times = (rank.window_ns, rank.compute_ns, rank.exposed_comm_ns, rank.bubble_ns)
        table.add_row(str(rank.rank), *map(units.milliseconds, times), _bar(rank))
    legend = Text.assemble(
        *(
            part
            for name, glyph in _GLYPHS.items()
            for part in ((f"{glyph} ", _COLOURS[name]), f"{_REST if name == 'bubble' else name}  ")
        )
    )
    return Group(table, legend)


_REST = "rest: waiting for other ranks, input, Python between operators"


def _comm_totals(report: Report) -> RenderableType:
    """Communication over whole traces, for those without steps."""
    columns = ("axis", "kind", "rank", "of", "count", "bytes", "total ms", "overlap", "bus B/s")
    table = _table("\nCommunication, whole trace (times with waiting)", *columns, left=2)
    rows = sorted((comm.axis, comm.kind, entry.rank, comm) for entry in report.device for comm in entry.comms)
    for axis, kind, rank, comm in rows:
        table.add_row(
            axis,
            kind,
            str(rank),
            "–" if comm.group_size is None else str(comm.group_size),
            str(comm.count),
            units.num_bytes(comm.bytes),
            units.milliseconds(comm.total_ns),
            units.percent(comm.overlap_ratio),
            units.bandwidth(comm.busbw_gbps),
        )
    return table


def _comms(step: StepReport) -> RenderableType:
    columns = ("axis", "kind", "rank", "count", "bytes", "time ms", "wait ms", "hidden ms", "exposed ms", "overlap")
    table = _table("\nCommunication", *columns, "alg B/s", "bus B/s", left=2)
    rows = sorted((comm.axis, comm.kind, rank.rank, comm) for rank in step.ranks for comm in rank.comms)
    for axis, kind, rank_number, comm in rows:
        table.add_row(
            axis,
            kind,
            str(rank_number),
            str(comm.count),
            units.num_bytes(comm.bytes),
            units.milliseconds(comm.total_ns),
            units.milliseconds(comm.wait_ns),
            units.milliseconds(comm.hidden_ns),
            units.milliseconds(comm.exposed_ns),
            units.percent(comm.overlap_ratio),
            units.bandwidth(comm.algbw_gbps),
            units.bandwidth(comm.busbw_gbps),
        )
    known = [
        (f"{axis} {kind}, rank {rank}", comm) for axis, kind, rank, comm in rows if comm.predicted_bytes is not None
    ]
    return Group(table, Text(_against_prediction(known), style="dim")) if known else table


_SHOWN_DIFFERENCES = 4


def _against_prediction(rows: Sequence[tuple[str, CommSummary]]) -> str:
    """Whether the bytes are those that the run's sizes and options come to, in one sentence."""
    wrong = [
        f"{name}: {comm.predicted_bytes:,} predicted, {comm.bytes:,} measured"
        for name, comm in rows
        if comm.bytes != comm.predicted_bytes
    ]
    if not wrong:
        return (
            f"bytes: predicted from the model's sizes and options = measured, in all {units.counted(len(rows), 'row')}"
        )
    more = len(wrong) - _SHOWN_DIFFERENCES
    listed = "; ".join(wrong[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
    return (
        f"bytes: predicted from the model's sizes and options ≠ measured in {len(wrong)} of {len(rows)} rows: {listed}"
    )


def _device(report: Report) -> RenderableType:
    columns = ("rank", "busy ms", "compute ms", "communication ms", "memory ms", "idle ms", "overlap")
    table = _table("\nDevice, whole trace", *columns)
    for entry in report.device:
        part = entry.breakdown
        times = (part.busy_ns, part.compute_ns, part.communication_ns, part.memory_ns, part.idle_ns)
        table.add_row(str(entry.rank), *map(units.milliseconds, times), units.percent(part.overlap_ratio))
    return table


def _findings(report: Report) -> RenderableType:
    lines: list[RenderableType] = []
    for finding in report.findings:
        gain = "" if finding.gain_ns is None else f" ({units.milliseconds(finding.gain_ns)} ms a step)"
        lines.append(
            Text.assemble((f"{finding.severity}: ", _SEVERITY[finding.severity]), finding.title, (gain, "bold"))
        )
        lines.append(Padding(Text(finding.detail, style="dim"), (0, 0, 0, 2)))
    return Group(Text("\nFindings, means over all steps", style="bold"), *lines) if lines else Text()


def _warnings(report: Report) -> RenderableType:
    lines = [*report.warnings]
    for info in report.inputs:
        lines += [line if info.path in line else f"{info.path}: {line}" for line in info.warnings]
    if not lines:
        return Text()
    return Group(Text("\nWarnings", style="bold"), *(Text(f"! {line}", style="yellow") for line in lines))


def simulation_table(simulation: Simulation) -> RenderableType:
    """A simulated step, a row per rank."""
    plan = simulation.plan
    head = Text.assemble(
        (plan.name, "bold"),
        f": {plan_size(plan)} · "
        f"{units.milliseconds(simulation.makespan_ns)} ms · bubble ratio {units.ratio(simulation.bubble_ratio)}, "
        f"share {units.percent(simulation.bubble_share)}",
    )
    table = _table("", "rank", "compute ms", "bubble ms", "bubble share", "peak in flight", "")
    for rank in simulation.ranks:
        cut = round(_BAR_WIDTH * rank.compute_ns / simulation.makespan_ns)
        table.add_row(
            str(rank.rank),
            units.milliseconds(rank.compute_ns),
            units.milliseconds(rank.bubble_ns),
            units.percent(rank.bubble_ns / simulation.makespan_ns),
            str(rank.peak_inflight_microbatches),
            Text.assemble(("█" * cut, _COLOURS["compute"]), ("░" * (_BAR_WIDTH - cut), _COLOURS["bubble"])),
        )
    return Group(head, table)


def plan_size(plan: Plan) -> str:
    """p, m and v of a plan, in words."""
    ranks, chunks = units.counted(plan.pp, "rank"), units.counted(plan.num_chunks, "chunk")
    return f"{ranks}, {units.counted(plan.num_microbatches, 'microbatch', 'microbatches')}, {chunks} per rank"
