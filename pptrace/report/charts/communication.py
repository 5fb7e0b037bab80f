"""Communication: time by axis and kind, bytes and transfer times from rank to rank, and bandwidth against its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import plotly.graph_objects as go

from pptrace.analysis.links.types import Link
from pptrace.analysis.report import Report
from pptrace.analysis.result import CommSummary, StepReport
from pptrace.model import units
from pptrace.model.report_table import mean
from pptrace.report.charts.base import (
    MOST_NAMED,
    add_bars,
    heat_map,
    label_bars,
    lay_out,
    matrix_columns,
    names_axis,
    plain,
)
from pptrace.report.colours import COMMUNICATION, COMPUTE, IDEAL, OTHER, WAIT

MOST_ROWS = 48
"""Most ranks that a matrix shows one by one."""
_MOST_LINKS = 16


_VALUES: Mapping[str, tuple[str, Callable[[int], str], Callable[[Link], int | None]]] = {
    "bytes": ("bytes", units.num_bytes, lambda link: link.bytes),
    "transfer": ("ms", lambda ns: f"{units.milliseconds(ns)} ms", lambda link: link.transfer_ns),
    "late sender": ("ms", lambda ns: f"{units.milliseconds(ns)} ms", lambda link: link.late_sender_ns),
}
"""Figures of the messages from one rank to another: the unit, how one is written, and what it is of a link."""
_PARTS = (
    ("wait_ns", "Waiting for the other side", WAIT),
    ("hidden_ns", "Transfer hidden by compute", COMPUTE),
    ("exposed_ns", "Exposed transfer", COMMUNICATION),
)


def comms_chart(step: StepReport) -> go.Figure | None:
    """Waiting, hidden and exposed transfer of a step by axis and kind, ms, means over the ranks; None without communication.

    Where the trace does not tell waiting from transfer, a bar is both together.
    """
    entries = sorted(
        ((comm.axis, comm.kind, comm) for rank in step.ranks for comm in rank.comms), key=lambda row: row[:2]
    )
    groups = [(key, [comm for *_, comm in rows]) for key, rows in groupby(entries, key=lambda row: row[:2])]
    groups = [(key, comms) for key, comms in groups if any(comm.total_ns for comm in comms)]
    if not groups:
        return None
    figure = go.Figure()
    both = "Waiting or transfer, not known which"
    for name, label, colour in (*_PARTS, ("total_ns", both, OTHER)):
        values = [_mean_ms(comms, name) for _, comms in groups]
        if label == both:
            are_split = [_mean_ms(comms, "wait_ns") is not None for _, comms in groups]
            if all(are_split):
                continue
            values = [None if split else value for value, split in zip(values, are_split, strict=True)]
        hover = f"<b>{label}</b><br>%{{x:,.3f}} ms<extra></extra>"
        add_bars(figure, values, label, colour=colour, width=0.62, hovertemplate=hover)
    return lay_out(
        figure,
        42 * len(groups) + 110,
        "ms of a rank's calls in the step, mean",
        barmode="stack",
        yaxis=names_axis([plain(f"{axis}  {kind}") for (axis, kind), _ in groups]),
    )


def _mean_ms(comms: Sequence[CommSummary], name: str) -> float | None:
    value = mean(getattr(comm, name) for comm in comms)
    return None if value is None else value / 1e6


def stage_of_ranks(report: Report) -> dict[int, int]:
    """The lowest stage of every rank whose stage is known in a step."""
    return {rank.rank: rank.stage for step in report.steps for rank in step.ranks if rank.stage is not None}


def axes_of_links(report: Report) -> list[str]:
    """The axes on which ranks exchange messages, that which costs the steps most first.

    Before all others comes pp where a slow link of it is a finding; of axes that cost the same, nothing or an unknown time, that
    with most bytes comes first.
    """
    sums: Counter[str] = Counter()
    for link in report.links:
        sums[link.axis] += link.bytes or 0
    costs: Counter[str] = Counter()
    for cause in (cause for step in report.steps for cause in step.causes or ()):
        if cause.cause == "communication" and "axis" in cause.where:
            costs[str(cause.where["axis"])] += cause.ns
    if any("link" in finding.evidence.get("where", ()) for finding in report.findings):
        costs["pp"] += sum(costs.values()) + 1
    return sorted(sums, key=lambda axis: (-costs[axis], -sums[axis], axis))


def link_matrix(report: Report, axis: str, what: str) -> go.Figure | None:
    """The bytes, transfer or late sender of messages on an axis as a heat map, senders as rows and receivers as columns, over all
    steps of the report.

    Of more than :data:`MOST_ROWS` ranks the stages are rows, each with the sum of its links and the name of the largest; where
    stages are not known, the ranks with most. None where there is nothing to show.
    """
    unit, text, value = _VALUES[what]
    links = [(link, amount) for link in report.links if link.axis == axis and (amount := value(link))]
    if not links:
        return None
    names = _names(report, links)
    cells: dict[tuple[str, str], list[tuple[Link, int]]] = {}
    for link, amount in links:
        if link.source in names and link.target in names:
            cells.setdefault((names[link.source], names[link.target]), []).append((link, amount))
    labels = sorted(set(names.values()), key=lambda label: int(label.split()[1]))
    sums = {key: sum(amount for _, amount in members) for key, members in cells.items()}
    scale = 1e6 if unit == "ms" else 1
    keys = [[(source, target) for target in labels] for source in labels]
    figure = go.Figure(
        heat_map(
            labels,
            labels,
            [[sums[key] / scale if key in sums else None for key in row] for row in keys],
            unit,
            [[text(sums[key]) if key in sums else "" for key in row] for row in keys],
            [[_hover(cells.get(key), what, text) for key in row] for row in keys],
        )
    )
    return lay_out(
        figure,
        min(max(24 * len(labels), 170), 544) + 96,
        "receiver" if len(labels) <= MOST_NAMED else f"receiver, {labels[0].split()[0]}",
        "sender",
        margin={"l": 16, "r": 16, "t": 10, "b": 46},
        xaxis={"type": "category", "showgrid": False, **matrix_columns(labels)},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
    )


def is_by_stage(report: Report, axis: str) -> bool:
    """Return whether the matrices of an axis have a row for each stage and not for each rank."""
    ranks = {rank for link in report.links if link.axis == axis for rank in (link.source, link.target)}
    return len(ranks) > MOST_ROWS and ranks <= stage_of_ranks(report).keys()


def _names(report: Report, links: Sequence[tuple[Link, int]]) -> dict[int, str]:
    """The row of each rank: its own, its stage's, or none."""
    ranks = sorted({rank for link, _ in links for rank in (link.source, link.target)})
    if len(ranks) <= MOST_ROWS:
        return {rank: f"rank {rank}" for rank in ranks}
    stages = stage_of_ranks(report)
    if all(rank in stages for rank in ranks):
        return {rank: f"stage {stages[rank]}" for rank in ranks}
    most = sorted(links, key=lambda entry: -entry[1])
    chosen = list(dict.fromkeys(rank for link, _ in most for rank in (link.source, link.target)))[:MOST_ROWS]
    return {rank: f"rank {rank}" for rank in sorted(chosen)}


