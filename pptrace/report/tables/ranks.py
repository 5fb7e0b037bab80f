"""Tables of the ranks of one step, one by one or grouped by stage: parts of the window, bounds of bubbles, phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from pptrace.analysis.result import RankStep, StepReport
from pptrace.model import units
from pptrace.model.report_table import FEW_RANKS, MAX_ROWS, MORE, Amount, Bar, Cell, ReportTable, mean, share


@dataclass(frozen=True, slots=True)
class _RankGroup:
    """The ranks of one row."""

    label: str
    ranks: tuple[RankStep, ...]

    def mean(self, value: Callable[[RankStep], int | None]) -> int | None:
        return mean(map(value, self.ranks))

    @property
    def extreme(self) -> str:
        """The rank with the most compute, of a row of several."""
        measured = [rank for rank in self.ranks if rank.compute_ns is not None]
        if len(self.ranks) == 1 or not measured:
            return ""
        slowest = max(measured, key=lambda rank: rank.compute_ns or 0)
        return f"rank {slowest.rank}: {units.milliseconds(slowest.compute_ns)}"


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
    orders: list[Callable[[_RankGroup], int]] = [
        lambda group: group.mean(lambda rank: rank.compute_ns) or 0,
        lambda group: group.mean(lambda rank: rank.exposed_comm_ns) or 0,
        lambda group: group.mean(lambda rank: rank.bubble_ns) or 0,
    ]
    shown = {0, len(groups) - 1}
    for order in orders:
        ranked = sorted(range(len(groups)), key=lambda index, order=order: order(groups[index]))  # type: ignore[misc]
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
    rows: list[tuple[Cell, ...]] = [
        (*_rank_labels(group, step, grouped), *_rank_times(group, has_between), *_extreme(group, grouped), _bar(group))
        for group in groups
    ]
    title = "Stages, means over their ranks" if grouped else "Ranks"
    return ReportTable(
        "ranks",
        f"{title}, step {step.step}" if of_several else title,
        columns,
        tuple(rows),
        (MORE.format(left_out),) if left_out else (),
        num_labels=2 if step.has_pipeline and not grouped else 1,
    )


def _rank_labels(group: _RankGroup, step: StepReport, grouped: bool) -> tuple[str, str]:
    if grouped:
        return group.label, str(len(group.ranks))
    (rank,) = group.ranks
    if step.has_pipeline:
        return group.label, "–" if rank.stage is None else str(rank.stage)
    return group.label, units.milliseconds(rank.window_ns)


def _rank_times(group: _RankGroup, has_between: bool) -> tuple[str, ...]:
    between = (units.milliseconds(group.mean(lambda rank: rank.between_operators_ns)),) if has_between else ()
    bubble, window = group.mean(lambda rank: rank.bubble_ns), group.mean(lambda rank: rank.window_ns)
    return (
        units.milliseconds(group.mean(lambda rank: rank.compute_ns)),
        units.milliseconds(group.mean(lambda rank: rank.exposed_comm_ns)),
        units.milliseconds(bubble),
        units.percent(share(bubble, window)),
        *between,
    )


def _extreme(group: _RankGroup, grouped: bool) -> tuple[str, ...]:
    return (group.extreme,) if grouped else ()


def _bar(group: _RankGroup) -> Bar:
    window = group.mean(lambda rank: rank.window_ns)
    compute, exposed, bubble, either = (
        group.mean(value)
        for value in (
            lambda rank: rank.compute_ns,
            lambda rank: rank.exposed_comm_ns,
            lambda rank: rank.bubble_ns,
            lambda rank: rank.not_compute_ns,
        )
    )
    parts = [("compute", compute)]
    if compute is not None and exposed is not None and bubble is not None:
        parts += [("exposed", exposed), ("bubble", bubble)]
    elif compute is not None:
        parts.append(("either of both", either))
    return Bar(tuple((name, share(value, window) or 0.0) for name, value in parts if value is not None))


def bounds_table(step: StepReport, amount: Amount) -> ReportTable:
    """Bounds of the bubble on ranks whose messages lack their other sides, where waiting and exposed transfer are inseparable."""
    ranks = [rank for rank in step.ranks if rank.bubble_ns is None and rank.not_compute_ns is not None]
    shown = ranks if amount is Amount.WHOLE else ranks[:MAX_ROWS]
    rows = [
        (
            str(rank.rank),
            "–" if rank.pp_rank is None else str(rank.pp_rank),
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
    if len(ranks) > len(shown):
        notes.append(MORE.format(len(ranks) - len(shown)))
    title = "Bubble, where the other sides of messages have no trace"
    return ReportTable(
        "bounds", title, (*columns, "ideal", "of pipeline's"), tuple(rows), tuple(notes), leave_out=(8, 7, 1, 3)
    )


_PHASE_ROWS = 4


def phases_table(step: StepReport, amount: Amount) -> ReportTable:
    """Length, its ideal, forwards, backwards and bubble of each phase; of many ranks, the means of each stage.

    The ideal is that of the plan with the step's compute spread evenly over its ranks, F = I = W and free messages.
    """
    names = ("warmup", "steady", "cooldown")
    groups = _groups(step, amount)
    if amount is Amount.BRIEF and len(groups) > _PHASE_ROWS:  # they change evenly from the first to the last
        left_out = len(groups) - _PHASE_ROWS
        groups = [groups[index * (len(groups) - 1) // (_PHASE_ROWS - 1)] for index in range(_PHASE_ROWS)]
    else:
        left_out = 0
    grouped = any(len(group.ranks) > 1 for group in groups)
    columns = (
        "stage" if grouped else "rank",
        *(column for name in names for column in (f"{name} ms", "ideal", "F/B", "bubble ms")),
    )
    compute_ns = mean(rank.compute_ns for rank in step.ranks)
    rows = [(group.label, *(cell for name in names for cell in _phase(group, name, compute_ns))) for group in groups]
    notes = (MORE.format(left_out),) if left_out else ()
    title = "Phases, means over the ranks of a stage" if grouped else "Phases"
    return ReportTable("phases", title, columns, tuple(rows), notes, leave_out=(3, 2, 4))


def _phase(group: _RankGroup, name: str, compute_ns: int | None) -> tuple[str, str, str, str]:
    phases = [rank.phases[name] for rank in group.ranks if name in rank.phases]
    if not phases:
        return ("–", "–", "–", "–")
    ideal_ns = group.mean(lambda rank: _ideal_ns(rank, name, compute_ns))
    counts = {(phase.num_forward, phase.num_backward) for phase in phases}
    return (
        units.milliseconds(mean(phase.end_ns - phase.start_ns for phase in phases)),
        units.milliseconds(ideal_ns),
        "{}/{}".format(*counts.pop()) if len(counts) == 1 else "differ",
        units.milliseconds(mean(phase.bubble_ns for phase in phases)),
    )


def _ideal_ns(rank: RankStep, name: str, compute_ns: int | None) -> int | None:
    if rank.ideal is None or compute_ns is None:
        return None
    ratios = {
        "warmup": rank.ideal.warmup_ratio,
        "steady": rank.ideal.steady_ratio,
        "cooldown": rank.ideal.cooldown_ratio,
    }
    return round(ratios[name] * compute_ns)
