"""The tables of a report, made once: the terminal, the HTML page and the dashboard each render all of them in one way.

A table is either whole or brief. A brief one has at most :data:`MAX_ROWS` rows whatever the size of the run: steps become a
distribution with its outliers, ranks are grouped by stage with the extremes named, communication is summed by axis and
kind. Means are over what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from itertools import groupby
from statistics import fmean, median

from pptrace.analysis.result import CommSummary, RankStep, Report, StepReport
from pptrace.report import units

MAX_ROWS = 12
"""Of a brief table; one with more rows is shortened to its first, its last and its extremes."""
_FEW_RANKS = 8
"""So many ranks are shown one by one in a brief table as well."""
_OUTLIER = 3.0
"""A step longer than the median by so many scaled median deviations, and by a tenth, is an outlier."""
_MORE = "… {} more: --all shows them"


class Amount(Enum):
    """How much of a run a table shows."""

    BRIEF = auto()
    WHOLE = auto()


@dataclass(frozen=True, slots=True)
class Bar:
    """Shares of a row, one after the other: (what, share of the whole from 0 to 1)."""

    parts: tuple[tuple[str, float], ...]


Cell = str | Bar


@dataclass(frozen=True, slots=True)
class ReportTable:
    """``key`` names the table for pages; the first ``num_labels`` columns are labels and the others numbers."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    num_labels: int = 1


def tables_of(report: Report, step: StepReport | None, amount: Amount) -> list[ReportTable]:
    """All tables of a report in reading order; ``step`` is the one to show in full, None where there is none."""
    tables = []
    if step is not None:
        tables += [steps_table(report, step, amount), *tables_of_step(step, amount, of_several=len(report.steps) > 1)]
    elif any(entry.comms for entry in report.device):
        tables.append(comm_totals_table(report, amount))
    if any(entry.breakdown.busy_ns is not None for entry in report.device):
        tables.append(device_table(report, amount))
    return tables


def tables_of_step(step: StepReport, amount: Amount, of_several: bool = False) -> list[ReportTable]:
    """The tables of one step in reading order."""
    tables = [ranks_table(step, amount, of_several)]
    if any(rank.bubble_ns is None and rank.not_compute_ns is not None for rank in step.ranks):
        tables.append(bounds_table(step, amount))
    if any(rank.phases for rank in step.ranks):
        tables.append(phases_table(step, amount))
    if step.bubble.waterfall_ns is not None:
        tables.append(waterfall_table(step))
    if any(rank.comms for rank in step.ranks):
        tables.append(comms_table(step, amount))
    return tables


# Steps


def steps_table(report: Report, typical: StepReport, amount: Amount) -> ReportTable:
    """One row per step; brief, a distribution with its outliers."""
    steps: Sequence[StepReport] = report.steps
    notes = []
    labels = {id(typical): "shown below"} if len(steps) > 1 else {}
    if amount is Amount.BRIEF and len(steps) > MAX_ROWS // 2:
        steps, labels = _distribution(steps, typical)
        notes.append(f"{len(report.steps)} steps: {_spread(report.steps)}; --all lists them")
    if typical.has_pipeline:
        notes.append(
            "ratio = bubble / compute, share = bubble / step; ideal: this plan with F = I = W and free messages"
        )
        columns = ("step", "span ms", "bubble ratio", "ideal", "bubble share", "ideal ", "")
        rows = [(*_pipeline_step(step), labels.get(id(step), "")) for step in steps]
        return ReportTable("steps", "Steps", columns, tuple(rows), tuple(notes))
    columns = ("step", "longest ms", "compute ms", "exposed comm ms", "rest ms", "optimizer ms", "")
    rows = [(*_plain_step(step), labels.get(id(step), "")) for step in steps]
    return ReportTable("steps", "Steps, means over the ranks", columns, tuple(rows), tuple(notes))


def _pipeline_step(step: StepReport) -> tuple[str, ...]:
    bubble = step.bubble
    return (
        str(step.step),
        units.milliseconds(step.span_ns),
        units.ratio(bubble.ratio),
        units.ratio(bubble.ideal_ratio),
        units.percent(bubble.share),
        units.percent(bubble.ideal_share),
    )


