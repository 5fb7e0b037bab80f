"""Network namespaces of this machine, one for each rank, with a slow link between two of them, of which no script knows.

Needs root, and ``ip`` and ``tc`` of iproute2.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_SUBNET = "10.77.0"


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def address(rank: int) -> str:
    """The address of a rank; its interface is ``eth0``."""
    return f"{_SUBNET}.{rank + 1}"


@contextmanager
def namespaces(world: int, link: tuple[int, int] | None, rate: str = "20mbit") -> Iterator[list[str]]:
    """Names of a namespace for each rank; both directions of ``link``, a pair of ranks, pass ``rate`` at most.

    Raises:
        subprocess.CalledProcessError: They can't be made here.
    """
    prefix = f"pptrace{os.getpid()}"
    hub, names = f"{prefix}-hub", [f"{prefix}-{rank}" for rank in range(world)]
    try:
        for name in (hub, *names):
            _call("ip", "netns", "add", name)
        _call("ip", "-n", hub, "link", "add", "hub", "type", "bridge")
        _call("ip", "-n", hub, "link", "set", "hub", "up")
        for rank, name in enumerate(names):
            _call("ip", "-n", name, "link", "set", "lo", "up")
            _call("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"to{rank}", "netns", hub)
            _call("ip", "-n", hub, "link", "set", f"to{rank}", "master", "hub", "up")
            _call("ip", "-n", name, "address", "add", f"{address(rank)}/24", "dev", "eth0")
            _call("ip", "-n", name, "link", "set", "eth0", "up")
        if link is not None:
            _make_slow(names, link, rate)
        yield names
    finally:
        for name in (hub, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _make_slow(names: list[str], link: tuple[int, int], rate: str) -> None:
    """An interface of its own between two namespaces, whose bytes pass at a rate."""
    first, second = (names[rank] for rank in link)
    _call("ip", "-n", first, "link", "add", "slow", "type", "veth", "peer", "name", "slow", "netns", second)
    for name in (first, second):
        _call("ip", "-n", name, "link", "set", "slow", "up")
        bucket = ("tbf", "rate", rate, "burst", "8kb", "latency", "10s")
        _call("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "slow", "root", *bucket)
    for name, rank, peer in ((first, *link), (second, *link[::-1])):
        _call("ip", "-n", name, "route", "add", f"{address(peer)}/32", "dev", "slow", "src", address(rank))
