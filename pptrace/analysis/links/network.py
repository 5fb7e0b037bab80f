"""Reference peaks of the network between hosts: what one port of a network card moves in one direction, GB/s (10⁹ bytes).

    400 Gb/sec (4X NDR)     as Linux writes the rate of a port (/sys/class/infiniband/*/ports/*/rate), which pptrace run records
    NDR                     InfiniBand over four lanes; NDR200 and HDR100 over two
    100                     Gb/s, as cards are sold

The rate is that of the data, without the line code: 8 of 10 bits up to QDR, 64 of 66 of FDR; from EDR on rates are given without.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pptrace.errors import UsageError

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
