"""Reference peaks of links: between devices of one host by the devices' names, between hosts by the ports of their network cards.

A peak is what one device or port can send, or receive, at most: GB/s (10⁹ bytes) per direction, as NVIDIA publishes it: half of
the total of both directions for NVLink, 16 lanes for PCIe. No peak is known of cards between which there may be an NVLink bridge
or not. The rate of a port is

    400 Gb/sec (4X NDR)     as Linux writes it (/sys/class/infiniband/*/ports/*/rate), which pptrace run records
    NDR                     InfiniBand over four lanes; NDR200 and HDR100 over two
    100                     Gb/s, as cards are sold

without the line code: 8 of 10 bits up to QDR, 64 of 66 of FDR; from EDR on rates are given without.

Latency and bandwidth of a link from what messages of several sizes take: Hockney's model, time = latency + bytes / bandwidth.

Parallel Computing 20, 1994. Only transfers are fitted, from when both sides were ready, and of each size a fast one: what slows
the others down (a busy core, other messages on the link) is not the link's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from msgspec import Struct

from pptrace.analysis.links.types import Link
from pptrace.axes import MESH_ORDER, Axis, group_of
from pptrace.environment import read_environment
from pptrace.errors import UsageError
from pptrace.intervals import Int64
from pptrace.model.known import all_known
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import Floats
from pptrace.model.traces import DEVICE_NAMES, HOST_NAME
from pptrace.model.wording import as_ranges, counted

Facts = Mapping[int, Mapping[str, object]]


class Peak(Struct, frozen=True):
    """Reference peak of a device's links; ``link`` is ``nvlink``, ``pcie`` or ``network``, ``gbps`` GB/s per direction."""

    link: str
    gbps: float


_PCIE_3, _PCIE_4 = Peak("pcie", 15.75), Peak("pcie", 31.5)

PEAKS: Mapping[tuple[str, ...], Peak] = MappingProxyType(
    {
        ("GB200",): Peak("nvlink", 900),  # GB200 NVL72 datasheet: 1,800 GB/s per GPU
        ("B200",): Peak("nvlink", 900),  # HGX B200 datasheet: 1,800 GB/s per GPU
        ("H200",): Peak("nvlink", 450),  # H200 datasheet, SXM: 900 GB/s
        ("H100", "HBM3"): Peak("nvlink", 450),  # H100 datasheet, SXM: 900 GB/s
        ("H100", "SXM5"): Peak("nvlink", 450),
        ("A100", "SXM4"): Peak("nvlink", 300),  # A100 datasheet, SXM: 600 GB/s
        ("V100", "SXM2"): Peak("nvlink", 150),  # V100 datasheet, SXM2: 300 GB/s
        ("V100", "SXM3"): Peak("nvlink", 150),
        ("V100", "PCIE"): _PCIE_3,  # V100 datasheet, PCIe: 32 GB/s
        ("V100S", "PCIE"): _PCIE_3,
        ("P100", "SXM2"): Peak("nvlink", 80),  # P100 datasheet, SXM2: 160 GB/s
        ("P100", "PCIE"): _PCIE_3,  # P100 datasheet, PCIe: 32 GB/s
        ("T4",): _PCIE_3,  # T4 datasheet: x16 PCIe Gen3
        ("L4",): _PCIE_4,  # L4 datasheet: x16 PCIe Gen4
        ("L40",): _PCIE_4,  # L40 datasheet: x16 PCIe Gen4
        ("L40S",): _PCIE_4,
    }
)
"""Peaks by the words that a device's name has all of; of several the first counts."""
NO_NETWORK = "no peak is known of links between hosts: the traces name no network card (--network gives its rate)"
"""Reason for which links between hosts have no peak."""
_NOT_WHOLE = frozenset({"MIG", "NVL"})
"""Words of devices that are parts of one, or that are joined by bridges."""


def peak_of_device(name: str | None) -> Peak | None:
    """The peak of a device by its name, as the driver writes it; None where the table does not have it, or it is not known."""
    words = frozenset(re.split(r"[^A-Za-z0-9]+", name or ""))
    if words & _NOT_WHOLE:
        return None
    return next((peak for wanted, peak in PEAKS.items() if words.issuperset(wanted)), None)


