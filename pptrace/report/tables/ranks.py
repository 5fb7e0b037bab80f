"""Tables of the ranks of one step, one by one or grouped by stage: parts of the window, bounds of bubbles, phases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from pptrace.analysis.result import RankStep, StepReport
from pptrace.model import units
from pptrace.model.report_table import FEW_RANKS, MAX_ROWS, Amount, Bar, Cell, ReportTable, mean, more, share

_PHASE_ROWS = 4


class _RankGroup(NamedTuple):
    """The ranks of one row."""

    label: str
    ranks: tuple[RankStep, ...]

    def mean(self, field: str) -> int | None:
        return mean(getattr(rank, field) for rank in self.ranks)


def _groups(step: StepReport, amount: Amount) -> list[_RankGroup]:
    """The ranks of a step one by one, or by stage where a brief table would have too many rows."""
    if amount is Amount.WHOLE or len(step.ranks) <= FEW_RANKS:
        return [_RankGroup(str(rank.rank), (rank,)) for rank in step.ranks]
    ordered = sorted(step.ranks, key=lambda rank: (rank.stage is None, rank.stage or 0, rank.rank))
    return [
        _RankGroup("all" if stage is None else str(stage), tuple(ranks))
        for stage, ranks in groupby(ordered, key=lambda rank: rank.stage)
    ]


def _shortened(groups: Sequence[_RankGroup], amount: Amount) -> tuple[list[_RankGroup], int]:
    """Reduce many groups to the first, the last and the extremes, in order; returns these and the number left out."""
    if amount is Amount.WHOLE or len(groups) <= MAX_ROWS:
        return list(groups), 0
    shown = {0, len(groups) - 1}
    for field in ("compute_ns", "exposed_comm_ns", "bubble_ns"):
        values = [group.mean(field) or 0 for group in groups]
        ranked = sorted(range(len(groups)), key=values.__getitem__)
        shown |= {*ranked[:1], *ranked[-2:]}
    return [groups[index] for index in sorted(shown)], len(groups) - len(shown)


def ranks_table(step: StepReport, amount: Amount, of_several: bool = False) -> ReportTable:
    """Parts of each rank's window; of many ranks, the means of each stage and its slowest rank."""
    groups, left_out = _shortened(_groups(step, amount), amount)
    grouped = any(len(group.ranks) > 1 for group in groups)
    rest = "bubble" if step.has_pipeline else "rest"
    has_between = any(rank.between_operators_ns is not None for rank in step.ranks)
    between = ("between operators ms",) if has_between else ()
    times = ("compute ms", "exposed comm ms", f"{rest} ms", "of window", *between)
    if grouped:
        columns: tuple[str, ...] = ("stage", "ranks", *times, "most compute", "")
    elif step.has_pipeline:
        columns = ("rank", "stage", *times, "")
    else:
        columns = ("rank", "step ms", *times, "")
    rows = [_rank_row(group, step, grouped=grouped, has_between=has_between) for group in groups]
    title = "Stages, means over their ranks" if grouped else "Ranks"
    return ReportTable(
        "ranks",
        f"{title}, step {step.step}" if of_several else title,
        columns,
        tuple(rows),
        tuple(more(left_out)),
        num_labels=2 if step.has_pipeline and not grouped else 1,
    )


def _rank_row(group: _RankGroup, step: StepReport, *, grouped: bool, has_between: bool) -> tuple[Cell, ...]:
    first, window, bubble = group.ranks[0], group.mean("window_ns"), group.mean("bubble_ns")
    compute, exposed = group.mean("compute_ns"), group.mean("exposed_comm_ns")
    parts = [("compute", compute)]
    if compute is not None and exposed is not None and bubble is not None:
        parts += [("exposed", exposed), ("bubble", bubble)]
    elif compute is not None:
        parts.append(("either of both", group.mean("not_compute_ns")))
    cells: list[Cell] = [group.label]
    if grouped:
        cells.append(str(len(group.ranks)))
    else:
        cells.append(units.text(first.stage) if step.has_pipeline else units.milliseconds(first.window_ns))
    cells += [*map(units.milliseconds, (compute, exposed, bubble)), units.percent(share(bubble, window))]
    cells += [units.milliseconds(group.mean("between_operators_ns"))] if has_between else []
    if grouped:
        measured = [rank for rank in group.ranks if rank.compute_ns is not None]
        most = max(measured, key=lambda rank: rank.compute_ns or 0, default=None)
        is_alone = len(group.ranks) == 1
        cells.append("" if most is None or is_alone else f"rank {most.rank}: {units.milliseconds(most.compute_ns)}")
    return (*cells, Bar(tuple((name, share(ns, window) or 0.0) for name, ns in parts if ns is not None)))


def bounds_table(step: StepReport, amount: Amount) -> ReportTable:
    """Bounds of the bubble on ranks whose messages lack their other sides, where waiting and exposed transfer are inseparable."""
    ranks = [rank for rank in step.ranks if rank.bubble_ns is None and rank.not_compute_ns is not None]
    shown = ranks if amount is Amount.WHOLE else ranks[:MAX_ROWS]
    rows = [
        (
            str(rank.rank),
            units.text(rank.pp_rank),
            units.milliseconds(rank.not_compute_ns),
            units.percent(share(rank.not_compute_ns, rank.window_ns)),
            units.milliseconds(rank.bubble_low_ns),
            units.milliseconds(rank.bubble_high_ns),
            f"{units.percent(share(rank.bubble_low_ns, rank.window_ns))} … "
            f"{units.percent(share(rank.bubble_high_ns, rank.window_ns))}",
            units.percent(None if rank.ideal is None else rank.ideal.own_share),
            units.percent(None if rank.ideal is None else rank.ideal.share),
        )
        for rank in shown
    ]
    columns = ("rank", "pipeline rank", "not compute ms", "of window", "bubble ms, at least", "at most", "of window ")
    notes = [
        "not compute = bubble + exposed transfer, in the window of the ranks with a trace; ideal: the rank's bubble with "
        "F = I = W and free messages, of its own window and of the whole pipeline's"
    ]
    notes += more(len(ranks) - len(shown))
    title = "Bubble, where the other sides of messages have no trace"
    return ReportTable(
        "bounds", title, (*columns, "ideal", "of pipeline's"), tuple(rows), tuple(notes), leave_out=(8, 7, 1, 3)
    )


def phases_table(step: StepReport, amount: Amount) -> ReportTable:
    """Length, its ideal, forwards, backwards and bubble of each phase; of many ranks, the means of each stage.

    The ideal is that of the plan with the step's compute spread evenly over its ranks, F = I = W and free messages.
    """
    names = ("warmup", "steady", "cooldown")
    groups = _groups(step, amount)
    left_out = len(groups) - _PHASE_ROWS if amount is Amount.BRIEF else 0
    if left_out > 0:  # they change evenly from the first to the last
        groups = [groups[index * (len(groups) - 1) // (_PHASE_ROWS - 1)] for index in range(_PHASE_ROWS)]
    grouped = any(len(group.ranks) > 1 for group in groups)
    columns = (
        "stage" if grouped else "rank",
        *(column for name in names for column in (f"{name} ms", "ideal", "F/B", "bubble ms")),
    )
    compute_ns = mean(rank.compute_ns for rank in step.ranks)
    rows = [(group.label, *(cell for name in names for cell in _phase(group, name, compute_ns))) for group in groups]
    title = "Phases, means over the ranks of a stage" if grouped else "Phases"
    return ReportTable("phases", title, columns, tuple(rows), tuple(more(left_out)), leave_out=(3, 2, 4))


def _phase(group: _RankGroup, name: str, compute_ns: int | None) -> tuple[str, str, str, str]:
    phases = [rank.phases[name] for rank in group.ranks if name in rank.phases]
    if not phases:
        return ("–", "–", "–", "–")
    ideals = [getattr(rank.ideal, f"{name}_ratio") for rank in group.ranks if rank.ideal is not None]
    ideal_ns = None
    if compute_ns is not None and len(ideals) == len(group.ranks):
        ideal_ns = mean(round(ratio * compute_ns) for ratio in ideals)
    counts = {(phase.num_forward, phase.num_backward) for phase in phases}
    return (
        units.milliseconds(mean(phase.end_ns - phase.start_ns for phase in phases)),
        units.milliseconds(ideal_ns),
        "{}/{}".format(*counts.pop()) if len(counts) == 1 else "differ",
        units.milliseconds(mean(phase.bubble_ns for phase in phases)),
    )
