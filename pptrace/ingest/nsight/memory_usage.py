"""Convert the memory events of an Nsight Systems export to :data:`pptrace.model.tables.MEMORY`.

    CUDA_GPU_MEMORY_USAGE_EVENTS = { start, globalPid, contextId, address, bytes, memKind, memoryOperationType }

``memKind`` 2 is memory of a device, 4 is managed; the others are of the host. ``memoryOperationType`` is 0 for an allocation and
1 for a release. These are calls of the driver: what a caching allocator reserves, not its tensors.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from pptrace.ingest.common.sqlite import NONE, Database
from pptrace.model.tables import MEMORY, make_table

TABLE = "CUDA_GPU_MEMORY_USAGE_EVENTS"
_COLUMNS = ("start", "globalPid", "contextId", "address", "bytes", "memKind", "memoryOperationType")
_ON_DEVICE = (2, 4)
_ALLOCATION, _RELEASE = 0, 1
_PID_SHIFT, _PID_MASK = 24, 0xFFFFFF


def read_memory(db: Database, base_ns: int) -> dict[int, pd.DataFrame]:
    """Memory that each process has taken from its devices since recording began, by pid, rank -1.

    A release of what was allocated before recording began counts nothing. ``reserved_bytes`` is -1: what is there is unknown.
    """
    if not db.has(TABLE, *_COLUMNS):
        return {}
    start, process, context, address, num_bytes, kind, operation = db.integers(TABLE, _COLUMNS)
    is_used = np.isin(kind, _ON_DEVICE) & np.isin(operation, (_ALLOCATION, _RELEASE)) & (start >= 0)
    is_used &= (process != NONE) & (num_bytes != NONE) & (num_bytes >= 0)
    columns = [column[is_used] for column in (start, (process >> _PID_SHIFT) & _PID_MASK, context, address)]
    time, pid, context, address = columns
    num_bytes, operation = num_bytes[is_used], operation[is_used]
    # A release counts what its address got last, and 0 where that was not recorded.
    change = np.where(operation == _ALLOCATION, num_bytes, 0)
    order = np.lexsort((operation == _ALLOCATION, time, address, context, pid))
    before, after = order[:-1], order[1:]
    is_pair = (operation[before] == _ALLOCATION) & (operation[after] == _RELEASE)
    for column in (pid, context, address):
        is_pair &= column[before] == column[after]
    change[after[is_pair]] = -num_bytes[before[is_pair]]
    memory = {}
    for number in np.unique(pid[change != 0]).tolist():
        rows = np.flatnonzero((pid == number) & (change != 0))
        rows = rows[np.lexsort((change[rows], time[rows]))]
        unknown = np.full(len(rows), -1, dtype=np.int64)
        level = np.cumsum(change[rows])
        memory[number] = make_table(
            MEMORY, {"rank": unknown, "t_ns": time[rows] + base_ns, "allocated_bytes": level, "reserved_bytes": unknown}
        )
    return memory
