"""The tables of links between ranks, and of ranks that are late to collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pptrace.analysis.links.types import CollectiveRate, Interconnect, LateRank, Link
from pptrace.model import units
from pptrace.model.report_table import Amount, Columns, ReportTable, table_of

if TYPE_CHECKING:
    from pptrace.analysis.questions import Rows
    from pptrace.analysis.report import Report


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


_HOSTS = {True: "same host", False: "two hosts", None: "–"}
_LINK_COLUMNS: Columns[Link] = {
    "axis": lambda link: link.axis,
    "ranks": lambda link: f"{link.source} → {link.target}",
    "": lambda link: _HOSTS[link.is_same_host],
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
_MOST_REASONS = 3


def links_table(report: Report) -> ReportTable:
    """A row for each pair of ranks, way and axis, over all steps of the report; the one with most waiting first."""
    reasons = sorted({link.fit_reason for link in report.links if link.fit_reason is not None})
    notes = (
        "late sender: the receiver waited; needed: would hide the messages; latency + bytes / fitted: fast transfers",
        "of peak: what NVLink or PCIe of these devices moves in one direction at most",
        *([f"not fitted where {'; where '.join(reasons[:_MOST_REASONS])}"] if reasons else []),
        *([] if report.interconnect is None or report.interconnect.collectives else _settings(report.interconnect)),
    )
    return table_of("links", "Links, all steps", report.links, _LINK_COLUMNS, notes, 3, (11, 12, 10, 9, 8))


def late_ranks_table(report: Report) -> ReportTable:
    """A row for each rank, axis and kind of collective: how often it was the last to enter, and how long it waited itself."""
    columns: Columns[LateRank] = {
        "axis": lambda late: late.axis,
        "kind": lambda late: late.kind,
        "rank": lambda late: str(late.rank),
        "calls": lambda late: str(late.count),
        "came last": lambda late: str(late.num_last),
        "waited ms": lambda late: units.milliseconds(late.wait_ns),
    }
    title = "Who comes last to collectives, all steps"
    return table_of("late-ranks", title, report.late_ranks, columns, num_labels=3)


def collectives_table(interconnect: Interconnect) -> ReportTable:
    """A row for each axis and kind of collective on devices: its bus bandwidth and what share of the links' peak that is."""
    columns: Columns[CollectiveRate] = {
        "axis": lambda rate: rate.axis,
        "kind": lambda rate: rate.kind,
        "groups": lambda rate: _HOSTS[rate.is_same_host].replace("two", "several"),
        "bus B/s": lambda rate: units.bandwidth(rate.busbw_gbps),
        "peak B/s": lambda rate: units.bandwidth(rate.peak_gbps),
        "of peak": lambda rate: units.percent(rate.share_of_peak),
    }
    title = "Bandwidth of collectives, all steps"
    notes = (*interconnect.reasons, *_settings(interconnect))
    return table_of("interconnect", title, interconnect.collectives, columns, notes, 3)


def _settings(interconnect: Interconnect) -> list[str]:
    return [f"with {', '.join(interconnect.settings)}"] if interconnect.settings else []
