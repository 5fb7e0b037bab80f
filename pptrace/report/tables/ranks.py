"""Tables of the ranks of one step, one by one or grouped by stage: parts of the window, bounds of bubbles, phases.

Tables of why devices were idle: those of a step and of whole traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from pptrace.analysis.part_words import IDLE_WORDS
from pptrace.analysis.report import Report
from pptrace.analysis.result import RankDevice, RankStep, StepReport
from pptrace.model import units
from pptrace.model.device import IDLE_REASONS
from pptrace.model.report_table import (
    FEW_RANKS,
    MAX_ROWS,
    Amount,
    Bar,
    Cell,
    ReportTable,
    mean,
    mean_and_extremes,
    more,
    share,
)
from pptrace.report.recording import as_recorded

_PHASE_ROWS = 4
_LEAST_BETWEEN = 0.01
"""Part of a rank's step from which on the time between operators is shown of ranks with devices."""


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
    least = _LEAST_BETWEEN if step.has_devices else 0.0
    shares = [share(rank.between_operators_ns, rank.window_ns) for rank in step.ranks]
    has_between = any(part is not None and part >= least for part in shares)
    kinds = [kind for kind in IDLE_WORDS if any((rank.idle_spans or {}).get(kind) for rank in step.ranks)]
    of_rest = (*["between operators ms"] * has_between, *(f"{IDLE_WORDS[kind].phrase} ms" for kind in kinds))
    times = ("compute ms", "exposed comm ms", f"{rest} ms", "of window", *of_rest)
    if grouped:
        columns: tuple[str, ...] = ("stage", "ranks", *times, "most compute", "")
    elif step.has_pipeline:
        columns = ("rank", "stage", *times, "")
    else:
        columns = ("rank", "window ms", *times, "")
    rows = [_rank_row(group, step, kinds, grouped=grouped, has_between=has_between) for group in groups]
    title = "Stages, means over their ranks" if grouped else "Ranks"
    return ReportTable(
        "ranks",
        f"{title}, step {step.step}" if of_several else title,
        columns,
        tuple(rows),
        tuple(more(left_out)),
        num_labels=2 if step.has_pipeline and not grouped else 1,
    )


def _rank_row(
    group: _RankGroup, step: StepReport, kinds: Sequence[str], *, grouped: bool, has_between: bool
) -> tuple[Cell, ...]:
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
    for kind in kinds:
        idle = (None if rank.idle_spans is None else rank.idle_spans.get(kind, 0) for rank in group.ranks)
        cells.append(units.milliseconds(mean(idle)))
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


_COLUMNS = ("rank", "idle ms", *(f"{reason} ms" for reason in IDLE_REASONS.values()), "not launched, share")
_MEANING = (
    "not launched: the host had not launched the next work; blocked: it was waiting for communication; dependency: the next work "
    "was launched and waited for another rank, stream or kernel"
)
_MOST_CALLS = 3


class _Entry(NamedTuple):
    """One rank's device: its window, ns, and why it was idle in it."""

    window_ns: int
    idle_ns: int
    of: RankStep | RankDevice

    def parts(self) -> tuple[int | None, ...]:
        """Idle time and its parts, ns."""
        host = self.of.host
        reasons = (None,) * 3 if host is None else (host.launch_starved_ns, host.blocking_ns, host.dependency_ns)
        return (self.idle_ns, *reasons)


def host_table(step: StepReport, amount: Amount) -> ReportTable:
    """Idle time of the devices in a step by cause."""
    idle = ((rank, rank.device.idle_ns) for rank in step.ranks)
    entries = [_Entry(rank.window_ns, idle_ns, rank) for rank, idle_ns in idle if idle_ns is not None]
    return _table("host", "Device idle time", entries, amount)


def device_host_table(report: Report, amount: Amount) -> ReportTable:
    """Idle time of the devices by cause, from their first work to their last."""
    idle = ((entry, entry.breakdown.idle_ns) for entry in report.device)
    entries = [
        _Entry((entry.breakdown.busy_ns or 0) + idle_ns, idle_ns, entry)
        for entry, idle_ns in idle
        if idle_ns is not None
    ]
    return _table("device-host", f"Device idle time, whole trace{as_recorded(report)}", entries, amount)


def _table(key: str, title: str, entries: Sequence[_Entry], amount: Amount) -> ReportTable:
    labelled = mean_and_extremes(entries, amount, lambda entry: entry.of.rank, lambda entry: entry.parts()[1] or 0)
    notes = [_MEANING]
    if labelled and labelled[0][0] == "mean":
        extremes = "those that waited for launches least and most"
        notes.append(f"the mean of {len(entries)} ranks, and {extremes}; --all lists them")
    rows = []
    for label, group in labelled:
        means = [mean(values) for values in zip(*(entry.parts() for entry in group), strict=True)]
        window = mean(entry.window_ns for entry in group)
        rows.append((label, *map(units.milliseconds, means), units.percent(share(means[1], window))))
    notes += _costly_calls(entries)
    return ReportTable(key, title, _COLUMNS, tuple(rows), tuple(notes), leave_out=(5, 3))


def _costly_calls(entries: Iterable[_Entry]) -> list[str]:
    """A line on the synchronisations for which devices ran dry; none without any."""
    syncs = [(entry.of.rank, sync) for entry in entries for sync in entry.of.synchronisations or () if sync.drained_ns]
    if not syncs:
        return []
    syncs.sort(key=lambda entry: -entry[1].drained_ns)
    calls = []
    for rank, sync in syncs[:_MOST_CALLS]:
        where = f" in {sync.operator}" if sync.operator else ""
        before = "" if sync.longest_op is None else f", the longest before {sync.longest_op}"
        idle = f"device idle {units.milliseconds(sync.drained_ns)} ms"
        calls.append(f"rank {rank}: {units.counted(sync.count, 'call')} of {sync.call}{where}, {idle}{before}")
    left = f"; and {len(syncs) - _MOST_CALLS} more" if len(syncs) > _MOST_CALLS else ""
    return [f"calls for which a device ran dry: {'; '.join(calls)}{left}"]
