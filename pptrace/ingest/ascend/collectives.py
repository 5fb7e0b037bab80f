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

import pandas as pd

from pptrace.ingest.common.dtype_sizes import DTYPE_BYTES
from pptrace.model.categories import as_category
from pptrace.model.tables import COMM_ARGS, make_table

_NAME = re.compile(r"hcom_(?P<kind>[A-Za-z0-9]+)_*(?:__(?P<group>\w+?)_\d+_\d+)?(?:@(?P<hash>\w+))?")
_DTYPES = re.compile(r"(BFP|FP|U?INT)(\d{1,3})", re.ASCII)
_OF_ONE_SIZE = frozenset({"allreduce", "broadcast", "reduce", "send", "receive"})
Group = Mapping[str, Any]


def collectives_table(
    events: Sequence[int],
    names: Sequence[str],
    lanes: Sequence[str],
    dtypes: Sequence[str],
    counts: Sequence[int],
    groups: Sequence[Group],
) -> pd.DataFrame:
    """Make one row for each collective that is left, in the order of the events (-1: dropped)."""
    by_name = {str(group["pg_name"]): group for group in groups}
    records = sorted(
        _record(event, name, lane, dtype, count, by_name)
        for event, name, lane, dtype, count in zip(events, names, lanes, dtypes, counts, strict=True)
        if event >= 0
    )
    columns = list(zip(*records, strict=True)) or [()] * len(COMM_ARGS)
    table: dict[str, Any] = {
        name: as_category(list(column)) if dtype == "str" else column
        for (name, dtype), column in zip(COMM_ARGS.items(), columns, strict=True)
    }
    return make_table(COMM_ARGS, table)


_Record = tuple[int, str, int, int, str, str, str, int, int, int, int, int, str]


def _record(event: int, name: str, lane: str, dtype: str, count: int, groups: Mapping[str, Group]) -> _Record:
    """A row of COMM_ARGS, in the order of the schema."""
    match = _NAME.fullmatch(name)
    kind = match["kind"] if match else ""
    group_id = lane or (match and (match["hash"] or match["group"])) or ""
    group = groups.get(group_id, {})
    ranks = group.get("ranks", [])
    sent, received = _bytes(kind, count, _item_bytes(dtype), len(ranks))
    description, text = str(group.get("pg_desc", "")), json.dumps(ranks) if ranks else ""
    return event, kind, sent, received, group_id, description, text, len(ranks) or -1, -1, -1, -1, -1, ""


def _item_bytes(dtype: str) -> int:
    """Size of an element of HCCL's type, bytes; -1 if unknown."""
    match = _DTYPES.fullmatch(dtype)
    if match is None:
        return DTYPE_BYTES.get(dtype.lower(), -1)
    return int(match[2]) // 8


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
