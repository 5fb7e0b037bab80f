"""Convert ``[memory]`` instants (profile_memory=True) to :data:`pptrace.model.tables.MEMORY`.

    args = { "Device Type", "Device Id", "Bytes", "Total Allocated", "Total Reserved" }     torch ≥ 1.11
         | { "Device Type", "Device Id", "Bytes" }                                          before

``Device Type`` is c10's: 0 is the host, all others are accelerators.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from pptrace.ingest.common.exact_numbers import LIMIT_NS, Integers, nanoseconds
from pptrace.ingest.kineto.event_types import Instant
from pptrace.model.tables import MEMORY, Int64, make_table

MEMORY_EVENT = "[memory]"
_HOST = 0
_UNKNOWN = -(2**62)
_MAX_DEVICES = 1024


def memory_columns(instants: Sequence[Instant]) -> Int64:
    """Time and arguments of the memory events of a batch, shape (6, n), as in the file."""
    pairs = [(event.ts, event.args) for event in instants if event.name == MEMORY_EVENT and event.args is not None]
    integers = Integers({None: _UNKNOWN})
    names = ("device_type", "device_id", "change", "allocated", "reserved")
    arguments = (integers([getattr(args, name) for _, args in pairs]) for name in names)
    return np.stack((nanoseconds([ts for ts, _ in pairs]), *arguments))


def memory_table(parts: Sequence[Int64], base_ns: int) -> pd.DataFrame:
    """Memory over time, bytes, rank -1: of all accelerators together where there are any, else of the host.

    Totals of several devices are summed. Traces from before torch 1.11 have only changes: there ``allocated_bytes`` counts from
    the first event and ``reserved_bytes`` is -1.
    """
    columns = np.concatenate([np.zeros((6, 0), dtype=np.int64), *parts], axis=1)
    columns = columns[:, np.abs(columns[0].astype(np.float64) + float(base_ns)) < LIMIT_NS]
    accelerated = columns[:, columns[1] > _HOST]
    if accelerated.shape[1]:
        columns = accelerated
    time, kind, device, change, allocated, reserved = columns[:, np.lexsort(columns[[5, 4, 3, 2, 1, 0]])]
    has_totals = allocated != _UNKNOWN
    if has_totals.any():
        group = (kind[has_totals] * _MAX_DEVICES + device[has_totals]).astype(np.int64)
        time = time[has_totals]
        allocated = _sum_over_groups(allocated[has_totals], group)
        reserved = _sum_over_groups(np.where(reserved[has_totals] == _UNKNOWN, 0, reserved[has_totals]), group)
    else:
        allocated = np.cumsum(np.where(change == _UNKNOWN, 0, change))
        reserved = np.full(len(time), -1)
    rank = np.full(len(time), -1)
    return make_table(
        MEMORY,
        {"rank": rank, "t_ns": time + base_ns, "allocated_bytes": allocated, "reserved_bytes": reserved},
    )


def _sum_over_groups(level: Int64, group: Int64) -> Int64:
    """Sum over groups of the latest level of each, at every row."""
    step = np.zeros_like(level)
    for group_id in np.unique(group):
        rows = group == group_id
        step[rows] = np.diff(level[rows], prepend=0)
    return np.cumsum(step)
