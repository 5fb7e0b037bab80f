"""Tables of communication by axis and kind, of a step and of whole traces, and of devices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from pptrace.analysis.report import Report
from pptrace.analysis.result import CommSummary, CommTotal, StepReport
from pptrace.model import units
from pptrace.model.report_table import FEW_RANKS, Amount, ReportTable, mean, mean_and_extremes, share
from pptrace.report.recording import as_recorded

_SHOWN_DIFFERENCES = 4


def comms_table(step: StepReport, amount: Amount) -> ReportTable:
    """Communication of a step by axis and kind: rank by rank, or brief, per rank on the average."""
    entries = sorted(
        ((comm.axis, comm.kind, rank.rank, comm) for rank in step.ranks for comm in rank.comms), key=lambda row: row[:3]
    )
    times = ("time ms", "wait ms", "hidden ms", "not hidden ms", "overlap")
    notes = _against_prediction(
        [
            (f"{axis} {kind}, rank {rank}", comm)
            for axis, kind, rank, comm in entries
            if comm.predicted_bytes is not None and comm.bytes is not None
        ]
    )
    longest = max((comm.total_ns or 0 for _, _, _, comm in entries), default=0)
    if step.span_ns is not None and longest > step.span_ns:
        notes += ("times are sums over calls, which may go on at the same time and beyond the step",)
    free = sum(comm.free_ns or 0 for _, _, _, comm in entries)
    if free:
        more = f"not hidden: without {units.milliseconds(free)} ms behind the last op of a rank whose pipeline goes on"
        notes += (f"{more}, which costs the step nothing",)
    if any(comm.exposed_ns for _, _, _, comm in entries):
        notes += ("not hidden: by compute; what of it keeps a rank waiting is its exposed communication",)
    if amount is Amount.WHOLE:
        columns: tuple[str, ...] = ("axis", "kind", "rank", "count", "bytes", *times, "alg B/s", "bus B/s")
        rows = [
            (
                *(axis, kind, str(rank), str(comm.count), units.num_bytes(comm.bytes)),
                *map(units.milliseconds, (comm.total_ns, comm.wait_ns, comm.hidden_ns, _not_hidden(comm))),
                units.percent(comm.overlap_ratio),
                *map(units.bandwidth, (comm.algbw_gbps, comm.busbw_gbps)),
            )
            for axis, kind, rank, comm in entries
        ]
        return ReportTable("comms", "Communication", columns, tuple(rows), notes, 2, leave_out=(10, 7, 11, 3, 6))
    columns = ("axis", "kind", "ranks", "count", "bytes", *times, "bus B/s", "most not hidden")
    rows = [
        (*key, *_comm_means([(rank, comm) for _, _, rank, comm in group]))
        for key, group in groupby(entries, key=lambda row: row[:2])
    ]
    return ReportTable(
        "comms", "Communication, means over the ranks", columns, tuple(rows), notes, 2, leave_out=(2, 10, 7, 3, 6)
    )


def _not_hidden(comm: CommSummary) -> int | None:
    """Transfer that no compute hides, but for what is free, ns; None where it is not known."""
    return None if comm.exposed_ns is None else comm.exposed_ns - (comm.free_ns or 0)


def _comm_means(comms: Sequence[tuple[int, CommSummary]]) -> tuple[str, ...]:
    """One row for the ranks of an axis and kind: means, hidden over all transfer, and the rank that hides least."""
    hidden, exposed = (
        mean(value) for value in zip(*((comm.hidden_ns, comm.exposed_ns) for _, comm in comms), strict=True)
    )
    measured = [(left, rank) for rank, comm in comms if (left := _not_hidden(comm)) is not None]
    most, where = max(measured, default=(None, 0))
    rates = [comm.busbw_gbps for _, comm in comms]
    return (
        str(len(comms)),
        f"{mean(comm.count for _, comm in comms)}",
        units.num_bytes(mean(comm.bytes for _, comm in comms)),
        units.milliseconds(mean(comm.total_ns for _, comm in comms)),
        units.milliseconds(mean(comm.wait_ns for _, comm in comms)),
        units.milliseconds(hidden),
        units.milliseconds(mean(_not_hidden(comm) for _, comm in comms)),
        units.percent(None if hidden is None or exposed is None else share(hidden, hidden + exposed)),
        units.bandwidth(None if None in rates else fmean(rate for rate in rates if rate is not None)),
        f"rank {where}: {units.milliseconds(most)}" if most and len(comms) > 1 else "",
    )


def _against_prediction(rows: Sequence[tuple[str, CommSummary]]) -> tuple[str, ...]:
    """One sentence: measured bytes compared with those predicted from the model's sizes and options; none without rows."""
    if not rows:
        return ()
    wrong = [
        f"{name}: {comm.predicted_bytes:,} predicted, {comm.bytes:,} measured"
        for name, comm in rows
        if comm.bytes != comm.predicted_bytes
    ]
    start = "bytes: predicted from the model's sizes and options"
    if not wrong:
        return (f"{start} = measured, in all {units.counted(len(rows), 'row')}",)
    num_more = len(wrong) - _SHOWN_DIFFERENCES
    listed = "; ".join(wrong[:_SHOWN_DIFFERENCES]) + (f"; and {num_more} more" if num_more > 0 else "")
    return (f"{start} ≠ measured in {len(wrong)} of {len(rows)} rows: {listed}",)


