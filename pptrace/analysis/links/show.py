"""The tables of links between ranks, and of ranks that are late to collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pptrace.analysis.links.types import Interconnect
from pptrace.model import units
from pptrace.model.report_table import Amount, ReportTable

if TYPE_CHECKING:
    from pptrace.analysis.questions import Rows
    from pptrace.analysis.result import Report


def tables(report: Report, amount: Amount) -> list[ReportTable]:
    """The tables of the whole amount: of links, of ranks that are late, of collectives on devices."""
    if amount is Amount.BRIEF:
        return []
    shown = [links_table(report)] if report.links else []
    shown += [late_ranks_table(report)] if report.late_ranks else []
    interconnect = report.interconnect
    return [*shown, collectives_table(interconnect)] if interconnect is not None and interconnect.collectives else shown


FILES: Mapping[str, Rows] = {
    "links": (lambda report: report.links, "messages from rank to rank: bytes, waiting, latency, bandwidth"),
    "late-ranks": (lambda report: report.late_ranks, "who comes last to collectives"),
    "interconnect": (
        lambda report: () if report.interconnect is None else report.interconnect.collectives,
        "bandwidth of collectives against the interconnect's",
    ),
}


def links_table(report: Report) -> ReportTable:
    """A row for each pair of ranks, way and axis, over all steps of the report; the one with most waiting first."""
    rows = [
        (
            link.axis,
            f"{link.source} → {link.target}",
            {True: "same host", False: "two hosts", None: "–"}[link.is_same_host],
            str(link.count),
            units.num_bytes(link.bytes),
            units.milliseconds(link.transfer_ns),
            units.milliseconds(link.late_sender_ns),
            units.milliseconds(link.late_receiver_ns),
            units.bandwidth(link.algbw_gbps),
            units.percent(link.share_of_peak),
            units.bandwidth(link.required_gbps),
            "–" if link.latency_ns is None else f"{link.latency_ns / 1e3:.1f}",
            units.bandwidth(link.bandwidth_gbps),
        )
        for link in report.links
    ]
    columns = (
        *("axis", "ranks", "", "count", "bytes", "transfer ms", "late sender ms", "late receiver ms", "B/s", "of peak"),
        *("needed B/s", "latency µs", "fitted B/s"),
    )
    reasons = sorted({link.fit_reason for link in report.links if link.fit_reason is not None})
    notes = (
        "late sender: the receiver waited; needed: would hide the messages; latency + bytes / fitted: fast transfers",
        "of peak: what NVLink or PCIe of these devices moves in one direction at most",
        *([f"not fitted where {'; where '.join(reasons[:_MOST_REASONS])}"] if reasons else []),
    )
    return ReportTable(
        "links", "Links, all steps", columns, tuple(rows), notes, num_labels=3, leave_out=(11, 12, 10, 9, 8)
    )


_MOST_REASONS = 3


def late_ranks_table(report: Report) -> ReportTable:
    """A row for each rank, axis and kind of collective: how often it was the last to enter, and how long it waited itself."""
    rows = [
        (late.axis, late.kind, str(late.rank), str(late.count), str(late.num_last), units.milliseconds(late.wait_ns))
        for late in report.late_ranks
    ]
    columns = ("axis", "kind", "rank", "calls", "came last", "waited ms")
    return ReportTable("late-ranks", "Who comes last to collectives, all steps", columns, tuple(rows), num_labels=3)


def collectives_table(interconnect: Interconnect) -> ReportTable:
    """A row for each axis and kind of collective on devices: its bus bandwidth and what share of the links' peak that is."""
    rows = [
        (
            rate.axis,
            rate.kind,
            _HOSTS[rate.is_same_host],
            units.bandwidth(rate.busbw_gbps),
            units.bandwidth(rate.peak_gbps),
            units.percent(rate.share_of_peak),
        )
        for rate in interconnect.collectives
    ]
    columns = ("axis", "kind", "groups", "bus B/s", "peak B/s", "of peak")
    title = "Bandwidth of collectives, all steps"
    return ReportTable("interconnect", title, columns, tuple(rows), interconnect.reasons, num_labels=3)


_HOSTS = {True: "same host", False: "several hosts", None: "–"}
