"""Peaks of the links between the devices of a run, and what its collectives reach of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pptrace.analysis.links.peaks import (
    Facts,
    device_of,
    is_same_host,
    members_of,
    peak_between,
    peak_of_device,
    ports_between,
    unknown_peaks,
)
from pptrace.analysis.links.rank_traffic import RankTraffic
from pptrace.analysis.links.types import CollectiveRate, DevicePeak, Interconnect
from pptrace.analysis.result import CommSummary, Report
from pptrace.marks import P2P
from pptrace.model.mesh import MeshInfo


def interconnect_of(report: Report, ranks: Sequence[RankTraffic], facts: Facts, mesh: MeshInfo) -> Interconnect | None:
    """The peaks of the devices that communicated, and the rates of their collectives; None where no device did."""
    on_device = [traffic.rank for traffic in ranks if traffic.on_device]
    if not on_device:
        return None
    devices = tuple(_device(rank, device_of(facts.get(rank, {}))) for rank in on_device)
    rates = _rates(report, frozenset(on_device))
    collectives = tuple(
        _collective(axis, kind, rate, on_device, facts, mesh) for (axis, kind), rate in sorted(rates.items())
    )
    return Interconnect(devices, collectives, tuple(unknown_peaks(on_device, facts)))


def _device(rank: int, name: str | None) -> DevicePeak:
    peak = None if name is None else peak_of_device(name)
    return DevicePeak(rank, name, None if peak is None else peak.link, None if peak is None else peak.gbps)


def _rates(report: Report, ranks: frozenset[int]) -> dict[tuple[str, str], float]:
    """Bus bandwidth of the collectives of some ranks, by axis and kind: all their bytes over all their transfers, GB/s."""
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for step in report.steps:
        for comm in (comm for rank in step.ranks if rank.rank in ranks for comm in rank.comms):
            if comm.kind not in P2P and (transfer := _transfer_ns(comm)):
                moved, taken = sums.get((comm.axis, comm.kind), (0.0, 0))
                sums[comm.axis, comm.kind] = moved + (comm.busbw_gbps or 0.0) * transfer, taken + transfer
    return {key: moved / taken for key, (moved, taken) in sums.items()}


def _transfer_ns(comm: CommSummary) -> int:
    """Transfer of communication whose bandwidth is known, else 0."""
    if comm.busbw_gbps is None or comm.total_ns is None or comm.wait_ns is None:
        return 0
    return comm.total_ns - comm.wait_ns


def _collective(
    axis: str, kind: str, rate: float, ranks: Sequence[int], facts: Facts, mesh: MeshInfo
) -> CollectiveRate:
    on_one_host = is_same_host(ranks, facts)
    groups = ([tuple(ranks)] if on_one_host else members_of(axis, mesh, ranks)) or []
    hosts = {is_same_host(group, facts) for group in groups}
    is_same = hosts.pop() if len(hosts) == 1 else None
    of_groups = [ports_between(kind, group, facts) for group in groups] if is_same is False else []
    ports = min((of_group for of_group in of_groups if of_group is not None), default=None)
    peaks = [_peak_of(group, kind, facts) for group in groups] if is_same is not None else []
    known = [peak for peak in peaks if peak is not None]
    peak = min(known) if known and len(known) == len(peaks) else None
    return CollectiveRate(axis, kind, is_same, rate, peak, None if peak is None else rate / peak, ports)


def _peak_of(group: Sequence[int], kind: str, facts: Facts) -> float | None:
    """The most that a group's bus bandwidth can be, GB/s."""
    peak, ports = peak_between(group, facts), ports_between(kind, group, facts)
    if peak is None or ports is None:
        return None if peak is None else peak.gbps
    devices = [_device(rank, device_of(facts.get(rank, {}))).peak_gbps for rank in group]
    return between_hosts(ports, peak.gbps, devices)


def between_hosts(ports: float, port_gbps: float, devices: Iterable[float | None]) -> float:
    """The most that the bus bandwidth of a collective between hosts can be, GB/s: that of its ports, and of what leads to them.

    Args:
        ports: as in :class:`~pptrace.analysis.whole_run.CollectiveRate`.
        port_gbps: of one port.
        devices: peaks of the members, of which several on a host are joined by them; those that are known.
    """
    known = [gbps for gbps in devices if gbps is not None]
    return min(ports * port_gbps, *known) if ports > 1 and known else ports * port_gbps
