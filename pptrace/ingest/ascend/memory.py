"""Memory that torch_npu's allocator has taken, from the ``memory_record.csv`` next to a trace.

    Component, Timestamp(us), Total Allocated(MB), Total Reserved(MB), …, Device Type

Component ``PTA`` is torch's allocator; others are of graphs, or of all of the process. A row is what the allocator holds then.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas as pd

from pptrace.ingest.ascend.job_facts import RECORD_NAME
from pptrace.ingest.common.exact_numbers import LIMIT_NS, nanoseconds
from pptrace.model.tables import MEMORY, empty_table, make_table
from pptrace.regular import open_regular

_COMPONENT, _TIME, _DEVICE = "Component", "Timestamp(us)", "Device Type"
_ALLOCATED, _RESERVED = "Total Allocated(MB)", "Total Reserved(MB)"
_ALLOCATOR = "PTA"
_MIB = 2**20


def read_memory(trace: Path, device: int, rank: int) -> tuple[pd.DataFrame, list[str]]:
    """(the memory of a device in time, a warning if the file next to the trace cannot be read)."""
    path = trace.with_name(RECORD_NAME)
    if not path.is_file():
        return empty_table(MEMORY), []
    columns = (_COMPONENT, _TIME, _ALLOCATED, _RESERVED, _DEVICE)
    try:
        with open_regular(path) as file:
            table = pd.read_csv(file, dtype=str, usecols=columns, on_bad_lines="skip", quoting=csv.QUOTE_MINIMAL)
    except (OSError, ValueError, pd.errors.ParserError) as err:
        reason = str(err).split("\n")[0][:80]
        return empty_table(MEMORY), [
            f"{RECORD_NAME} cannot be read ({reason}); expected columns {', '.join(columns)}: memory is not known"
        ]
    rows = table[(table[_COMPONENT] == _ALLOCATOR) & (table[_DEVICE] == f"NPU:{device}")]
    time_ns = nanoseconds([str(text).strip().encode() for text in rows[_TIME]])
    levels = [
        pd.to_numeric(rows[name], errors="coerce").to_numpy(dtype=np.float64) * _MIB for name in (_ALLOCATED, _RESERVED)
    ]
    is_whole = (time_ns >= 0) & (time_ns <= LIMIT_NS)
    for level in levels:
        is_whole &= (level >= 0) & (level < 2.0**53)
    order = np.flatnonzero(is_whole)
    order = order[np.argsort(time_ns[order], kind="stable")]
    allocated, reserved = (np.rint(level[order]).astype(np.int64) for level in levels)
    table_columns = {"t_ns": time_ns[order], "allocated_bytes": allocated, "reserved_bytes": reserved}
    return make_table(MEMORY, {"rank": np.full(len(order), rank, dtype=np.int64), **table_columns}), []