def _hover(members: Sequence[tuple[Link, int]] | None, what: str, text: Callable[[int], str]) -> str:
    if not members:
        return ""
    link, amount = max(members, key=lambda entry: entry[1])
    if len(members) == 1:
        return f"<b>{link.source} → {link.target}</b><br>{what}: {text(amount)}, {units.counted(link.count, 'message')}"
    total = text(sum(value for _, value in members))
    return f"<b>{len(members)} links</b><br>{what}: {total}<br>most: {link.source} → {link.target}, {text(amount)}"


def link_rates(report: Report, axis: str) -> go.Figure | None:
    """The slowest links of an axis, bytes per second of transfer, and their peaks where these are known; None without rates."""
    links = [link for link in report.links if link.axis == axis and link.algbw_gbps is not None]
    links = sorted(links, key=lambda link: (link.algbw_gbps or 0.0, link.source, link.target))[:_MOST_LINKS]
    if not links:
        return None
    rates = [round((link.algbw_gbps or 0.0) * 1e9) for link in links]
    peaks = [None if link.peak_gbps is None else round(link.peak_gbps * 1e9) for link in links]
    texts = [f"{units.num_bytes(rate)}/s" for rate in rates]
    figure, hover = go.Figure(), "%{customdata}<extra></extra>"
    add_bars(figure, rates, "bytes over transfer time", colour=COMMUNICATION, customdata=texts, hovertemplate=hover)
    label_bars(figure, rates, texts)
    most = max(max(rates), *(peak or 0 for peak in peaks))
    has_peak = any(link.peak_gbps is not None for link in links)
    if has_peak:
        figure.add_scatter(
            x=peaks,
            y=list(range(len(links))),
            mode="markers",
            name="peak of the link",
            marker={"symbol": "line-ns-open", "size": 18, "color": IDEAL, "line": {"width": 2.5}},
            hovertemplate="peak %{x:.3s}B/s<extra></extra>",
        )
    return lay_out(
        figure,
        26 * len(links) + (110 if has_peak else 78),
        "bytes per second",
        showlegend=has_peak,
        margin={"l": 16, "r": 16, "t": 42 if has_peak else 10, "b": 46},
        yaxis=names_axis([f"{link.source} → {link.target}" for link in links]),
        xaxis={"range": [0, 1.25 * most], "tickformat": "~s"},
    )
