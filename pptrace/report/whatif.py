"""Predictions as text: the run's own replay, then the changes, the best first."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from pptrace.analysis.whatif.result import Scenario, WhatIf
from pptrace.report import units
from pptrace.report.tables.table import ReportTable
from pptrace.report.text_table import Stripped, render_table

_TITLE = "What would get it back"
_MOST_BRIEF = 6
_MOST_NAME = 100


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
    doubts = "" if best.is_sure else ", but the interval includes no gain"
    if best.over_limit_bytes:
        doubts += f"; it needs {units.num_bytes(best.over_limit_bytes)} more than --memory-limit"
    what = _measured_thing(result) if best.same_work_ns == result.measured_ns else "what the same work takes"
    return (
        f"{best.name} would take {best.gain_share:.1%} off {what}: {units.milliseconds(best.length_ns)} ms instead of "
        f"{units.milliseconds(best.same_work_ns)}{doubts}"
    )


def brief_lines(result: WhatIf) -> str:
    """The best predictions, a line for each, below how many there are."""
    if not result.scenarios:
        return headline(result)
    best = result.scenarios[:_MOST_BRIEF]
    left = len(result.scenarios) - len(best)
    lines = [f"{units.counted(len(result.scenarios), 'prediction')}, best first"]
    lines += [f"  {_shortened(one.name)}: {span_words(one, result)}" for one in best]
    lines += [f"  {left} more in .scenarios"] if left else []
    return "\n".join(lines)


def _shortened(name: str) -> str:
    return name if len(name) <= _MOST_NAME else f"{name[:_MOST_NAME]}…"


def _to_paste(result: WhatIf) -> list[str]:
    """The options that make the change that the headline names, a line for each framework; none that its notes have."""
    best = result.advice
    if best is None or best.over_limit_bytes:
        return []
    return [f"to paste, {where}: {options}" for where, options in best.paste.items() if options not in best.note]


def replay_line(result: WhatIf) -> str:
    """The replay of the run itself against the step that was measured."""
    steps = units.counted(result.num_steps, "step")
    error = abs(result.replay_ns - result.measured_ns) / max(result.measured_ns, 1)
    what = "typical of" if result.measured_period_ns is not None else "the pipeline's span, typical of"
    return (
        f"replay of the run as it was: {units.milliseconds(result.replay_ns)} ms, measured "
        f"{units.milliseconds(result.measured_ns)} ms ({what} {steps}): {error:.2%} off"
    )


def _measured_thing(result: WhatIf) -> str:
    """Name of what is measured: the step where it is known from start to start."""
    return "the step" if result.measured_period_ns is not None else "the pipeline's span"


def span_words(one: Scenario, result: WhatIf) -> str:
    """The step of a scenario with its interval against the measured one: "60.12 ms (90 %: 58.30 to 62.00) instead of 83.59"."""
    low, high = units.milliseconds(one.length_low_ns), units.milliseconds(one.length_high_ns)
    work = "" if one.same_work_ns == result.measured_ns else " for the same work"
    length, same_work = map(units.milliseconds, (one.length_ns, one.same_work_ns))
    return f"{length} ms (90 %: {low} to {high}) instead of {same_work}{work}"


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
        verified = [units.milliseconds(one.verified_ns) for one in shown]
        rows = [(*row[:2], span, *row[2:]) for row, span in zip(rows, verified, strict=True)]
    below = [f"[{number}] {note}" for note, number in notes.items()]
    below += _to_paste(result)
    below.append(_basis(result))
    below.append("bubble: the share of all that is not compute, exposed communication too")
    below.append("front: nothing else in the table takes less time and no more memory")
    below += ["!: more memory than --memory-limit"] if any(one.over_limit_bytes for one in shown) else []
    below += ["verified: its pipeline run in real processes with ops that sleep as long as theirs took"] if ran else []
    below += [
        f"{one.name}: verified outside its interval: messages and Python of these processes took longer, other work had the "
        "cores, or the prediction is wrong; verify again with nothing else to do"
        for one in shown
        if one.verified_span_ns is not None and not one.low_ns <= one.verified_span_ns <= one.high_ns
    ]
    leave_out = tuple(map(columns.index, ("in flight", "bubble", "front", "memory")))
    return [ReportTable("whatif", _TITLE, columns, tuple(rows), tuple(below), leave_out=leave_out)]


def _basis(result: WhatIf) -> str:
    """Line on what the lengths in the table are."""
    if result.measured_period_ns is None:
        return "ms: the pipeline's span; when the next step begins is not known"
    reaches = result.measured_period_ns < result.measured_span_ns
    outside = "the pipeline's reach into the next step" if reaches else "what is outside the pipeline"
    return f"ms: the step, from its start to that of the next one; {outside} stays as it is, but for ideal outside=…"


_COLUMNS = (
    "change",
    "ms",
    "90 % from",
    "to",
    "gain ms",
    "gain",
    "bubble",
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
        units.milliseconds(one.length_ns),
        units.milliseconds(one.length_low_ns),
        units.milliseconds(one.length_high_ns),
        units.milliseconds(one.gain_ns),
        units.percent(one.gain_share),
        units.percent(one.bubble_ratio / (1 + one.bubble_ratio)),
        str(one.peak_inflight),
        "–"
        if one.peak_memory_bytes is None
        else units.num_bytes(one.peak_memory_bytes) + "!" * bool(one.over_limit_bytes),
        "*" if one.on_pareto_front else "",
        " ".join(f"[{notes[note]}]" for note in one.note.split("; ") if note),
    )