def comm_totals_table(report: Report, amount: Amount) -> ReportTable:
    """Communication over whole traces, for those without steps; brief, per rank on the average."""
    entries = sorted(
        ((comm.axis, comm.kind, entry.rank, comm) for entry in report.device for comm in entry.comms),
        key=lambda row: row[:3],
    )
    is_brief = amount is Amount.BRIEF and len(report.device) > FEW_RANKS
    groups = [list(group) for _, group in groupby(entries, key=lambda row: row[:2])]
    rows = []
    for group in groups if is_brief else [[entry] for entry in entries]:
        axis, kind, rank, _ = group[0]
        rows.append((axis, kind, str(len(group) if is_brief else rank), *_totals([comm for *_, comm in group])))
    ranks = "ranks" if is_brief else "rank"
    columns: tuple[str, ...] = (
        "axis",
        "kind",
        ranks,
        "of",
        "count",
        "bytes",
        "total ms",
        "overlap",
        "bus B/s",
        "waiting ms",
    )
    if all(comm.wait_ns is None for *_, comm in entries):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    title = "Communication, whole trace (times with waiting)"
    notes = ("means over the ranks; --all lists them",) if is_brief else ()
    return ReportTable("comm-totals", title, columns, tuple(rows), notes, 2, leave_out=(8, 3, 4))


def _totals(comms: Sequence[CommTotal]) -> tuple[str, ...]:
    """The cells of one rank's calls, or of several ranks': means."""
    sizes = {comm.group_size for comm in comms}
    ratios = [comm.overlap_ratio for comm in comms if comm.overlap_ratio is not None]
    rates = [comm.busbw_gbps for comm in comms if comm.busbw_gbps is not None]
    return (
        str(size) if len(sizes) == 1 and (size := sizes.pop()) is not None else "–",
        str(mean(comm.count for comm in comms)),
        units.num_bytes(mean(comm.bytes for comm in comms)),
        units.milliseconds(mean(comm.total_ns for comm in comms)),
        units.percent(fmean(ratios) if ratios else None),
        units.bandwidth(fmean(rates) if rates else None),
        units.milliseconds(mean(comm.wait_ns for comm in comms)),
    )


def device_table(report: Report, amount: Amount) -> ReportTable:
    """Device time of each rank's whole trace; of many ranks, the mean and the extremes."""
    entries = [entry for entry in report.device if entry.breakdown.busy_ns is not None]
    labelled = mean_and_extremes(entries, amount, lambda entry: entry.rank, lambda entry: entry.breakdown.busy_ns or 0)
    notes = [
        "of each rank from its first kernel to the end of its last one; communication is what no compute overlaps, memory what "
        "neither does"
    ]
    if labelled and labelled[0][0] == "mean":
        extremes = "the ranks whose devices were busy least and most"
        notes.insert(0, f"the mean of {len(entries)} ranks, and {extremes}; --all lists them")
    names = ("busy_ns", "compute_ns", "communication_ns", "memory_ns", "idle_ns")
    rows = []
    for label, group in labelled:
        means = [mean(getattr(entry.breakdown, name) for entry in group) for name in names]
        ratios = [entry.breakdown.overlap_ratio for entry in group if entry.breakdown.overlap_ratio is not None]
        rows.append((label, *map(units.milliseconds, means), units.percent(fmean(ratios) if ratios else None)))
    columns = ("rank", "busy ms", "compute ms", "communication ms", "memory ms", "idle ms", "overlap")
    return ReportTable("device", f"Device, whole trace{as_recorded(report)}", columns, tuple(rows), tuple(notes))


def host_window_table(report: Report, amount: Amount) -> ReportTable:
    """Time of hosts without devices in their whole traces, by what they did; of many ranks, the mean and the extremes."""
    entries = [(entry.rank, entry.on_host) for entry in report.device if entry.on_host is not None]
    groups = mean_and_extremes(entries, amount, lambda entry: entry[0], lambda entry: entry[1].compute_ns)
    notes: tuple[str, ...] = ()
    if groups and groups[0][0] == "mean":
        notes = (f"the mean of {len(entries)} ranks, and those that computed least and most; --all lists them",)
    rows = []
    for label, group in groups:
        times = [
            (host.last_ns - host.first_ns, host.compute_ns, host.communication_ns, host.rest_ns) for _, host in group
        ]
        rows.append((label, *(units.milliseconds(mean(values)) for values in zip(*times, strict=True))))
    columns = ("rank", "length ms", "compute ms", "communication ms", "between operators ms")
    return ReportTable("host-window", "Host, whole trace (communication with waiting)", columns, tuple(rows), notes)
