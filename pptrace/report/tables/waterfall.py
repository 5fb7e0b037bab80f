"""The tables of a step's waterfall, and of its causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pptrace.analysis.result import StepReport
from pptrace.analysis.step_parts import OUTSIDE, OUTSIDE_NAMES, Cause
from pptrace.report import units
from pptrace.report.tables.blame import critical_path_line
from pptrace.report.tables.table import Amount, Bar, ReportTable

WATERFALL = {
    "compute": "what the ops usually take, spread evenly over ranks",
    "structural": "fill and drain of the schedule",
    "imbalance": "stages that cost more than others",
    "straggler": "ranks that are slower than their replicas",
    "jitter": "ops that vary",
    "communication": "transfers that nothing hides",
    "host": "devices idle until the host launched",
    "unexplained": "the rest",
}


def waterfall_table(step: StepReport, amount: Amount) -> ReportTable:
    """The parts of the step, which sum to its length; whole, the pipeline's against the plan too."""
    assert step.parts is not None
    assert step.span_parts is not None
    assert step.span_ns is not None
    assert step.length_ns is not None  # they are its parts
    length, parts = step.length_ns, _with_few_outside(step) if amount is Amount.BRIEF else step.parts
    rows = [
        (
            name.replace("_", " "),
            units.milliseconds(value),
            units.percent(value / length),
            Bar((("compute", abs(value) / length),)),
            _meaning(step, name, [cause for cause in step.causes or () if cause.cause == name]) + _places(step, name),
        )
        for name, value in parts.items()
    ]
    notes = [critical_path_line(step.critical_path)] if step.critical_path is not None else []
    notes += [_against_ideal(step.span_ns, step.span_parts)] if amount is Amount.WHOLE else []
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


_SMALL = 0.02
_REST = f"{OUTSIDE}pipeline"


def causes_table(step: StepReport) -> ReportTable:
    """A row for each cause and place, the largest first, with its share of the step; they sum to the span minus the ideal."""
    causes = sorted(step.causes or (), key=lambda cause: -cause.ns)
    rows = [
        (
            cause.cause,
            ", ".join(f"{kind} {name}" for kind, name in cause.where.items()),
            units.signed_milliseconds(cause.ns),
            units.percent(cause.ns / step.length_ns if step.length_ns else None),
            _meaning(step, cause.cause, [cause]),
        )
        for cause in causes
    ]
    columns = ("cause", "where", "ms", "of the step", " ")
    return ReportTable("causes", "Causes and their places", columns, tuple(rows), num_labels=2)


_OF_ROUTES = "experts with more rows than others"
_OF_LATE_OPS = "ops that start after their inputs have arrived"


def _meaning(step: StepReport, name: str, causes: Sequence[Cause]) -> str:
    """The meaning of a cause, of imbalance according to where it is: between stages, ranks of experts, or both."""
    if name == _REST:
        return "from the pipeline's last op to the first of the next step"
    if name.startswith(OUTSIDE):
        return OUTSIDE_NAMES[name.removeprefix(OUTSIDE)]
    if name == "host" and not step.has_devices:
        return _OF_LATE_OPS
    are_of_routes = {"axis" in cause.where for cause in causes if cause.ns and name == "imbalance"}
    if True not in are_of_routes:
        return WATERFALL[name]
    return _OF_ROUTES if False not in are_of_routes else f"{WATERFALL[name]}, {_OF_ROUTES}"


def _places(step: StepReport, name: str) -> str:
    """Name the places of a cause, the largest first."""
    found = [(cause.where, cause.ns) for cause in step.causes or () if cause.cause == name]
    found += [(part.where, part.ns) for part in step.outside or () if f"{OUTSIDE}{part.part}" == name]
    places = [
        f"{kind} {place} {units.milliseconds(ns)}" for where, ns in found if ns > 0 for kind, place in where.items()
    ]
    return f": {', '.join(places[:_MOST_PLACES])}{', …' if len(places) > _MOST_PLACES else ''}" if places else ""


_MOST_PLACES = 3


def _against_ideal(span_ns: int, parts: Mapping[str, int]) -> str:
    """One sentence: the measured step against the plan with mean costs and free messages."""
    ideal = parts["compute"] + parts["structural"]
    beyond = {name: value for name, value in parts.items() if name not in ("compute", "structural")}
    listed = ", ".join(f"{name} {units.signed_milliseconds(value)}" for name, value in beyond.items())
    return (
        f"With every op at the mean of its kind and free messages, this plan takes {units.milliseconds(ideal)} ms; "
        f"measured {units.signed_milliseconds(span_ns - ideal)} ms: {listed}"
    )