def _plain_step(step: StepReport) -> tuple[str, ...]:
    means = (
        _mean(rank.compute_ns for rank in step.ranks),
        _mean(rank.exposed_comm_ns for rank in step.ranks),
        _mean(rank.bubble_ns for rank in step.ranks),
        _mean(rank.spans.get("OPTIMIZER") for rank in step.ranks),
    )
    return (str(step.step), units.milliseconds(step.span_ns), *map(units.milliseconds, means))


def _distribution(steps: Sequence[StepReport], typical: StepReport) -> tuple[list[StepReport], dict[int, str]]:
    """The fastest, the typical and the slowest step and the outliers, in order; and what to say of each."""
    measured = [step for step in steps if step.span_ns is not None] or list(steps)
    by_span = sorted(measured, key=lambda step: step.span_ns or 0)
    labels = {id(step): "outlier" for step in outliers(measured)[: MAX_ROWS - 3]}
    labels |= {id(by_span[0]): "fastest", id(by_span[-1]): f"slowest{', outlier' if id(by_span[-1]) in labels else ''}"}
    labels[id(typical)] = "typical, shown below"
    return [step for step in steps if id(step) in labels], labels


def outliers(steps: Sequence[StepReport]) -> list[StepReport]:
    """Steps far above the median span, longest first."""
    spans = [step.span_ns or 0 for step in steps]
    middle = median(spans)
    limit = middle + max(_OUTLIER * 1.4826 * median(abs(span - middle) for span in spans), middle / 10)
    return sorted((step for step in steps if (step.span_ns or 0) > limit), key=lambda step: -(step.span_ns or 0))


def _spread(steps: Sequence[StepReport]) -> str:
    spans = sorted(step.span_ns for step in steps if step.span_ns is not None)
    if not spans:
        return "no span is known"
    p90 = spans[min(len(spans) - 1, round(0.9 * (len(spans) - 1)))]
    far = len(outliers([step for step in steps if step.span_ns is not None]))
    return (
        f"span {units.milliseconds(spans[0])} to {units.milliseconds(spans[-1])} ms, median "
        f"{units.milliseconds(round(median(spans)))}, nine in ten at most {units.milliseconds(p90)}, "
        f"{units.counted(far, 'outlier')}"
    )


# Ranks of a step


@dataclass(frozen=True, slots=True)
class _RankGroup:
    """Ranks that one row stands for."""

    label: str
    ranks: tuple[RankStep, ...]

    def mean(self, value: Callable[[RankStep], int | None]) -> int | None:
        return _mean(map(value, self.ranks))

    @property
    def extreme(self) -> str:
        """The rank with the most compute, where the row stands for several."""
        known = [rank for rank in self.ranks if rank.compute_ns is not None]
        if len(self.ranks) == 1 or not known:
            return ""
        slowest = max(known, key=lambda rank: rank.compute_ns or 0)
        return f"rank {slowest.rank}: {units.milliseconds(slowest.compute_ns)}"


def _groups(step: StepReport, amount: Amount) -> list[_RankGroup]:
    """The ranks of a step one by one, or by stage where a brief table would have too many rows."""
    if amount is Amount.WHOLE or len(step.ranks) <= _FEW_RANKS:
        return [_RankGroup(str(rank.rank), (rank,)) for rank in step.ranks]
    ordered = sorted(step.ranks, key=lambda rank: (rank.stage is None, rank.stage or 0, rank.rank))
    return [
        _RankGroup("all" if stage is None else str(stage), tuple(ranks))
        for stage, ranks in groupby(ordered, key=lambda rank: rank.stage)
    ]


def _shortened(groups: Sequence[_RankGroup], amount: Amount) -> tuple[list[_RankGroup], int]:
    """First, last and extremes of many groups, in order, and how many are left out."""
    if amount is Amount.WHOLE or len(groups) <= MAX_ROWS:
        return list(groups), 0
    orders: list[Callable[[_RankGroup], int]] = [
        lambda group: group.mean(lambda rank: rank.compute_ns) or 0,
        lambda group: group.mean(lambda rank: rank.exposed_comm_ns) or 0,
        lambda group: group.mean(lambda rank: rank.bubble_ns) or 0,
    ]
    kept = {0, len(groups) - 1}
    for order in orders:
        ranked = sorted(range(len(groups)), key=lambda index, order=order: order(groups[index]))  # type: ignore[misc]
        kept |= {*ranked[:1], *ranked[-2:]}
    return [groups[index] for index in sorted(kept)], len(groups) - len(kept)


