"""Links of a run, from what each rank communicated; peaks of its devices' links, and what collectives reach of them.

Communication of one rank by the other side: what the links of a run are joined from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.analysis.aligned import AlignedRun, StepsOfRank
from pptrace.analysis.links.collectives import (
    collectives_of,
    fast_of_groups,
    findings_on_hosts,
    grouped,
    groups_of_axis,
    sizes_of_rank,
    with_peaks,
)
from pptrace.analysis.links.peaks import (
    NO_NETWORK,
    Facts,
    device_of,
    fast_of_sizes,
    fit_link,
    is_same_host,
    peak_between,
    peak_of_device,
    ports_between,
    settings_of,
    share_of_peak,
    unknown_peaks,
)
from pptrace.analysis.links.types import CollectiveRate, DevicePeak, Interconnect, LateRank, Link
from pptrace.analysis.result import behind_critical
from pptrace.intervals import Int64
from pptrace.marks import P2P
from pptrace.model.known import all_known, common
from pptrace.model.mesh import MeshInfo
from pptrace.slices import Slice, distinct_of, places_of_each, reduce_groups
from pptrace.timeline.windows import StepWindow

if TYPE_CHECKING:
    from pptrace.analysis.questions import QuestionInputs
    from pptrace.analysis.report import Report


class RankTraffic(Struct, frozen=True, eq=False):
    """Sums over one rank's matched communication in the steps of a report, ns.

    ``messages`` has a row for each ``axis``, ``kind`` (send or recv), ``peer`` and size (``bytes``, −1 unknown): ``count``, the
    sums ``transfer`` and ``wait``, the transfer ``fast``, below which a tenth of them are, and ``slack``: the time for which
    messages might have been under way before the rank asked for them. Of several that went together (:func:`_with_others`)
    ``until`` is how many bytes had been moved when one was there, which is what ``fast`` is of; of ``transfer`` and ``slack``
    what each took beyond those before it counts. ``collectives`` has one for each ``axis`` and ``kind``:
    ``count``, ``num_last`` (calls that the rank was the last to enter) and ``wait``. ``on_device``: all of it was timed on the
    device. ``sizes`` are collectives by size, those without a match too (:mod:`pptrace.analysis.links.collectives`).
    """

    rank: int
    messages: Slice
    collectives: Slice
    on_device: bool = False
    sizes: Slice = field(default_factory=lambda: Slice.empty("count"))


def steps_of_ranks(windows: Iterable[StepWindow]) -> dict[int, list[int]]:
    """The steps of each rank."""
    steps: dict[int, list[int]] = {}
    for window in windows:
        for rank in window.ranks:
            steps.setdefault(rank, []).append(window.step)
    return steps


def of_rank(rank: int, steps: StepsOfRank, data: AlignedRun) -> RankTraffic | None:
    """The traffic of a rank in its comparable steps; None of a rank without any, or whose device was not recorded."""
    if not steps.comparable or data.work[rank].missing_device_events:
        return None
    comms, compared = data.rows.of_rank(rank).comms, steps.comparable
    inside = comms.where(slice(*np.searchsorted(comms["step"], (min(compared), max(compared) + 1))))  # in order of step
    if len(compared) <= max(compared) - min(compared):
        inside = inside.where(np.isin(inside["step"], compared))
    return traffic_of(rank, inside)


def traffic_of(rank: int, comms: Slice) -> RankTraffic:
    """Sum up a rank's rows (schema COMMS) with transfers filled; rows without a match are left out."""
    sizes = sizes_of_rank(comms)
    comms = comms.only(_COLUMNS).where(comms["match"] >= 0)
    is_message = comms.among("kind", P2P)
    on_device = bool((comms["clock"] == "device").all()) and len(comms) > 0
    rows = comms.where(~is_message & (comms["group_size"] > 1))
    keys, group, first = grouped(rows, ("axis", "kind"))
    wait = rows["end_ns"] - rows["start_ns"] - (rows["transfer_end_ns"] - rows["transfer_start_ns"])
    is_last = rows["transfer_start_ns"] <= rows["start_ns"]
    sums = {
        "count": np.bincount(group, minlength=len(first)),
        "num_last": np.bincount(group[is_last], minlength=len(first)),
        "wait": reduce_groups(np.add, wait, group, len(first)),
    }
    return RankTraffic(rank, _messages(comms.where(is_message)), Slice({**keys, **sums}), on_device, sizes)


_COLUMNS = (
    *("axis", "kind", "peer", "bytes", "group_size", "clock", "stage", "microbatch"),
    *("start_ns", "asked_ns", "end_ns", "transfer_start_ns", "transfer_end_ns"),
)


