"""Links of a run, from what each rank communicated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.analysis.links.fit import fit_link
from pptrace.analysis.links.interconnect import between_hosts, interconnect_of
from pptrace.analysis.links.peaks import NO_NETWORK, is_same_host, peak_between
from pptrace.analysis.links.rank_traffic import RankTraffic, of_rank
from pptrace.analysis.links.types import CollectiveRate, LateRank, Link
from pptrace.analysis.result import Report
from pptrace.slices import Slice, slices

if TYPE_CHECKING:
    from pptrace.analysis.questions import Asked

__all__ = ["answer", "late_ranks_of", "links_of", "of_rank", "with_network"]


def answer(asked: Asked) -> Mapping[str, Any]:
    """The links between ranks, how often each was late, and the peaks of their devices' links."""
    ranks, facts, mesh = list(asked.of_ranks.values()), asked.run.facts, asked.run.mesh
    return {
        "links": links_of(ranks, facts),
        "late_ranks": late_ranks_of(ranks),
        "interconnect": interconnect_of(asked.report, ranks, facts, mesh),
    }


def with_network(report: Report, gbps: float) -> Report:
    """The report with ``gbps`` (GB/s) as the rate of a port of the network: the peak of all links between devices of
    different hosts, and what peaks of collectives between hosts are made of.
    """
    if report.interconnect is None:
        return report
    devices = report.interconnect.devices
    on_device = {device.rank for device in devices}

    def compared(link: Link) -> Link:
        if link.is_same_host is not False or not {link.source, link.target} <= on_device:
            return link
        share = None if link.algbw_gbps is None else link.algbw_gbps / gbps
        return replace(link, peak_gbps=gbps, share_of_peak=share)

    def of_collective(rate: CollectiveRate) -> CollectiveRate:
        if rate.ports is None:
            return rate
        peak = between_hosts(rate.ports, gbps, (device.peak_gbps for device in devices))
        return replace(rate, peak_gbps=peak, share_of_peak=rate.busbw_gbps / peak)

    collectives = tuple(map(of_collective, report.interconnect.collectives))
    reasons = tuple(reason for reason in report.interconnect.reasons if reason != NO_NETWORK)
    interconnect = replace(report.interconnect, collectives=collectives, reasons=reasons)
    return replace(report, links=tuple(map(compared, report.links)), interconnect=interconnect)


def links_of(ranks: Sequence[RankTraffic], facts: Mapping[int, Mapping[str, object]]) -> tuple[Link, ...]:
    """The links of each axis, the one with most waiting first.

    The side that receives says how often, how much and how long; what each side waited is the other's lateness.
    """
    ends = _joined(ranks, "messages")
    if ends.empty:
        return ()
    is_recv = (ends["kind"] == "recv").to_numpy()
    source, target = np.where(is_recv, (ends["peer"], ends["rank"]), (ends["rank"], ends["peer"]))
    ends = ends.assign(source=source, target=target)
    on_device = {traffic.rank for traffic in ranks if traffic.on_device}
    links = [_link(rows, facts, on_device) for rows in slices(ends, ("axis", "source", "target")).values()]
    return tuple(
        sorted(
            links, key=lambda link: (-link.late_sender_ns - link.late_receiver_ns, link.axis, link.source, link.target)
        )
    )


def _link(ends: Slice, facts: Mapping[int, Mapping[str, object]], on_device: Collection[int]) -> Link:
    is_recv, wait = ends["kind"] == "recv", ends["wait"]
    received = ends.where(is_recv) if is_recv.any() else ends
    axis, source, target = str(ends.first("axis")), int(ends.first("source")), int(ends.first("target"))
    sizes, count = received["bytes"], received["count"]
    is_known = bool((sizes >= 0).all())
    num_bytes = int((sizes * count).sum()) if is_known else None
    transfer, slack = int(received["transfer"].sum()), int(received["slack"].sum())
    rate = num_bytes / transfer if num_bytes is not None and transfer else None
    peak = peak_between((source, target), facts) if set(ends["rank"].tolist()) <= set(on_device) else None
    fit = fit_link(sizes, received["fast"], count)
    return Link(
        axis=axis,
        source=source,
        target=target,
        is_same_host=is_same_host((source, target), facts),
        count=int(count.sum()),
        bytes=num_bytes,
        transfer_ns=transfer,
        late_sender_ns=int(wait[is_recv].sum()),
        late_receiver_ns=int(wait[~is_recv].sum()),
        slack_ns=slack,
        required_gbps=num_bytes / slack if num_bytes is not None and slack else None,
        algbw_gbps=rate,
        latency_ns=fit.latency_ns,
        bandwidth_gbps=fit.bandwidth_gbps,
        peak_gbps=None if peak is None else peak.gbps,
        share_of_peak=None if peak is None or rate is None else rate / peak.gbps,
        fit_reason=fit.reason,
    )


def late_ranks_of(ranks: Sequence[RankTraffic]) -> tuple[LateRank, ...]:
    """Number of collectives that each rank was the last to enter, by axis and kind, the most often late first."""
    rows = _joined(ranks, "collectives")
    late = [
        LateRank(str(axis), str(kind), int(rank), int(count), int(num_last), int(wait))
        for axis, kind, rank, count, num_last, wait in rows.itertuples(index=False)
    ]
    return tuple(sorted(late, key=lambda entry: (entry.axis, entry.kind, -entry.num_last, entry.rank)))


def _joined(ranks: Iterable[RankTraffic], name: str) -> pd.DataFrame:
    tables: list[Slice] = []
    for traffic in ranks:
        rows: Slice = getattr(traffic, name)
        tables.append(Slice({**rows.columns, "rank": np.full(len(rows), traffic.rank)}))
    columns: dict[str, npt.NDArray[np.generic]] = {
        key: np.concatenate([table[key] for table in tables]) for key in (tables[0].columns if tables else ())
    }
    frame = pd.DataFrame(columns)
    return frame if name == "messages" else frame.reindex(columns=["axis", "kind", "rank", "count", "num_last", "wait"])