def device_of(facts: Mapping[str, object]) -> str | None:
    """The name of the device that a rank used; None where it is not known, or where its host has several kinds."""
    own = facts.get("device")
    if isinstance(own, str) and own.startswith("cuda:"):
        return own.partition(" ")[2] or None
    names = facts.get(DEVICE_NAMES)
    distinct = set(names) if isinstance(names, list | tuple) else set()
    return str(distinct.pop()) if len(distinct) == 1 else None


def is_same_host(ranks: Sequence[int], facts: Facts) -> bool | None:
    """Return whether ranks ran on one host, None where it is not known of all."""
    hosts = hosts_of(ranks, facts)
    return None if hosts is None else len(set(hosts)) == 1


def hosts_of(ranks: Sequence[int], facts: Facts) -> list[str] | None:
    """The host of each rank; None where it is not known of all."""
    for name in ("host", HOST_NAME):
        hosts = [facts.get(rank, {}).get(name) for rank in ranks]
        if None not in hosts:
            return list(map(str, hosts))
    return None


def ports_between(kind: str, ranks: Sequence[int], facts: Facts) -> float | None:
    """:func:`~pptrace.analysis.links.peaks.ports_reached` of a group on several hosts; None where it is not known to be."""
    hosts = hosts_of(ranks, facts)
    if hosts is None or len(set(hosts)) < 2:
        return None
    recorded = {host: facts.get(rank, {}).get(PORTS) for host, rank in zip(hosts, ranks, strict=True)}
    ports = {host: num for host, rates in recorded.items() if (num := num_fast_ports(rates))}
    return ports_reached(kind, Counter(hosts), ports)


def peak_between(ranks: Sequence[int], facts: Facts) -> Peak | None:
    """The lowest peak of ranks on one host, and of a port where they are on several; None where it is not known of all."""
    if not ranks or (on_one_host := is_same_host(ranks, facts)) is None:
        return None
    if not on_one_host:
        ports = all_known(peak_of_ports(facts.get(rank, {}).get(PORTS)) for rank in ranks)
        return None if ports is None else Peak("network", min(ports))
    peaks = all_known(peak_of_device(device_of(facts.get(rank, {}))) for rank in ranks)
    return None if peaks is None else min(peaks, key=lambda peak: peak.gbps)


def members_of(axis: str, mesh: MeshInfo, ranks: Sequence[int]) -> list[tuple[int, ...]] | None:
    """The groups of an axis; None where it is not known which ranks they are. Ranks on one host need no groups."""
    sizes = {axis_of: mesh.size_of(axis_of) for axis_of in MESH_ORDER}
    known = {axis_of: size for axis_of, size in sizes.items() if size is not None}
    words = axis.split("-")
    if len(known) < len(sizes) or not set(words) <= set(map(str, MESH_ORDER)):
        return None
    order = [Axis(word) for word in mesh.order]

    def groups(axes: Sequence[str]) -> set[tuple[int, ...]]:
        return {group_of(rank, [Axis(word) for word in axes], known, order) for rank in ranks}

    pipelines = {tuple(sorted(pipeline)) for pipeline in mesh.pipelines}
    return sorted(groups(words)) if groups([Axis.PP]) == pipelines else None


def unknown_peaks(ranks: Sequence[int], facts: Facts) -> Iterator[str]:
    """The reasons for which ranks have no peak, a line each."""
    names = {rank: device_of(facts.get(rank, {})) for rank in ranks}
    unnamed = [rank for rank, name in names.items() if name is None]
    if unnamed:
        yield f"the traces of {len(unnamed)} of {len(names)} ranks do not name the device: no peak of its links is known"
    for name in sorted({name for name in names.values() if name is not None and peak_of_device(name) is None}):
        yield f"{name}: no peak is known, or it depends on bridges between the cards"
    if ranks and not is_same_host(ranks, facts) and peak_between(ranks, facts) is None:
        yield NO_NETWORK