def ranks_table(step: StepReport, amount: Amount, of_several: bool = False) -> ReportTable:
    """What each rank did with the step; of many ranks, the means of each stage and its slowest rank."""
    groups, left_out = _shortened(_groups(step, amount), amount)
    grouped = any(len(group.ranks) > 1 for group in groups)
    rest = "bubble" if step.has_pipeline else "rest"
    times = ("compute ms", "exposed comm ms", f"{rest} ms", "of window")
    if grouped:
        columns: tuple[str, ...] = ("stage", "ranks", *times, "most compute", "")
    elif step.has_pipeline:
        columns = ("rank", "stage", *times, "")
    else:
        columns = ("rank", "step ms", *times, "")
    rows: list[tuple[Cell, ...]] = [
        (*_rank_labels(group, step, grouped), *_rank_times(group), *_extreme(group, grouped), _bar(group))
        for group in groups
    ]
    title = "Stages, means over their ranks" if grouped else "Ranks"
    return ReportTable(
        "ranks",
        f"{title}, step {step.step}" if of_several else title,
        columns,
        tuple(rows),
        (_MORE.format(left_out),) if left_out else (),
        num_labels=2 if step.has_pipeline and not grouped else 1,
    )


def _rank_labels(group: _RankGroup, step: StepReport, grouped: bool) -> tuple[str, str]:
    if grouped:
        return group.label, str(len(group.ranks))
    (rank,) = group.ranks
    if step.has_pipeline:
        return group.label, "–" if rank.stage is None else str(rank.stage)
    return group.label, units.milliseconds(rank.window_ns)