def _messages(rows: Slice) -> Slice:
    transfer = rows["transfer_end_ns"] - rows["transfer_start_ns"]
    slack = np.where(rows["kind"] == "recv", np.maximum(rows["asked_ns"] - rows["transfer_start_ns"], 0), 0)
    until, before = _with_others(rows)

    def beyond(ns: Int64) -> Int64:
        """The time of each beyond that of the one before it on its link."""
        longer: Int64 = np.maximum(ns - np.append(ns, 0)[before], 0)
        return longer

    rows = rows.with_columns({"until": until})
    keys, group, first = grouped(rows, ("axis", "kind"), ("peer", "bytes", "until"))
    return Slice(
        {
            **keys,
            "count": np.bincount(group, minlength=len(first)),
            "transfer": reduce_groups(np.add, beyond(transfer), group, len(first)),
            "wait": reduce_groups(np.add, rows["end_ns"] - rows["start_ns"] - transfer, group, len(first)),
            "slack": reduce_groups(np.add, beyond(slack), group, len(first)),
            "fast": fast_of_groups(transfer, group, len(first)),
        }
    )


def _with_others(rows: Slice) -> tuple[Int64, Int64]:
    """(bytes that had been moved when each message was there, the row of the one before it on its link, −1 of the first).

    The tensors of a stage that passes on several are posted together and share their link: the first is alone on it, and when the
    last is there all have been moved.
    """
    of_text = (rows.codes(name)[0] for name in ("axis", "kind"))
    of_message = (rows[name] for name in ("peer", "stage", "microbatch", "start_ns", "transfer_start_ns"))
    alone = np.where(rows["microbatch"] < 0, np.arange(len(rows)), -1)
    group, first = distinct_of([*of_text, *of_message, alone])
    sizes, before = rows["bytes"], np.full(len(rows), -1)
    if len(first) == len(group):
        return sizes, before
    order = np.lexsort((rows["transfer_end_ns"], group))
    is_next = np.append(False, group[order][1:] == group[order][:-1])
    before[order[is_next]] = np.append(-1, order[:-1])[is_next]
    moved = np.cumsum(sizes[order])
    begins = np.maximum.accumulate(np.where(is_next, 0, np.arange(len(order))))
    until = np.empty_like(sizes)
    until[order] = moved - (moved - sizes[order])[begins]
    return np.where(sizes < 0, sizes, until), before


