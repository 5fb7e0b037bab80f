"""Figures of each step of one run, by structure: what a step's time was spent on, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct, field

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.findings.window_parts import window_parts
from pptrace.analysis.report import Report
from pptrace.analysis.result import RankStep, StepReport, alike_steps
from pptrace.analysis.steps.step_series import periodic_steps
from pptrace.intervals import lengths_within
from pptrace.model.device import IDLE_REASONS
from pptrace.model.known import all_known
from pptrace.model.tables import Floats, Int64
from pptrace.model.traces import InputFormat

Place = tuple[tuple[str, int | str], ...]
"""Coordinates of a figure, by name: ``(("kind", "F"), ("stage", 2))``."""
Series = Floats
"""A value per step, ns; NaN where it is not known."""

COMPUTE, COMPUTE_OF_RANKS, BUBBLE, EXPOSED, CAUSE, IDLE, RANGE, WINDOW = (
    "compute",
    "compute of ranks",
    "bubble",
    "exposed communication",
    "cause",
    "device idle",
    "range",
    "window",
)
_NO_RANGES = ("STEP",)
"""Ranges that are the step itself and no part of it."""


class StepFigures(Struct, frozen=True, eq=False):
    """The whole steps of a run: their length, ns, and by name the figures of all steps, each at its places.

    ``span`` is None where the ranks' times do not compare, and ``window`` the mean of the ranks' own windows.

    ``compute`` at (kind, stage) is what a rank of the stage computes in all ops of that kind, the mean over the stage's ranks.
    All else is the mean over all ranks: ``compute of ranks`` by kind, ``bubble`` by phase, ``exposed communication`` by axis and
    kind, ``device idle`` by reason, ``range`` (what a rank does besides its ops: OPTIMIZER, …) by kind. ``cause`` has the step's
    causes, whatever their place; they and the ideal (``compute``) sum to the span. ``knows_communication``: everything that was
    communicated is in the traces, so that an axis without a figure has nothing exposed. ``num_stages`` is that of the run, traced
    or not; None where it is not known.
    ``period`` is the time from step to step, None where one is not known. ``window`` among the parts has those of the ranks'
    windows in the words of the report's sentence, which sum to it: ``part`` by name, and what they leave as ``rest``.
    """

    span: Int64 | None
    window: Int64
    parts: Mapping[str, Mapping[Place, Series]] = field(default_factory=dict)
    knows_communication: bool = False
    num_stages: int | None = None
    period: Int64 | None = None
    has_pipeline: bool = True

    @property
    def num_steps(self) -> int:
        return len(self.window)

    @property
    def lengths(self) -> Int64:
        """The length of each step, by the best that is known of it."""
        known = (self.period, self.span, self.window)
        return next(series for series in known if series is not None)

    def is_copy(self, other: StepFigures) -> bool:
        """Return whether another run has the same figures, to the nanosecond: steps of other schedules may last as long."""
        flat, of_other = (
            {(name, at): ns for name, of in each.parts.items() for at, ns in of.items()} for each in (self, other)
        )
        return flat.keys() == of_other.keys() and all(
            np.array_equal(one, two, equal_nan=True)
            for one, two in (
                (self.window, other.window),
                (self.lengths, other.lengths),
                *((flat[key], of_other[key]) for key in flat),
            )
        )


def figures_of(report: Report, data: AlignedRun) -> StepFigures:
    """The figures of a run's whole steps; without steps where it has none."""
    steps = whole_steps(report.steps)
    of_ranks = _computes(steps, data)
    parts = {
        COMPUTE: _mean_over_stages(of_ranks),
        COMPUTE_OF_RANKS: _mean_over_ranks(of_ranks),
        CAUSE: _causes(steps, with_communication=any(rank.comms for step in steps for rank in step.ranks)),
        WINDOW: _of_windows(steps, report.mesh.num_ranks),
        **_of_ranks(steps),
    }
    spans, periods = (all_known(getattr(step, name) for step in steps) for name in ("span_ns", "period_ns"))
    windows = [round(sum(rank.window_ns for rank in step.ranks) / len(step.ranks)) for step in steps]
    return StepFigures(
        None if spans is None else np.array(spans, dtype=np.int64),
        np.array(windows, dtype=np.int64),
        {name: of_part for name, of_part in parts.items() if of_part},
        _knows_communication(report, steps),
        report.schedule.num_stages,
        None if spans is None or periods is None else np.array(periods, dtype=np.int64),
        any(step.has_pipeline for step in steps),
    )


def _knows_communication(report: Report, steps: Sequence[StepReport]) -> bool:
    """Return whether these are traces of profilers, which record every call, and tell waiting from transfer. Without any call the
    messages of a pipeline are missing; others may have none.
    """
    ranks = [rank for step in steps for rank in step.ranks]
    has_calls = any(rank.comms for rank in ranks) or not any(step.has_pipeline for step in steps)
    is_recorded = has_calls and all(info.format in _RECORD_ALL for info in report.inputs)
    return is_recorded and all(rank.exposed_comm_ns is not None for rank in ranks)


_RECORD_ALL = tuple(map(str, (InputFormat.KINETO, InputFormat.NSYS_SQLITE, InputFormat.ASCEND, InputFormat.ROCPD)))
"""Formats in which what is not recorded did not happen; a table has what its writer put there."""


def whole_steps(steps: Sequence[StepReport]) -> list[StepReport]:
    """The steps to compare: those with every op of the plan where it is known which these are, else those of known length; of
    enough of them those of which it is known when the next one begins.
    """
    present = [step for step in steps if step.ranks]
    known = [step for step in present if step.span_ns is not None] or present
    whole = [step for step in known if step.causes is not None] or known
    return periodic_steps(whole, len(whole)) or whole


