"""The tables of links between ranks, and of ranks that are late to collectives."""

from __future__ import annotations

from pptrace.analysis.result import Report
from pptrace.analysis.whole_run import CollectiveRate, Interconnect, Link
from pptrace.report import units
from pptrace.report.tables.table import Columns, ReportTable, rows_of

_MOST_REASONS = 3


_LINK_COLUMNS: Columns[Link] = {
    "axis": lambda link: link.axis,
    "ranks": lambda link: f"{link.source} → {link.target}",
    "": lambda link: {True: "same host", False: "two hosts", None: "–"}[link.is_same_host],
    "count": lambda link: str(link.count),
    "bytes": lambda link: units.num_bytes(link.bytes),
    "transfer ms": lambda link: units.milliseconds(link.transfer_ns),
    "late sender ms": lambda link: units.milliseconds(link.late_sender_ns),
    "late receiver ms": lambda link: units.milliseconds(link.late_receiver_ns),
    "B/s": lambda link: units.bandwidth(link.algbw_gbps),
    "of peak": lambda link: units.percent(link.share_of_peak),
    "needed B/s": lambda link: units.bandwidth(link.required_gbps),
    "latency µs": lambda link: "–" if link.latency_ns is None else f"{link.latency_ns / 1e3:.1f}",
    "fitted B/s": lambda link: units.bandwidth(link.bandwidth_gbps),
}


def links_table(report: Report) -> ReportTable:
    """A row for each pair of ranks, way and axis, over all steps of the report; the one with most waiting first."""
    reasons = sorted({link.fit_reason for link in report.links if link.fit_reason is not None})
    notes = (
        "late sender: the receiver waited; needed: would hide the messages; latency + bytes / fitted: fast transfers",
        "of peak: what NVLink or PCIe of these devices moves in one direction at most",
        *([f"not fitted where {'; where '.join(reasons[:_MOST_REASONS])}"] if reasons else []),
    )
    rows, columns = rows_of(report.links, _LINK_COLUMNS), tuple(_LINK_COLUMNS)
    return ReportTable("links", "Links, all steps", columns, rows, notes, num_labels=3, leave_out=(11, 12, 10, 9, 8))


def late_ranks_table(report: Report) -> ReportTable:
    """A row for each rank, axis and kind of collective: how often it was the last to enter, and how long it waited itself."""
    rows = [
        (late.axis, late.kind, str(late.rank), str(late.count), str(late.num_last), units.milliseconds(late.wait_ns))
        for late in report.late_ranks
    ]
    columns = ("axis", "kind", "rank", "calls", "came last", "waited ms")
    return ReportTable("late-ranks", "Who comes last to collectives, all steps", columns, tuple(rows), num_labels=3)


_RATE_COLUMNS: Columns[CollectiveRate] = {
    "axis": lambda rate: rate.axis,
    "kind": lambda rate: rate.kind,
    "groups": lambda rate: {True: "same host", False: "several hosts", None: "–"}[rate.is_same_host],
    "bus B/s": lambda rate: units.bandwidth(rate.busbw_gbps),
    "peak B/s": lambda rate: units.bandwidth(rate.peak_gbps),
    "of peak": lambda rate: units.percent(rate.share_of_peak),
}


def collectives_table(interconnect: Interconnect) -> ReportTable:
    """A row for each axis and kind of collective on devices: its bus bandwidth and what share of the links' peak that is."""
    title, rows = "Bandwidth of collectives, all steps", rows_of(interconnect.collectives, _RATE_COLUMNS)
    return ReportTable("interconnect", title, tuple(_RATE_COLUMNS), rows, interconnect.reasons, num_labels=3)