def settings_of(ranks: Sequence[int], facts: Facts) -> tuple[str, ...]:
    """Settings of NCCL and CUDA that the environment of ranks has, as NAME=VALUE; with the ranks where not all have it."""
    holders: dict[str, list[int]] = {}
    for rank in ranks:
        environment = facts.get(rank, {}).get("environment")
        for name, value in read_environment(environment if isinstance(environment, Mapping) else {}).items():
            holders.setdefault(f"{name}={value}", []).append(rank)
    return tuple(
        setting if len(of_ranks) == len(ranks) else f"{setting} (rank{'s' * (len(of_ranks) > 1)} {as_ranges(of_ranks)})"
        for setting, of_ranks in sorted(holders.items())
    )


PORTS = "network_ports"
"""Fact: the rate of each active port of the host's network cards, as Linux writes it."""

_GBITS: Mapping[str, float] = {
    "SDR": 8,
    "DDR": 16,
    "QDR": 32,
    "FDR10": 40,
    "FDR": 56 * 64 / 66,
    "EDR": 100,
    "HDR100": 100,
    "HDR": 200,
    "NDR200": 200,
    "NDR": 400,
    "XDR": 800,
}
"""Data rates of InfiniBand, Gb/s: the InfiniBand Trade Association's roadmap."""
_CODED: Mapping[str, float] = {"SDR": 0.8, "DDR": 0.8, "QDR": 0.8, "FDR": 64 / 66}
"""Data in what Linux writes as the rate, where that is with the line code."""
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec(?: \(\d+X ([A-Z]+\d*)\))?")
_BITS = 8


def read_rate(text: str) -> float:
    """The peak of a network that a user names, GB/s.

    Raises:
        UsageError: it is neither a generation of InfiniBand nor a number.
    """
    try:
        gbits = _GBITS.get(text.upper()) or float(text)
    except ValueError:
        gbits = 0.0
    if not 0 < gbits < float("inf"):
        raise UsageError(f"--network {text}: expected Gb/s, such as 400, or one of {', '.join(_GBITS)}")
    return gbits / _BITS


def peak_of_ports(rates: object) -> float | None:
    """The peak of the fastest port, GB/s; None where no rate can be read."""
    return max(_peaks(rates), default=None)


def num_fast_ports(rates: object) -> int:
    """Number of ports that are as fast as the fastest one."""
    peaks = _peaks(rates)
    return peaks.count(max(peaks)) if peaks else 0


def _peaks(rates: object) -> list[float]:
    texts: Iterable[object] = rates.values() if isinstance(rates, Mapping) else ()
    matches = [match for text in texts if (match := _RATE.fullmatch(str(text)))]
    return [float(match[1]) * _CODED.get(match[2] or "", 1.0) / _BITS for match in matches]


def ports_reached(kind: str, ranks_on_host: Mapping[str, int], ports_of_host: Mapping[str, int]) -> float:
    """Rates of a port that the bus bandwidth of a collective between hosts can reach at most, by nccl-tests' definition of it.

    Each rank has a port of its host, as long as there are as many. Rings: as many as there are ports pass a host, each through
    one of them, with their part of all bus bytes. All-to-all: what the n ranks of a group send to other hosts is (n − g)/n of it
    where a host has g of them, and the bus bytes are (n − 1)/n.

    Args:
        kind: of the collective.
        ranks_on_host: members of the group on each of its hosts, of which there are several.
        ports_of_host: where it is known.
    """
    used = {host: min(ranks, ports_of_host.get(host, ranks)) for host, ranks in ranks_on_host.items()}
    if kind != "all_to_all":
        return float(min(used.values()))
    total = sum(ranks_on_host.values())
    return min(used[host] / ranks * (total - 1) / (total - ranks) for host, ranks in ranks_on_host.items())


FAST = 10
"""Number of transfers of which one is faster than a fast one."""
CLASSES_PER_OCTAVE = 8
"""Sizes within 9 % of each other are one."""
LEAST_RATIO = 2.0
"""The largest message has at least so many times the bytes of the smallest."""
_MOST_OFF = 0.25
"""Part of a fast transfer by which the line may miss it; beyond it the link is no line."""
_MOST_OF_PEAK = 1.25
_FULL_WEIGHT = 10
"""Messages of one size from which on more of them make its fast one no surer."""