def _of_windows(steps: Sequence[StepReport], num_ranks: int) -> dict[Place, Series]:
    """The parts of the ranks' windows, means over ranks; not known in a step where not as much is known of all of them, or other
    parts than in most steps.
    """
    found = {index: window_parts(step, num_ranks) for index, step in enumerate(steps)}
    of_all = {index: parts for index, parts in found.items() if parts is not None and parts.is_of_all}
    usual = Counter(tuple(parts.parts) for parts in of_all.values()).most_common(1)
    series: dict[Place, Series] = {}
    for index, parts in of_all.items():
        for name, ns in parts.parts.items() if tuple(parts.parts) == usual[0][0] else ():
            place = (("rest" if name == parts.rest else "part", name),)
            series.setdefault(place, np.full(len(steps), np.nan))[index] = ns / len(steps[index].ranks)
    return series


def _of_ranks(steps: Sequence[StepReport]) -> dict[str, dict[Place, Series]]:
    """The means over ranks by name and place; not known in a step where it is not of one of them."""
    sums: dict[str, dict[Place, Series]] = {}
    for index, step in enumerate(steps):
        for rank in step.ranks:
            for name, place, ns in _parts_of(rank):
                series = sums.setdefault(name, {}).setdefault(place, np.zeros(len(steps)))
                series[index] += np.nan if ns is None else ns
    num_ranks = np.array([len(step.ranks) for step in steps])
    return {name: {place: series / num_ranks for place, series in of.items()} for name, of in sums.items()}


def _parts_of(rank: RankStep) -> Iterator[tuple[str, Place, int | None]]:
    """(name, place, ns) of what a rank's step was spent on besides its ops."""
    if not rank.phases:
        yield BUBBLE, (), rank.bubble_ns
    for phase, summary in rank.phases.items():
        yield BUBBLE, (("phase", str(phase)),), summary.bubble_ns
    for comm in rank.comms:
        yield EXPOSED, (("axis", str(comm.axis)), ("kind", str(comm.kind))), comm.exposed_ns
    for reason in IDLE_REASONS:
        yield IDLE, (("reason", reason),), None if rank.host is None else getattr(rank.host, f"{reason}_ns")
    for kind, ns in rank.spans.items():
        if kind not in _NO_RANGES:
            yield RANGE, (("kind", str(kind)),), ns


def _causes(steps: Sequence[StepReport], with_communication: bool) -> dict[Place, Series]:
    """The ideal and the causes of each step, with what is outside its pipeline where that is known of all steps; {} where a step
    is not explained.

    Without any communication in the traces nothing is known of its share.
    """
    if any(step.causes is None for step in steps):
        return {}
    series: dict[Place, Series] = {}
    for index, step in enumerate(alike_steps(steps)):
        for cause, ns in step.parts_by_cause.items():
            if cause == "communication" and not with_communication:
                continue
            series.setdefault((("cause", cause),), np.zeros(len(steps)))[index] = ns
    return series


def _computes(steps: Sequence[StepReport], data: AlignedRun) -> list[dict[Place, Series]]:
    """Compute of each rank by kind and stage, all microbatches together, ns; [] where that is not known of one of them.

    It is not known in steps of which a rank's trace lacks ops, or all of them.
    """
    numbers = np.array([step.step for step in steps], dtype=np.int64)
    ranks = sorted({rank.rank for step in steps for rank in step.ranks})
    of_ranks = [_compute_of_rank(rank, numbers, data) for rank in ranks]
    for rank, of_rank in zip(ranks, of_ranks, strict=True):
        is_known = [any(of.rank == rank and of.compute_ns is not None for of in step.ranks) for step in steps]
        for series in of_rank.values():
            series[~np.array(is_known)] = np.nan
    return of_ranks if all(of_ranks) else []


def _mean_over_stages(of_ranks: Sequence[Mapping[Place, Series]]) -> dict[Place, Series]:
    """The means over the ranks of each stage."""
    lists: dict[Place, list[Series]] = {}
    for of_rank in of_ranks:
        for place, series in of_rank.items():
            lists.setdefault(place, []).append(series)
    return {place: np.mean(series, axis=0) for place, series in lists.items()}


def _mean_over_ranks(of_ranks: Sequence[Mapping[Place, Series]]) -> dict[Place, Series]:
    """The means over all ranks, by kind."""
    sums: dict[Place, Series] = {}
    for of_rank in of_ranks:
        for (kind, _), series in of_rank.items():
            sums[kind,] = sums[kind,] + series if (kind,) in sums else series
    return {place: series / len(of_ranks) for place, series in sums.items()}


def _compute_of_rank(rank: int, numbers: Int64, data: AlignedRun) -> dict[Place, Series]:
    """The same of one rank; {} where its times do not say when it computed."""
    ops = data.rows.of_rank(rank).ops
    if data.work[rank].missing_device_events or data.lost_steps.get(rank) or not len(ops):
        return {}
    index = np.searchsorted(numbers, ops["step"])
    inside = np.flatnonzero(numbers[np.minimum(index, len(numbers) - 1)] == ops["step"])
    ops, index = ops.where(inside), index[inside]
    computed = lengths_within(data.lanes[rank].compute, ops["start_ns"], ops["end_ns"])
    kind, kinds = ops.codes("kind")
    stage, stages = ops.codes("stage")
    sums = np.zeros((len(kinds), len(stages), len(numbers)))
    np.add.at(sums, (kind, stage, index), computed)
    present = np.unique(kind * len(stages) + stage).tolist()
    places = [divmod(code, len(stages)) for code in present]
    return {(("kind", str(kinds[row])), ("stage", stages[column])): sums[row, column] for row, column in places}
