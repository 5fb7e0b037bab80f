"""The tables of links between ranks, and of ranks that are late to collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pptrace.analysis.links.types import CollectiveRate, CollectiveSize, CollectiveSpeed, Interconnect, LateRank, Link
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
    shown += [sizes_table(report.collectives)] if report.collectives else []
    interconnect = report.interconnect
    return [*shown, collectives_table(interconnect)] if interconnect is not None and interconnect.collectives else shown


FILES: Mapping[str, Rows] = {
    "links": (lambda report: report.links, "messages from rank to rank: bytes, waiting, latency, bandwidth"),
    "late-ranks": (lambda report: report.late_ranks, "who comes last to collectives"),
    "interconnect": (
        lambda report: () if report.interconnect is None else report.interconnect.collectives,
        "bandwidth of collectives against the interconnect's",
    ),
    "collectives": (lambda report: report.collectives, "collectives by size: latency, bandwidth, algorithm"),
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
    notes = (
        "late sender: the receiver waited; needed: would hide the messages; latency + bytes / fitted: fast transfers",
        "of peak: what NVLink or PCIe of these devices moves in one direction at most",
        *_not_fitted(report.links),
        *([] if report.interconnect is None or report.interconnect.collectives else _settings(report.interconnect)),
    )
    return table_of("links", "Links, all steps", report.links, _LINK_COLUMNS, notes, 3, (11, 12, 10, 9, 8))


def _not_fitted(lines: Sequence[Link | CollectiveSpeed]) -> list[str]:
    reasons = sorted({line.fit_reason for line in lines if line.fit_reason is not None})
    return [f"not fitted where {'; where '.join(reasons[:_MOST_REASONS])}"] if reasons else []


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


_SizeRow = tuple[CollectiveSpeed, CollectiveSize]
_SIZE_COLUMNS: Columns[_SizeRow] = {
    "axis": lambda row: row[0].axis,
    "kind": lambda row: row[0].kind,
    "of ranks": lambda row: units.number(row[0].group_size),
    "": lambda row: _HOSTS[row[0].is_same_host].replace("two", "several"),
    "kernel": lambda row: f"{row[0].kernel_algorithm or '–'} {row[0].kernel_protocol or ''}".strip(),
    "bytes": lambda row: units.num_bytes(row[1].bytes),
    "calls": lambda row: str(row[1].count),
    "fast µs": lambda row: _microseconds(row[1].fast_ns),
    "bus B/s": lambda row: units.bandwidth(row[1].busbw_gbps),
    "latency µs": lambda row: _microseconds(row[0].latency_ns),
    "fitted bus B/s": lambda row: units.bandwidth(row[0].bandwidth_gbps),
    "peak B/s": lambda row: units.bandwidth(row[0].peak_gbps),
    "steps ring / tree": lambda row: f"{row[0].ring_steps or '–'} / {row[0].tree_steps or '–'}",
}


def sizes_table(collectives: Sequence[CollectiveSpeed]) -> ReportTable:
    """A row for each size of the collectives of an axis, kind, size of group and kernel."""
    notes = [
        "fast: from when the last member had come, a tenth are faster; latency + bus bytes / fitted: of all sizes",
        *_not_fitted(collectives),
    ]
    if any(speed.kernel_algorithm for speed in collectives):
        notes.append(
            "kernel: what NCCL named it after, which runs others too: all protocols are named LL (from 2.8 on), NVLS and PAT ring"
        )
    if any(speed.exceeds_ll for speed in collectives):
        notes.append("LL moves half of the peak at most: what moves more here ran another protocol")
    rows = [(speed, size) for speed in collectives for size in speed.sizes]
    return table_of("collectives", "Collectives by size, all steps", rows, _SIZE_COLUMNS, notes, 4, (12, 11, 3))


def _microseconds(ns: int | None) -> str:
    return "–" if ns is None else f"{ns / 1e3:,.1f}"
