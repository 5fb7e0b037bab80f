"""The tables of a step's waterfall, and of its causes.

The tables of what a step's length hangs on: its critical path, and who is to blame for its bubble.
"""

from __future__ import annotations

from collections.abc import Mapping

from pptrace.analysis.part_words import words_of_part
from pptrace.analysis.result import StepReport
from pptrace.analysis.whole_run import OUTSIDE, CriticalPath
from pptrace.model import units
from pptrace.model.report_table import FEW_RANKS, Amount, Bar, ReportTable, more

_BRIEF_ROWS = 3
_LEAST_SHARE = 0.01
"""Smaller parts are not listed in a note."""


def blame_table(step: StepReport, amount: Amount) -> ReportTable:
    """A row for each rank, of many ranks each stage, whose ops, messages and pauses cause bubble anywhere, the most first."""
    blame = step.blame
    assert blame is not None
    by_stage = amount is Amount.BRIEF and len(blame.by_rank) > FEW_RANKS
    charged = blame.by_stage if by_stage else blame.by_rank
    ordered = sorted(charged.items(), key=lambda item: (-item[1], item[0]))
    shown = ordered[:_BRIEF_ROWS] if amount is Amount.BRIEF else ordered
    rows = [
        (
            str(name),
            units.milliseconds(ns),
            units.percent(ns / blame.total_ns),
            Bar((("bubble", ns / blame.total_ns),)),
        )
        for name, ns in shown
    ]
    notes = [*more(len(ordered) - len(shown)), f"by kind: {_shares(blame.by_kind, blame.total_ns)}"]
    most = []
    if by_stage:
        worst, ns = max(blame.by_rank.items(), key=lambda item: (item[1], -item[0]))
        most.append(f"of one rank {units.milliseconds(ns)} ms (rank {worst})")
    for op in blame.ops[:1]:
        where = f"{op.kind} of microbatch {op.microbatch} on rank {op.rank}, stage {op.stage}"
        most.append(f"of one op {units.milliseconds(op.ns)} ms ({where})")
    notes += [f"most {', '.join(most)}"] if most else []
    columns = ("stage" if by_stage else "rank", "ms", "of all bubble", "")
    return ReportTable("blame", "Who causes the bubble of all ranks", columns, tuple(rows), tuple(notes))


def critical_path_line(path: CriticalPath) -> str:
    """One line: what the chain of ops that the step's length hangs on is made of, and where it mostly is."""
    stage, ns = max(path.by_stage.items(), key=lambda item: (item[1], -item[0]))
    return f"critical path: {_shares(path.parts, path.span_ns)}; {ns / path.span_ns:.0%} of it in stage {stage}"


def _shares(parts: Mapping[str, int], whole: int) -> str:
    listed = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {ns / whole:.0%}" for name, ns in listed if ns >= _LEAST_SHARE * whole)


_SMALL = 0.02
"""A brief table has parts outside the pipeline in one that are a smaller share of the step."""
_REST = f"{OUTSIDE}pipeline"
_MOST_PLACES = 3


def waterfall_table(step: StepReport, amount: Amount, recompute_ns: int | None = None) -> ReportTable:
    """The parts of the step, which sum to its length; whole, the pipeline's against the plan too.

    ``recompute_ns`` is the part of compute that is recompute, in the mean of the ranks; None where there is none.
    """
    assert step.parts is not None
    assert step.span_parts is not None
    assert step.span_ns is not None
    assert step.length_ns is not None  # they are its parts
    length, parts = step.length_ns, _with_few_outside(step) if amount is Amount.BRIEF else step.parts
    again = f"; of this recompute {units.milliseconds(recompute_ns)} ms" if recompute_ns else ""
    rows = [
        (
            words_of_part(step, name).label,
            units.milliseconds(value),
            units.percent(value / length),
            Bar((("compute", max(value, 0) / length),)),
            _meaning(step, name) + _places(step, name) + (again if name == "compute" else ""),
        )
        for name, value in parts.items()
    ]
    notes = [critical_path_line(step.critical_path)] if step.critical_path is not None else []
    if amount is Amount.WHOLE:
        of_span = step.span_parts
        ideal = of_span["compute"] + of_span["structural"]
        beyond = {name: value for name, value in of_span.items() if name not in ("compute", "structural")}
        listed = ", ".join(f"{name} {units.signed_milliseconds(value)}" for name, value in beyond.items())
        notes.append(
            f"With every op at the mean of its kind and free messages, this plan takes {units.milliseconds(ideal)} ms; "
            f"measured {units.signed_milliseconds(step.span_ns - ideal)} ms: {listed}"
        )
    columns = ("part", "ms", "share", "", " ")
    return ReportTable("waterfall", "Where the step went", columns, tuple(rows), tuple(notes))


def _with_few_outside(step: StepReport) -> dict[str, int]:
    """The parts of a step, with those outside the pipeline that are small in one."""
    parts = step.parts or {}
    small = [
        name for name, ns in parts.items() if name.startswith(OUTSIDE) and abs(ns) < _SMALL * (step.length_ns or 0)
    ]
    if len(small) < 2:
        return parts
    return {name: ns for name, ns in parts.items() if name not in small} | {_REST: sum(parts[name] for name in small)}


def causes_table(step: StepReport) -> ReportTable:
    """A row for each cause and place, the largest first, with its share of the step; they sum to the span minus the ideal."""
    causes = sorted(step.causes or (), key=lambda cause: -cause.ns)
    rows = [
        (
            cause.name,
            ", ".join(f"{kind} {name}" for kind, name in cause.where.items()),
            units.signed_milliseconds(cause.ns),
            units.percent(cause.ns / step.length_ns if step.length_ns else None),
            _meaning(step, cause.name),
        )
        for cause in causes
    ]
    columns = ("cause", "where", "ms", "of the step", " ")
    return ReportTable("causes", "Causes and their places", columns, tuple(rows), num_labels=2)


def _meaning(step: StepReport, name: str) -> str:
    """The meaning of a part: as a sentence names it, and what more there is to say."""
    if name == _REST:
        return "from the pipeline's last op to the first of the next step"
    words = words_of_part(step, name)
    if words.phrase == words.label:
        return words.detail
    return f"{words.phrase} ({words.detail})" if words.detail else words.phrase


def _places(step: StepReport, name: str) -> str:
    """Name the places of a cause, the largest first."""
    found = [(cause.where, cause.ns) for cause in step.causes or () if cause.name == name]
    found += [(part.where, part.ns) for part in step.outside or () if f"{OUTSIDE}{part.part}" == name]
    places = [
        f"{kind} {place} {units.milliseconds(ns)}" for where, ns in found if ns > 0 for kind, place in where.items()
    ]
    return f": {', '.join(places[:_MOST_PLACES])}{', …' if len(places) > _MOST_PLACES else ''}" if places else ""