class LinkFit(Struct, frozen=True):
    """``latency_ns`` and ``bandwidth_gbps`` (GB/s), or the reason why both are None."""

    latency_ns: int | None = None
    bandwidth_gbps: float | None = None
    reason: str | None = None


def fit_link(sizes: Int64, times: Int64, count: Int64, name: str = "messages") -> LinkFit:
    """Fit the line to the time of a fast transfer (ns) of each size (bytes), of which there are ``count`` messages (``name``).

    Errors count in parts of the time, so that small messages tell the latency and large ones the bandwidth. Of two sizes, which
    any line fits, neither may be alone of its size.
    """
    if not len(sizes) or (sizes < 0).any():
        return LinkFit(reason=f"the trace does not tell how large its {name} are")
    least, most = int(sizes.min()), int(sizes.max())
    if least == most:
        return LinkFit(reason=f"all {name} have {counted(least, 'byte')}")
    if most < LEAST_RATIO * max(least, 1):
        return LinkFit(reason=f"{name} of {least} to {most} bytes are too much alike")
    if len(np.unique(sizes)) == 2 and count.min() < 2:
        return LinkFit(reason=f"of two sizes, one has a single {name[:-1]}")
    if (times <= 0).any():
        return LinkFit(reason="some transfers took no time")
    latency, slope = _line(sizes.astype(np.float64), times.astype(np.float64), np.minimum(count, _FULL_WEIGHT))
    if slope <= 0:
        return LinkFit(reason=f"larger {name} took no longer")
    if round(latency) < 0:
        return LinkFit(reason=f"larger {name} took longer than in proportion")
    off = np.abs(latency + slope * sizes - times) / times
    worst = int(off.argmax())
    if off[worst] > _MOST_OFF:
        return LinkFit(reason=f"no line: it misses {name} of {int(sizes[worst])} bytes by {off[worst]:.0%}")
    return LinkFit(max(round(latency), 0), 1 / slope)


def fast_of_sizes(sizes: Int64, times: Int64, count: Int64) -> tuple[Int64, Int64, Int64]:
    """(bytes, ns, number of messages): of messages whose sizes are within 9 % of each other a fast one, as a tenth are faster.

    Where sequences vary in length nearly every message has a size of its own, which chance may have slowed.
    """
    size_class = np.floor(np.log2(np.maximum(sizes, 1)) * CLASSES_PER_OCTAVE)
    fast: list[tuple[int, int, int]] = []
    for one in np.unique(size_class):
        rows = np.flatnonzero(size_class == one)
        rows = rows[np.argsort(times[rows], kind="stable")]
        up_to = np.cumsum(count[rows])
        row = rows[np.searchsorted(up_to, (up_to[-1] - 1) // FAST, "right")]
        fast.append((int(sizes[row]), int(times[row]), int(up_to[-1])))
    columns: Int64 = np.array(fast, dtype=np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def share_of_peak(rate: float, peak: float, same_host: bool | None) -> float | None:
    """The part of a peak that a rate is; None within a host where it is so far beyond it that the times cannot be.

    Between hosts there may be other ports than those that were recorded or given.
    """
    share = rate / peak
    return None if same_host and share > _MOST_OF_PEAK else share


def latencies_of(links: Iterable[Link]) -> dict[tuple[int, int], int]:
    """The latency from one rank to another, ns, where fitted: to the pipeline's messages, else to those of another axis."""
    known = [link for link in links if link.latency_ns is not None]
    ordered = sorted(known, key=lambda link: (link.axis == Axis.PP, link.count))
    return {(link.source, link.target): link.latency_ns for link in ordered if link.latency_ns is not None}


def _line(sizes: Floats, times: Floats, count: Int64) -> tuple[float, float]:
    """(latency, slope) of least squares, of errors in parts of the times."""
    weights = count / times**2
    mean_size, mean_time = (float(np.average(values, weights=weights)) for values in (sizes, times))
    variance = float(np.average((sizes - mean_size) ** 2, weights=weights))
    slope = float(np.average((sizes - mean_size) * (times - mean_time), weights=weights)) / variance
    return mean_time - slope * mean_size, slope
