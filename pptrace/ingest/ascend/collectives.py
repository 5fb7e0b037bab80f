"""Arguments of HCCL's collectives as :data:`~pptrace.model.tables.COMM_ARGS`.

    hcom_allReduce__586_0_1 { data_type: FP32, count: 4097000 }       on the lane "Group <name> Communication"

The name ends with the last digits of a hash of the group's name, which is the same on all ranks, and numbers. ``count`` is the
number of elements that a rank hands in; of a reduce-scatter those that it gets (``HcclReduceScatter``, ``recvCount``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.ingest.ascend.trace_rows import Collected, Rows
from pptrace.ingest.common.comm_args import DTYPE_BYTES, CommRecord, comm_args_table
from pptrace.ingest.common.sort_events import SortedEvents

_NAME = re.compile(r"hcom_(?P<kind>[A-Za-z0-9]+)_*(?:__(?P<group>\w+?)_\d+_\d+)?(?:@(?P<hash>\w+))?")
_DTYPES = re.compile(r"(BFP|FP|U?INT)(\d{1,3})", re.ASCII)
_OF_ONE_SIZE = frozenset({"allreduce", "broadcast", "reduce", "send", "receive"})
_LANE = re.compile(r"Group (?P<name>\S+) (?:Aicpu )?Communication")


def collectives_table(
    collected: Collected,
    rows: Rows,
    chosen: npt.NDArray[np.intp],
    events: SortedEvents,
    groups: Sequence[Mapping[str, Any]],
) -> pd.DataFrame:
    """Make one row for each collective that is left.

    Args:
        rows: the rows that are collectives.
        chosen: their places among the events before sorting.
        groups: the process groups of the job.
    """
    by_name = {str(group["pg_name"]): group for group in groups}
    names, dtypes = collected.names.texts, collected.dtypes.texts
    columns = (rows.name, rows.process, rows.thread, rows.dtype, rows.count)
    records: list[CommRecord] = []
    for event, name, process, thread, dtype, count in zip(
        events.sorted_rows(chosen.tolist()).tolist(), *(column.tolist() for column in columns), strict=True
    ):
        if event < 0:  # it was left out
            continue
        match = _NAME.fullmatch(names[name])
        kind = match["kind"] if match else ""
        lane = _LANE.fullmatch(collected.thread_names.get((process, thread), ""))
        group_id = (match and (match["hash"] or match["group"])) or ""
        if lane and not lane["name"].isdecimal():  # a number is what each rank counts itself
            group_id = lane["name"]
        group = by_name.get(group_id, {})
        ranks = group.get("ranks", [])
        item = _DTYPES.fullmatch(dtypes[dtype])
        item_bytes = int(item[2]) // 8 if item else DTYPE_BYTES.get(dtypes[dtype].lower(), -1)
        sent, received = _bytes(kind, count, item_bytes, len(ranks))
        description, text = str(group.get("pg_desc", "")), json.dumps(ranks) if ranks else ""
        size = len(ranks) or -1
        records.append((event, kind, sent, received, group_id, description, text, size, -1, -1, -1, -1, ""))
    return comm_args_table(records)


def _bytes(kind: str, count: int, item: int, size: int) -> tuple[int, int]:
    """(bytes handed in, bytes got), -1 where they are not known."""
    if count < 0 or item < 1:
        return -1, -1
    num_bytes, kind = count * item, kind.lower()
    of_all = num_bytes * size if size > 0 else -1
    if num_bytes >= 2**63 or of_all >= 2**63:
        return -1, -1
    if kind in _OF_ONE_SIZE:
        return num_bytes, num_bytes
    if kind == "allgather":
        return num_bytes, of_all
    return (of_all, num_bytes) if kind == "reducescatter" else (-1, -1)
