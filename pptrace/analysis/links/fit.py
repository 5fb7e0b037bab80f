"""Latency and bandwidth of a link from what messages of several sizes take: Hockney's model, time = latency + bytes / bandwidth.

Parallel Computing 20, 1994. Only transfers are fitted, from when both sides were ready, and of each size a fast one: what slows
the others down (a busy core, other messages on the link) is not the link's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pptrace.analysis.links.types import Link
from pptrace.axes import Axis
from pptrace.intervals import Int64
from pptrace.model.wording import counted

LEAST_RATIO = 2.0
"""The largest message has at least so many times the bytes of the smallest."""
_MOST_OFF = 0.25
"""Part of a fast transfer by which the line may miss it; beyond it the link is no line."""
_FULL_WEIGHT = 10
"""Messages of one size from which on more of them make its fast one no surer."""


@dataclass(frozen=True, slots=True)
class LinkFit:
    """``latency_ns`` and ``bandwidth_gbps`` (GB/s), or the reason why both are None."""

    latency_ns: int | None = None
    bandwidth_gbps: float | None = None
    reason: str | None = None


def fit_link(sizes: Int64, times: Int64, count: Int64) -> LinkFit:
    """Fit the line to the time of a fast transfer (ns) of each size (bytes), of which there are ``count`` messages.

    Errors count in parts of the time, so that small messages tell the latency and large ones the bandwidth. Of two sizes, which
    any line fits, neither may be alone of its size.
    """
    if not len(sizes) or (sizes < 0).any():
        return LinkFit(reason="the trace does not tell how large its messages are")
    least, most = int(sizes.min()), int(sizes.max())
    if least == most:
        return LinkFit(reason=f"all messages have {counted(least, 'byte')}")
    if most < LEAST_RATIO * max(least, 1):
        return LinkFit(reason=f"messages of {least} to {most} bytes are too much alike")
    if len(np.unique(sizes)) == 2 and count.min() < 2:
        return LinkFit(reason="of two sizes, one has a single message")
    if (times <= 0).any():
        return LinkFit(reason="some transfers took no time")
    latency, slope = _line(sizes.astype(np.float64), times.astype(np.float64), np.minimum(count, _FULL_WEIGHT))
    if slope <= 0:
        return LinkFit(reason="larger messages took no longer")
    if round(latency) < 0:
        return LinkFit(reason="larger messages took longer than in proportion")
    off = np.abs(latency + slope * sizes - times) / times
    worst = int(off.argmax())
    if off[worst] > _MOST_OFF:
        return LinkFit(reason=f"no line: it misses messages of {int(sizes[worst])} bytes by {off[worst]:.0%}")
    return LinkFit(max(round(latency), 0), 1 / slope)


def latencies_of(links: Iterable[Link]) -> dict[tuple[int, int], int]:
    """The latency from one rank to another, ns, where fitted: to the pipeline's messages, else to those of another axis."""
    known = [link for link in links if link.latency_ns is not None]
    ordered = sorted(known, key=lambda link: (link.axis == Axis.PP, link.count))
    return {(link.source, link.target): link.latency_ns for link in ordered if link.latency_ns is not None}


def _line(sizes: npt.NDArray[np.float64], times: npt.NDArray[np.float64], count: Int64) -> tuple[float, float]:
    """(latency, slope) of least squares, of errors in parts of the times."""
    weights = count / times**2
    mean_size, mean_time = (float(np.average(values, weights=weights)) for values in (sizes, times))
    variance = float(np.average((sizes - mean_size) ** 2, weights=weights))
    slope = float(np.average((sizes - mean_size) * (times - mean_time), weights=weights)) / variance
    return mean_time - slope * mean_size, slope
