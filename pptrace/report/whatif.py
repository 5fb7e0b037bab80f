"""Predictions as text: the run's own replay, then the changes, the best first."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from pptrace.analysis.whatif.result import Scenario, WhatIf
from pptrace.report import units
from pptrace.report.tables.table import ReportTable
from pptrace.report.text_table import Stripped, render_table

_TITLE = "What would get it back"


def whatif_text(result: WhatIf, width: int) -> RenderableType:
    """The whole answer in at most ``width`` columns of text."""
    lines = [Text(headline(result), style="bold"), Text(replay_line(result))]
    tables = [render_table(table, width) for table in whatif_tables(result)]
    return Stripped(Group(*lines, *tables, *(Text(f"! {line}", style="yellow") for line in result.warnings)))


def headline(result: WhatIf) -> str:
    """One sentence: the change that gains most, of those that gain for sure if there are any; else the best ideal.

    What does not fit into ``--memory-limit`` is named only where nothing else was asked for.
    """
    if not result.scenarios:
        return "No prediction: the replay of this run does not tell its steps"
    fitting = [one for one in result.scenarios if not one.over_limit_bytes]
    if not fitting and len(result.scenarios) > 1:
        return "Nothing that was tried fits into --memory-limit"
    best = result.advice
    if best is None:
        return "Nothing that was tried is faster than the run as it was"
    doubts = "" if best.high_ns < best.same_work_ns else ", but the interval includes no gain"
    if best.over_limit_bytes:
        doubts += f"; it needs {units.num_bytes(best.over_limit_bytes)} more than --memory-limit"
    whole = (result.measured_span_ns, *((result.measured_period_ns,) if best.is_outside else ()))
    what = "the step" if best.same_work_ns in whole else "what the same work takes"
    return (
        f"{best.name} would take {best.gain_share:.1%} off {what}: {_span(best)} ms instead of "
        f"{units.milliseconds(best.same_work_ns)}{doubts}"
    )


def _to_paste(result: WhatIf) -> list[str]:
    """The options that make the change that the headline names, a line for each framework; none that its notes have."""
    best = result.advice
    if best is None or best.over_limit_bytes:
        return []
    return [f"to paste, {where}: {options}" for where, options in best.paste.items() if options not in best.note]


def replay_line(result: WhatIf) -> str:
    """The replay of the run itself against what was measured."""
    steps = units.counted(result.num_steps, "step")
    return (
        f"replay of the run as it was: {units.milliseconds(result.replay_span_ns)} ms, measured "
        f"{units.milliseconds(result.measured_span_ns)} ms (typical of {steps}): {result.replay_error:.2%} off"
    )


def span_words(one: Scenario, result: WhatIf) -> str:
    """A scenario's step with its interval against the measured one: "60.12 ms (90 %: 58.30 to 62.00) instead of 83.59"."""
    low, high = units.milliseconds(one.low_ns), units.milliseconds(one.high_ns)
    work = "" if one.is_outside or one.same_work_ns == result.measured_span_ns else " for the same work"
    return f"{_span(one)} ms (90 %: {low} to {high}) instead of {units.milliseconds(one.same_work_ns)}{work}"


def whatif_tables(result: WhatIf) -> list[ReportTable]:
    """The table of scenarios, with today's run as its last row."""
    if not result.scenarios:
        return []
    notes = {note: number for number, note in enumerate(dict.fromkeys(_notes(result)), 1)}
    shown = [*result.scenarios, *([] if result.today is None else [result.today])]
    rows = [_row(one, notes) for one in shown]
    ran = any(one.verified_span_ns is not None for one in shown)
    columns = (*_COLUMNS[:2], *(("verified ms",) if ran else ()), *_COLUMNS[2:])
    if ran:
        verified = [units.milliseconds(one.verified_span_ns) for one in shown]
        rows = [(*row[:2], span, *row[2:]) for row, span in zip(rows, verified, strict=True)]
    below = [f"[{number}] {note}" for note, number in notes.items()]
    below += _to_paste(result)
    if result.measured_period_ns is not None:
        period = units.milliseconds(result.measured_period_ns)
        below.append(
            f"ms: the pipeline's span; this run takes {period} ms from the start of a step to that of the next one, and what is "
            "outside the pipeline stays, but for ideal outside=…"
        )
    below.append("bubble ratio: all that is not compute, exposed communication too, over compute")
    below.append("front: nothing else in the table takes less time and no more memory")
    below += ["!: more memory than --memory-limit"] if any(one.over_limit_bytes for one in shown) else []
    below += ["verified: run in real processes with ops that sleep as long as theirs took"] if ran else []
    below += [
        f"{one.name}: verified outside its interval: messages and Python of these processes took longer, other work had the "
        "cores, or the prediction is wrong; verify again with nothing else to do"
        for one in shown
        if one.verified_span_ns is not None and not one.low_ns <= one.verified_span_ns <= one.high_ns
    ]
    leave_out = tuple(map(columns.index, ("in flight", "bubble ratio", "front", "memory")))
    return [ReportTable("whatif", _TITLE, columns, tuple(rows), tuple(below), leave_out=leave_out)]


_COLUMNS = (
    "change",
    "ms",
    "90 % from",
    "to",
    "gain ms",
    "gain",
    "bubble ratio",
    "in flight",
    "memory",
    "front",
    "notes",
)


def _notes(result: WhatIf) -> list[str]:
    return [note for one in result.scenarios for note in one.note.split("; ") if note]


def _row(one: Scenario, notes: dict[str, int]) -> tuple[str, ...]:
    return (
        one.name,
        units.milliseconds(one.span_ns),
        units.milliseconds(one.low_ns),
        units.milliseconds(one.high_ns),
        units.milliseconds(one.gain_ns),
        units.percent(one.gain_share),
        units.ratio(one.bubble_ratio),
        str(one.peak_inflight),
        "–"
        if one.peak_memory_bytes is None
        else units.num_bytes(one.peak_memory_bytes) + "!" * bool(one.over_limit_bytes),
        "*" if one.on_pareto_front else "",
        " ".join(f"[{notes[note]}]" for note in one.note.split("; ") if note),
    )


def _span(one: Scenario) -> str:
    return units.milliseconds(one.length_ns)
