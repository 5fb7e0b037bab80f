"""Wrong secrets by the addresses that they come from: who guesses waits, for longer each time."""

from __future__ import annotations

import ipaddress
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from math import ceil
from time import monotonic

MOST_WRONG = 10
"""Wrong secrets of an address within a minute that cost nothing."""
MOST_WAIT_S = 10
"""The longest time for which an address waits: who knows the secret may share it with who guesses."""
_WITHIN_S = 60.0
_MOST_ADDRESSES = 1_000
_IPV6_BITS = 64
"""Bits of an IPv6 address that its owner does not choose."""


@dataclass(slots=True)
class _Guesser:
    """Times of an address's last wrong secrets, and the time until which it waits, s."""

    wrong_s: list[float] = field(default_factory=list)
    waits_until_s: float = 0.0


class Guesses:
    """Counts of wrong secrets. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._guessers: OrderedDict[str, _Guesser] = OrderedDict()

    def wait_s(self, address: str | None) -> int:
        """Seconds for which no secret of this address is looked at; 0 where it is."""
        with self._lock:
            guesser = self._guessers.get(_network(address))
            return 0 if guesser is None else max(0, ceil(guesser.waits_until_s - monotonic()))

    def count(self, address: str | None) -> None:
        """Count a wrong secret of this address."""
        now_s, network = monotonic(), _network(address)
        with self._lock:
            guesser = self._guessers.setdefault(network, _Guesser())
            self._guessers.move_to_end(network)
            guesser.wrong_s = [*(at_s for at_s in guesser.wrong_s if now_s - at_s < _WITHIN_S), now_s][
                -2 * MOST_WRONG :
            ]
            if (num_more := len(guesser.wrong_s) - MOST_WRONG) >= 0:
                guesser.waits_until_s = now_s + min(2**num_more, MOST_WAIT_S)
            while len(self._guessers) > _MOST_ADDRESSES:
                self._guessers.popitem(last=False)


def _network(address: str | None) -> str:
    """The part of an address that its owner does not choose."""
    try:
        known = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return ""
    if isinstance(known, ipaddress.IPv4Address):
        return str(known)
    return str(known.ipv4_mapped or ipaddress.ip_network((int(known), _IPV6_BITS), strict=False))