def _rank_times(group: _RankGroup) -> tuple[str, ...]:
    bubble, window = group.mean(lambda rank: rank.bubble_ns), group.mean(lambda rank: rank.window_ns)
    return (
        units.milliseconds(group.mean(lambda rank: rank.compute_ns)),
        units.milliseconds(group.mean(lambda rank: rank.exposed_comm_ns)),
        units.milliseconds(bubble),
        units.percent(_share(bubble, window)),
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
    return Bar(tuple((name, _share(value, window) or 0.0) for name, value in parts if value is not None))


def bounds_table(step: StepReport, amount: Amount) -> ReportTable:
    """What is waiting and exposed transfer together, on ranks whose messages lack their other sides."""
    ranks = [rank for rank in step.ranks if rank.bubble_ns is None and rank.not_compute_ns is not None]
    shown = ranks if amount is Amount.WHOLE else ranks[:MAX_ROWS]
    rows = [
        (
            str(rank.rank),
            "–" if rank.pp_rank is None else str(rank.pp_rank),
            units.milliseconds(rank.not_compute_ns),
            units.percent(_share(rank.not_compute_ns, rank.window_ns)),
            units.milliseconds(rank.bubble_low_ns),
            units.milliseconds(rank.bubble_high_ns),
            f"{units.percent(_share(rank.bubble_low_ns, rank.window_ns))} … "
            f"{units.percent(_share(rank.bubble_high_ns, rank.window_ns))}",
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
        notes.append(_MORE.format(len(ranks) - len(shown)))
    title = "Bubble, where the other sides of messages have no trace"
    return ReportTable("bounds", title, (*columns, "ideal", "of pipeline's"), tuple(rows), tuple(notes))


def phases_table(step: StepReport, amount: Amount) -> ReportTable:
    """Length, forwards, backwards and bubble of each phase; of many ranks, the means of each stage."""
    names = ("warmup", "steady", "cooldown")
    groups, left_out = _shortened(_groups(step, amount), amount)
    grouped = any(len(group.ranks) > 1 for group in groups)
    columns = (
        "stage" if grouped else "rank",
        *(column for name in names for column in (f"{name} ms", "F/B", "bubble ms")),
    )
    rows = [(group.label, *(cell for name in names for cell in _phase(group, name))) for group in groups]
    notes = (_MORE.format(left_out),) if left_out else ()
    title = "Phases, means over the ranks of a stage" if grouped else "Phases"
    return ReportTable("phases", title, columns, tuple(rows), notes)


def _phase(group: _RankGroup, name: str) -> tuple[str, str, str]:
    phases = [rank.phases[name] for rank in group.ranks if name in rank.phases]
    if not phases:
        return ("–", "–", "–")
    counts = {(phase.num_forward, phase.num_backward) for phase in phases}
    return (
        units.milliseconds(_mean(phase.end_ns - phase.start_ns for phase in phases)),
        "{}/{}".format(*counts.pop()) if len(counts) == 1 else "differ",
        units.milliseconds(_mean(phase.bubble_ns for phase in phases)),
    )


# Attribution

WATERFALL = {
    "compute": "the ops themselves, spread evenly over the ranks",
    "structural": "fill and drain of the schedule",
    "imbalance": "stages that cost more than others",
    "jitter": "ops that cost more than their stage's mean",
    "communication": "transfers that nothing hides",
    "host": "launching, where the trace tells",
    "unexplained": "the rest",
}


def waterfall_table(step: StepReport) -> ReportTable:
    """The parts of the step's span, which sum to it."""
    assert step.bubble.waterfall_ns is not None
    assert step.span_ns is not None  # a waterfall attributes it
    span = step.span_ns
    parts = {name: value for name, value in asdict(step.bubble.waterfall_ns).items() if value is not None}
    rows = [
        (
            name,
            units.milliseconds(value),
            units.percent(value / span),
            Bar((("compute", abs(value) / span),)),
            WATERFALL[name],
        )
        for name, value in parts.items()
    ]
    columns = ("part", "ms", "share", "", " ")
    return ReportTable("waterfall", "Where the step went", columns, tuple(rows), (_against_ideal(span, parts),))


def _against_ideal(span_ns: int, parts: Mapping[str, int]) -> str:
    """Why the step is not what the schedule's closed form says, in one sentence."""
    ideal = parts["compute"] + parts["structural"]
    beyond = {name: value for name, value in parts.items() if name not in ("compute", "structural")}
    listed = ", ".join(f"{name} {value / 1e6:+,.2f}" for name, value in beyond.items())
    return (
        f"With every op at the mean of its kind and free messages, this plan takes {units.milliseconds(ideal)} ms; "
        f"measured {(span_ns - ideal) / 1e6:+,.2f} ms: {listed}"
    )


# Communication


def comms_table(step: StepReport, amount: Amount) -> ReportTable:
    """Communication of a step by axis and kind: rank by rank, or brief, per rank on the average."""
    found = sorted(
        ((comm.axis, comm.kind, rank.rank, comm) for rank in step.ranks for comm in rank.comms), key=lambda row: row[:3]
    )
    times = ("time ms", "wait ms", "hidden ms", "exposed ms", "overlap")
    known = [
        (f"{axis} {kind}, rank {rank}", comm) for axis, kind, rank, comm in found if comm.predicted_bytes is not None
    ]
    notes = (_against_prediction(known),) if known else ()
    if amount is Amount.WHOLE:
        columns: tuple[str, ...] = ("axis", "kind", "rank", "count", "bytes", *times, "alg B/s", "bus B/s")
        rows = [(axis, kind, str(rank), *_comm(comm)) for axis, kind, rank, comm in found]
        return ReportTable("comms", "Communication", columns, tuple(rows), notes, num_labels=2)
    columns = ("axis", "kind", "ranks", "count", "bytes", *times, "bus B/s", "most exposed")
    rows = [
        (*key, *_comm_means([(rank, comm) for _, _, rank, comm in group]))
        for key, group in groupby(found, key=lambda row: row[:2])
    ]
    return ReportTable("comms", "Communication, means over the ranks", columns, tuple(rows), notes, num_labels=2)


def _comm(comm: CommSummary) -> tuple[str, ...]:
    return (
        str(comm.count),
        units.num_bytes(comm.bytes),
        *map(units.milliseconds, (comm.total_ns, comm.wait_ns, comm.hidden_ns, comm.exposed_ns)),
        units.percent(comm.overlap_ratio),
        units.bandwidth(comm.algbw_gbps),
        units.bandwidth(comm.busbw_gbps),
    )


def _comm_means(comms: Sequence[tuple[int, CommSummary]]) -> tuple[str, ...]:
    """One row for the ranks that communicate so: means, hidden over all transfer, and the rank that exposes most."""
    hidden, exposed = (
        _mean(value) for value in zip(*((comm.hidden_ns, comm.exposed_ns) for _, comm in comms), strict=True)
    )
    known = [(comm.exposed_ns, rank) for rank, comm in comms if comm.exposed_ns is not None]
    most, where = max(known, default=(None, 0))
    rates = [comm.busbw_gbps for _, comm in comms]
    return (
        str(len(comms)),
        f"{_mean(comm.count for _, comm in comms)}",
        units.num_bytes(_mean(comm.bytes for _, comm in comms)),
        units.milliseconds(_mean(comm.total_ns for _, comm in comms)),
        units.milliseconds(_mean(comm.wait_ns for _, comm in comms)),
        units.milliseconds(hidden),
        units.milliseconds(exposed),
        units.percent(None if hidden is None or exposed is None else _share(hidden, hidden + exposed)),
        units.bandwidth(None if None in rates else fmean(rate for rate in rates if rate is not None)),
        f"rank {where}: {units.milliseconds(most)}" if most and len(comms) > 1 else "",
    )


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


def comm_totals_table(report: Report, amount: Amount) -> ReportTable:
    """Communication over whole traces, for those without steps; brief, per rank on the average."""
    found = sorted(
        ((comm.axis, comm.kind, entry.rank, comm) for entry in report.device for comm in entry.comms),
        key=lambda row: row[:3],
    )
    is_brief = amount is Amount.BRIEF and len(report.device) > _FEW_RANKS
    together = (
        [list(group) for _, group in groupby(found, key=lambda row: row[:2])] if is_brief else [[row] for row in found]
    )
    rows = []
    for several in together:
        axis, kind, rank, _ = several[0]
        comms = [comm for *_, comm in several]
        sizes = {comm.group_size for comm in comms}
        ratios = [comm.overlap_ratio for comm in comms if comm.overlap_ratio is not None]
        rates = [comm.busbw_gbps for comm in comms if comm.busbw_gbps is not None]
        rows.append(
            (
                axis,
                kind,
                str(len(several) if is_brief else rank),
                str(size) if len(sizes) == 1 and (size := sizes.pop()) is not None else "–",
                str(_mean(comm.count for comm in comms)),
                units.num_bytes(_mean(comm.bytes for comm in comms)),
                units.milliseconds(_mean(comm.total_ns for comm in comms)),
                units.percent(fmean(ratios) if ratios else None),
                units.bandwidth(fmean(rates) if rates else None),
            )
        )
    columns = (
        "axis",
        "kind",
        "ranks" if is_brief else "rank",
        "of",
        "count",
        "bytes",
        "total ms",
        "overlap",
        "bus B/s",
    )
    title = "Communication, whole trace (times with waiting)"
    notes = ("means over the ranks; --all lists them",) if is_brief else ()
    return ReportTable("comm-totals", title, columns, tuple(rows), notes, num_labels=2)


# Devices


def device_table(report: Report, amount: Amount) -> ReportTable:
    """The whole trace of each rank by what its device did; of many ranks, the mean and the extremes."""
    entries = [entry for entry in report.device if entry.breakdown.busy_ns is not None]
    notes: tuple[str, ...] = ()
    labelled = [(str(entry.rank), [entry]) for entry in entries]
    if amount is Amount.BRIEF and len(entries) > _FEW_RANKS:
        by_busy = sorted(entries, key=lambda entry: entry.breakdown.busy_ns or 0)
        labelled = [("mean", entries), *((str(entry.rank), [entry]) for entry in (by_busy[0], by_busy[-1]))]
        notes = (
            f"the mean of {len(entries)} ranks, and the ranks whose devices were busy least and most; --all lists them",
        )
    names = ("busy_ns", "compute_ns", "communication_ns", "memory_ns", "idle_ns")
    rows = []
    for label, several in labelled:
        means = [_mean(getattr(entry.breakdown, name) for entry in several) for name in names]
        ratios = [entry.breakdown.overlap_ratio for entry in several if entry.breakdown.overlap_ratio is not None]
        rows.append((label, *map(units.milliseconds, means), units.percent(fmean(ratios) if ratios else None)))
    columns = ("rank", "busy ms", "compute ms", "communication ms", "memory ms", "idle ms", "overlap")
    return ReportTable("device", "Device, whole trace", columns, tuple(rows), notes)


def warning_lines(report: Report) -> list[str]:
    """All warnings of a report: those of the run, then those of its files."""
    lines = [*report.warnings]
    for info in report.inputs:
        lines += [line if info.path in line else f"{info.path}: {line}" for line in info.warnings]
    return lines


def _mean(values: Iterable[int | None]) -> int | None:
    """The mean where all are known, else None."""
    known = list(values)
    return None if not known or None in known else sum(value for value in known if value is not None) // len(known)


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole
