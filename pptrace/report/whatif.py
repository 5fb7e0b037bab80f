"""Predictions as text: the run's own replay, then the changes, the best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from pptrace.analysis.whatif.frameworks import FRAMEWORKS
from pptrace.analysis.whatif.result import Scenario, Standing, WhatIf
from pptrace.model import units
from pptrace.model.report_table import ReportTable
from pptrace.report.text_table import Stripped, render_table

_MOST_BRIEF = 6
_MOST_NAME = 100
_LENGTHS = ("ms", "90 % from", "to", "gain ms", "gain")
_MEANS = {
    "jitter": "every op computes what is usual of its stage",
    "communication": "messages and communication inside ops take nothing",
    "stragglers": "every op takes what its kind does on average, none is late",
    "host": "no op begins late, nor after a late receive",
    "routing": "all experts have equally many rows",
    "stage": "the stage takes what the others do",
    "rank": "the rank takes what its replicas do, or the other ranks",
    "kind": "every op of the kind takes the mean of all",
    "outside": "that part of the step takes nothing",
}
"""The words for what an ideal changes, by its name."""


def whatif_text(result: WhatIf, width: int) -> RenderableType:
    """The whole answer in at most ``width`` columns of text: what all of it hangs on above the tables, the rest below."""
    parts: list[RenderableType] = [Text(headline(result), style="bold"), Text(replay_line(result))]
    parts += [Text(f"! {line}", style="yellow") for line in result.doubts]
    parts += [render_table(table, width) for table in whatif_tables(result)]
    parts += [Text(f"! {line}", style="yellow") for line in result.warnings if line not in result.doubts]
    return Stripped(Group(*parts))


def headline(result: WhatIf) -> str:
    """One sentence: the change that gains most of those that are sure to help, or that nothing is.

    Of what was asked for alone it tells what that gains, be it an ideal or more than there is memory for.
    """
    every = result.scenarios
    if not every:
        return "No prediction: the replay of this run does not tell its steps"
    if len(every) > 1 and all(one.over_limit_bytes for one in every):
        return "Nothing that was tried fits into --memory-limit"
    best = result.advice
    if best is None and not any(one.is_choice for one in every) and every[0].is_shorter and not every[0].doubt:
        best = every[0]  # nothing else was asked for, and it makes the step shorter for sure
    if best is None:
        if all(one.standing is Standing.IDEAL and one.gain_ns < 0 and not one.doubt for one in every):
            return (
                f"{every[0].name} would make the step {-every[0].gain_share:.1%} longer: {span_words(every[0], result)}"
            )
        return f"Nothing here is sure to help: {_why_not(result)}"
    needs = best.over_limit_bytes
    measured = "the step" if result.measured_period_ns is not None else "the pipeline's span"
    what = measured if best.same_work_ns == result.measured_ns else "what the same work takes"
    return (
        f"{best.name} would take {best.gain_share:.1%} off {what}: {units.milliseconds(best.length_ns)} ms instead of "
        f"{units.milliseconds(best.same_work_ns)}"
        f"{f'; it is not in {result.framework}' if best.standing is Standing.LACKING else ''}"
        f"{f'; it needs {units.num_bytes(needs)} more than --memory-limit' if needs else ''}"
    )


def _why_not(result: WhatIf) -> str:
    """The reason why no change is sure to help."""
    best = max(result.scenarios, key=lambda one: (one.is_choice, one.gain_ns))
    if best.gain_ns <= 0:
        return "no change that was tried is predicted to be faster than the run as it was"
    doubt = next((one.doubt for one in result.scenarios if one.doubt and one.is_choice), best.doubt)
    return doubt or "the interval of each change includes no gain"


def brief_lines(result: WhatIf) -> str:
    """The best predictions, a line for each, below how many there are."""
    if not result.scenarios:
        return headline(result)
    lines = [f"{units.counted(len(result.scenarios), 'prediction')}, best first"]
    for one in result.scenarios[:_MOST_BRIEF]:
        name = one.name if len(one.name) <= _MOST_NAME else f"{one.name[:_MOST_NAME]}…"
        lines.append(f"  {name}: {span_words(one, result)}, {standing_words(one.standing, result)}")
    left = len(result.scenarios) - _MOST_BRIEF
    return "\n".join([*lines, *([f"  {left} more in .scenarios"] if left > 0 else [])])


def replay_line(result: WhatIf) -> str:
    """The replay of the run itself against the step that was measured; where it predicts nothing, the refusal has its error."""
    steps = units.counted(result.num_steps, "step")
    error = abs(result.replay_ns - result.measured_ns) / max(result.measured_ns, 1)
    what = "typical of" if result.measured_period_ns is not None else "the pipeline's span, typical of"
    return (
        f"replay of the run as it was: {units.milliseconds(result.replay_ns)} ms, its step "
        f"{units.milliseconds(result.measured_ns)} ms ({what} {steps}){f': {error:.2%} off' if result.today else ''}"
    )


def span_words(one: Scenario, result: WhatIf) -> str:
    """The step of a scenario with its interval against the measured one: "60.12 ms (90 %: 58.30 to 62.00) instead of 83.59"."""
    low, high = units.milliseconds(one.length_low_ns), units.milliseconds(one.length_high_ns)
    work = "" if one.same_work_ns == result.measured_ns else " for the same work"
    length, same_work = map(units.milliseconds, (one.length_ns, one.same_work_ns))
    return f"{length} ms (90 %: {low} to {high}) instead of {same_work}{work}"


def standing_words(standing: Standing, result: WhatIf) -> str:
    """Words for a standing: "not sure to help", "not in Megatron-LM"."""
    return {
        Standing.SURE: "sure to help",
        Standing.UNSURE: "not sure to help",
        Standing.NO_GAIN: "no gain",
        Standing.LACKING: f"not in {result.framework}",
        Standing.OVER_LIMIT: "over --memory-limit",
        Standing.IDEAL: "nobody can choose it",
    }[standing]


def whatif_tables(result: WhatIf) -> list[ReportTable]:
    """The table of changes by their standing, with today's run as its last row, and that of what nobody can choose."""
    ideals = [one for one in result.scenarios if one.standing is Standing.IDEAL]
    changes = [_changes_table(result)] if len(ideals) < len(result.scenarios) else []
    return changes + ([_ideals_table(ideals)] if ideals else [])


def _changes_table(result: WhatIf) -> ReportTable:
    """The plans and settings, a heading above those of each standing; of those that the framework lacks and that gain nothing the
    names alone.
    """
    changes = [one for one in result.scenarios if one.standing is not Standing.IDEAL]
    are_listed = any(one.is_choice for one in changes)
    left_out = [one for one in changes if are_listed and one.standing is Standing.LACKING and one.gain_ns <= 0]
    shown = [one for one in changes if one not in left_out]
    columns: tuple[str, ...] = ("change", *_LENGTHS, "bubble", "in flight", "memory", "front", "notes")
    lacking = standing_words(Standing.LACKING, result)
    notes = _numbers_of_notes(shown, lacking)
    rows: list[tuple[str, ...]] = []
    for standing, members in groupby(shown, key=lambda one: one.standing):
        rows.append((f"{standing_words(standing, result)}:", *[""] * (len(columns) - 1)))
        rows += [_change_row(one, notes) for one in members]
    today = [] if result.today is None else [result.today]
    for one in today:
        rows += [("now:", *[""] * (len(columns) - 1)), _change_row(one, {})]
    columns, rows = _with_verified(columns, rows, [*shown, *today])
    unsure = [one for one in shown if one.standing is Standing.UNSURE]
    reasons = ["the interval includes no gain"] if any(not one.is_shorter for one in unsure) else []
    reasons += dict.fromkeys(one.doubt for one in unsure if one.doubt)
    below = [
        *_to_paste(result),
        *([f"not sure to help: {'; '.join(reasons)}"] if reasons else []),
        *([f"{lacking}, and no gain: {', '.join(one.name for one in left_out)}"] if left_out else []),
        *(["which framework ran is not known: plans are shown whether it has them or not"] * (not result.framework)),
        _basis(result),
        "bubble: the share of all that is not compute, exposed communication too",
        "front: nothing else that can be chosen takes less time and no more memory",
        *(["!: more memory than --memory-limit"] * any(one.over_limit_bytes for one in shown)),
        *_of_verified(shown),
        *(f"[{number}] {note}" for note, number in notes.items()),
    ]
    leave_out = tuple(map(columns.index, ("in flight", "bubble", "front", "memory")))
    return ReportTable("whatif", "What would get it back", columns, tuple(rows), tuple(below), leave_out=leave_out)


def _ideals_table(ideals: Sequence[Scenario]) -> ReportTable:
    """The table of what nobody can choose: parts of the run that cost less, with what that would mean."""
    notes = _numbers_of_notes(ideals)
    rows = []
    for one in ideals:
        words = [_MEANS[name.partition("=")[0]] for name in one.ideal]
        words += [f"messages take {_times(one.link_speed)}"] if one.link_speed != 1 else []
        words += [f"collectives along {axis} take {_times(speed)}" for axis, speed in one.collective_speeds.items()]
        rows.append((one.name, "; ".join(words), *_lengths(one), _references(one, notes)))
    columns, shown = _with_verified(("if", "", *_LENGTHS, "notes"), rows, ideals)
    below = (
        "nobody can choose these: they show where the time is; gains of ideals are means over steps, as in pptrace analyze",
        *_of_verified(ideals),
        *(f"[{number}] {note}" for note, number in notes.items()),
    )
    costs_more = all(one.gain_ns < 0 or _is_slower(one) for one in ideals)
    title = "If it cost more" if costs_more else "If it cost less"
    return ReportTable("whatif-ideals", title, columns, tuple(shown), below, num_labels=2, leave_out=(1,))


def _is_slower(one: Scenario) -> bool:
    """Return whether messages or collectives are slower than in the run, and nothing is faster or ideal."""
    speeds = (one.link_speed, *one.collective_speeds.values())
    return not one.ideal and max(speeds) <= 1 and min(speeds) < 1


def _times(speed: float) -> str:
    """Words for the time that what is so many times as fast takes: "1/2 of the time", "10 times as long"."""
    return f"1/{speed:g} of the time" if speed > 1 else f"{1 / speed:g} times as long"


def _numbers_of_notes(shown: Sequence[Scenario], left_out: str = "") -> Mapping[str, int]:
    """The notes on some scenarios with their numbers, but for one."""
    notes = dict.fromkeys(note for one in shown for note in one.note.split("; ") if note and note != left_out)
    return {note: number for number, note in enumerate(notes, 1)}


def _references(one: Scenario, notes: Mapping[str, int]) -> str:
    return " ".join(f"[{notes[note]}]" for note in one.note.split("; ") if note in notes)


def _lengths(one: Scenario) -> tuple[str, ...]:
    times = (one.length_ns, one.length_low_ns, one.length_high_ns, one.gain_ns)
    return (*map(units.milliseconds, times), units.percent(one.gain_share))


def _change_row(one: Scenario, notes: Mapping[str, int]) -> tuple[str, ...]:
    known = one.peak_memory_bytes
    return (
        one.name,
        *_lengths(one),
        units.percent(one.bubble_ratio / (1 + one.bubble_ratio)),
        str(one.peak_inflight),
        "–" if known is None else units.num_bytes(known) + "!" * bool(one.over_limit_bytes),
        "*" if one.on_pareto_front else "",
        _references(one, notes),
    )


def _with_verified(
    columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], shown: Sequence[Scenario]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows with what verified plans took, behind the predicted length; rows of headings have none."""
    if all(one.verified_span_ns is None for one in shown):
        return columns, list(rows)
    at, scenarios = columns.index("ms") + 1, iter(shown)
    spans = [units.milliseconds(next(scenarios).verified_ns) if row[at - 1] else "" for row in rows]
    return (
        (*columns[:at], "verified ms", *columns[at:]),
        [(*row[:at], span, *row[at:]) for row, span in zip(rows, spans, strict=True)],
    )


def _of_verified(shown: Sequence[Scenario]) -> list[str]:
    """Lines on the plans that ran."""
    ran = [one for one in shown if one.verified_span_ns is not None]
    below = ["verified: its pipeline run in real processes with ops that sleep as long as theirs took"] if ran else []
    return below + [
        f"{one.name}: verified outside its interval: messages and Python of these processes took longer, other work had the "
        "cores, or the prediction is wrong; verify again with nothing else to do"
        for one in ran
        if not one.low_ns <= (one.verified_span_ns or 0) <= one.high_ns
    ]


def _to_paste(result: WhatIf) -> list[str]:
    """The options that make the change that the headline names, or the only one, in the run's framework (each, where that is not
    known); none that its notes have.
    """
    best = result.advice or (result.scenarios[0] if len(result.scenarios) == 1 else None)
    if best is None or best.over_limit_bytes:
        return []
    own = next((one.paste for one in FRAMEWORKS.values() if one.name == result.framework), tuple(best.paste))
    options = {where: best.paste[where] for where in own if where in best.paste}
    return [f"to paste, {where}: {line}" for where, line in options.items() if line not in best.note]


def _basis(result: WhatIf) -> str:
    """Line on what the lengths in the table are."""
    if result.measured_period_ns is None:
        return "ms: the pipeline's span; when the next step begins is not known"
    reaches = result.measured_period_ns < result.measured_span_ns
    outside = "the pipeline's reach into the next step" if reaches else "what is outside the pipeline"
    return f"ms: the step, from its start to that of the next one; {outside} stays as it is, but for ideal outside=…"