def answer(inputs: QuestionInputs) -> Mapping[str, Any]:
    """The links between ranks, how often each was late, the peaks of their devices' links, and how fast collectives are."""
    ranks, facts, mesh = list(inputs.of_ranks.values()), inputs.run.facts, inputs.run.mesh
    report, numbers = inputs.report, [traffic.rank for traffic in ranks]
    interconnect = interconnect_of(report, ranks, facts, mesh)
    collectives = collectives_of((traffic.sizes for traffic in ranks), numbers, facts, mesh)
    on_hosts = findings_on_hosts(collectives, report.steps, numbers, facts, mesh)
    return {
        "links": links_of(ranks, facts),
        "late_ranks": late_ranks_of(ranks),
        "interconnect": interconnect,
        "collectives": with_peaks(collectives, interconnect),
        "findings": behind_critical(report.findings, on_hosts),
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
    speeds = with_peaks(report.collectives, interconnect)
    return replace(report, links=tuple(map(compared, report.links)), interconnect=interconnect, collectives=speeds)


def links_of(ranks: Sequence[RankTraffic], facts: Mapping[int, Mapping[str, object]]) -> tuple[Link, ...]:
    """The links of each axis, the one with most waiting first.

    The side that receives says how often, how much and how long; what each side waited is the other's lateness.
    """
    ends = _joined(ranks, "messages")
    if not len(ends):
        return ()
    source, target = np.where(ends["kind"] == "recv", (ends["peer"], ends["rank"]), (ends["rank"], ends["peer"]))
    ends = ends.with_columns({"source": source, "target": target})
    on_device = {traffic.rank for traffic in ranks if traffic.on_device}
    link, _ = distinct_of([ends["axis"], source, target])
    links = [_link(ends.where(rows), facts, on_device) for rows in places_of_each(link).values()]
    return tuple(
        sorted(links, key=lambda of: (-of.late_sender_ns - of.late_receiver_ns, of.axis, of.source, of.target))
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
    fit = fit_link(*fast_of_sizes(received["until"], received["fast"], count))
    same_host = is_same_host((source, target), facts)
    return Link(
        axis=axis,
        source=source,
        target=target,
        is_same_host=same_host,
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
        share_of_peak=None if peak is None or rate is None else share_of_peak(rate, peak.gbps, same_host),
        fit_reason=fit.reason,
    )


def late_ranks_of(ranks: Sequence[RankTraffic]) -> tuple[LateRank, ...]:
    """Number of collectives that each rank was the last to enter, by axis and kind, the most often late first."""
    rows = _joined(ranks, "collectives")
    names = ("axis", "kind", "rank", "count", "num_last", "wait")
    late = map(LateRank, *(rows[name].tolist() for name in names)) if len(rows) else ()
    return tuple(sorted(late, key=lambda entry: (entry.axis, entry.kind, -entry.num_last, entry.rank)))


def _joined(ranks: Iterable[RankTraffic], name: str) -> Slice:
    """The rows of a table of all ranks, with their ``rank``."""
    tables: list[tuple[int, Slice]] = [(traffic.rank, getattr(traffic, name)) for traffic in ranks]
    with_ranks = [rows.with_columns({"rank": np.full(len(rows), rank)}) for rank, rows in tables]
    return Slice.joined(with_ranks) if with_ranks else Slice.empty("rank")


def interconnect_of(report: Report, ranks: Sequence[RankTraffic], facts: Facts, mesh: MeshInfo) -> Interconnect | None:
    """The peaks of the devices that communicated, and the rates of their collectives; None where no device did."""
    on_device = [traffic.rank for traffic in ranks if traffic.on_device]
    if not on_device:
        return None
    devices = tuple(_device(rank, facts) for rank in on_device)
    of_ranks = frozenset(on_device)
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for step in report.steps:
        for comm in (comm for rank in step.ranks if rank.rank in of_ranks for comm in rank.comms):
            if comm.kind in P2P or comm.busbw_gbps is None or comm.total_ns is None or comm.wait_ns is None:
                continue
            if transfer := comm.total_ns - comm.wait_ns:
                moved, taken = sums.get((comm.axis, comm.kind), (0.0, 0))
                sums[comm.axis, comm.kind] = moved + comm.busbw_gbps * transfer, taken + transfer
    rates = {key: moved / taken for key, (moved, taken) in sums.items()}
    collectives = tuple(
        _collective(axis, kind, rate, on_device, facts, mesh) for (axis, kind), rate in sorted(rates.items())
    )
    return Interconnect(devices, collectives, tuple(unknown_peaks(on_device, facts)), settings_of(on_device, facts))


def _device(rank: int, facts: Facts) -> DevicePeak:
    name = device_of(facts.get(rank, {}))
    peak = peak_of_device(name)
    return DevicePeak(rank, name, None if peak is None else peak.link, None if peak is None else peak.gbps)


def _collective(
    axis: str, kind: str, rate: float, ranks: Sequence[int], facts: Facts, mesh: MeshInfo
) -> CollectiveRate:
    groups = groups_of_axis(axis, ranks, facts, mesh)
    is_same = common(is_same_host(group, facts) for group in groups)
    of_groups = [ports_between(kind, group, facts) for group in groups] if is_same is False else []
    ports = min((of_group for of_group in of_groups if of_group is not None), default=None)
    peaks = [_peak_of(group, kind, facts) for group in groups] if is_same is not None else []
    known = all_known(peaks)
    peak = min(known) if known else None
    share = None if peak is None else share_of_peak(rate, peak, is_same)
    return CollectiveRate(axis, kind, is_same, rate, peak, share, ports)


def _peak_of(group: Sequence[int], kind: str, facts: Facts) -> float | None:
    """The most that a group's bus bandwidth can be, GB/s."""
    peak, ports = peak_between(group, facts), ports_between(kind, group, facts)
    if peak is None or ports is None:
        return None if peak is None else peak.gbps
    return between_hosts(ports, peak.gbps, (_device(rank, facts).peak_gbps for rank in group))


def between_hosts(ports: float, port_gbps: float, devices: Iterable[float | None]) -> float:
    """The most that the bus bandwidth of a collective between hosts can be, GB/s: that of its ports, and of what leads to them.

    Args:
        ports: as in :class:`~pptrace.analysis.links.types.CollectiveRate`.
        port_gbps: of one port.
        devices: peaks of the members, of which several on a host are joined by them; those that are known.
    """
    known = [gbps for gbps in devices if gbps is not None]
    return min(ports * port_gbps, *known) if ports > 1 and known else ports * port_gbps
