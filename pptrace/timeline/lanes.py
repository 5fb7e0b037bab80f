"""What each rank did with its time: computing, transferring, waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from pptrace.intervals import EMPTY, Int64, clip, length, subtract, union
from pptrace.recognise.devices import DeviceWork
from pptrace.recognise.schedule import COMPUTE_KINDS


@dataclass(frozen=True, slots=True)
class Lane:
    """The time of one rank as sets of intervals (see :mod:`pptrace.intervals`), ns.

    ``compute`` is the union of its compute kernels or, without device events, of its F/B/I/W ops minus the communication
    nested in them. ``transfer`` is communication with all sides present; ``exposed`` is the part of it beside no compute.
    """

    compute: Int64
    transfer: Int64
    exposed: Int64

    def within(self, start_ns: int, end_ns: int) -> Lane:
        return Lane(*(clip(part, start_ns, end_ns) for part in (self.compute, self.transfer, self.exposed)))

    def bubble_ns(self, start_ns: int, end_ns: int) -> int:
        """What of [start, end) is neither compute nor exposed communication."""
        part = self.within(start_ns, end_ns)
        return end_ns - start_ns - length(part.compute) - length(part.exposed)


def lane_of(rank: int, ops: pd.DataFrame, comms: pd.DataFrame, work: Mapping[int, DeviceWork], offset_ns: int) -> Lane:
    """The lane of a rank, from aligned ops and comms and from its device work, which is still ``offset_ns`` early."""
    mine = comms[comms["rank"] == rank]
    transfer = union(mine["transfer_start_ns"], mine["transfer_end_ns"])
    device = work.get(rank)
    if device is not None and len(device.compute):
        compute = device.compute + offset_ns
    else:
        own = ops[(ops["rank"] == rank) & ops["kind"].isin(COMPUTE_KINDS)]
        nested = union(mine["start_ns"], mine["end_ns"]) if len(own) else EMPTY
        compute = subtract(union(own["start_ns"], own["end_ns"]), nested)
    return Lane(compute, transfer, subtract(transfer, compute))
