"""Files that the Ascend profiler writes next to a ``trace_view.json``: rank, groups, settings, and memory.

    <host>_<pid>_<time>_ascend_pt/profiler_info_<rank>.json       rank_id, config
    <host>_<pid>_<time>_ascend_pt/profiler_metadata.json          distributed_args, parallel_group_info
    <host>_<pid>_<time>_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json
    <host>_<pid>_<time>_ascend_pt/ASCEND_PROFILER_OUTPUT/memory_record.csv

    memory_record.csv = Component, Timestamp(us), Total Allocated(MB), Total Reserved(MB), …, Device Type

Component ``PTA`` is torch's allocator; others are of graphs, or of all of the process. A row is what the allocator holds then.

Environment variables, which are there too, are not passed on.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pptrace.ingest.common.exact_numbers import LIMIT_NS, nanoseconds
from pptrace.ingest.common.json_texts import object_in
from pptrace.ingest.common.rank_names import rank_of_file_name, rank_of_value
from pptrace.model.tables import MEMORY, empty_table, make_table
from pptrace.model.traces import HOST_NAME
from pptrace.regular import open_regular

RECORD_NAME = "memory_record.csv"
_COMPONENT, _TIME, _DEVICE = "Component", "Timestamp(us)", "Device Type"
_ALLOCATED, _RESERVED = "Total Allocated(MB)", "Total Reserved(MB)"
_ALLOCATOR = "PTA"
_MIB = 2**20
TRACE_NAME = "trace_view.json"
_INFO = re.compile(r"profiler_info(?:_(\d{1,9}))?\.json")
_METADATA = "profiler_metadata.json"
_OTHERS = ("communication.json", "communication_matrix.json", RECORD_NAME)
_FOLDER = re.compile(r"(?P<host>.+)_\d+_\d{14,20}_ascend_(?:pt|ms)")
_SETTINGS = ("record_shapes", "with_stack", "profile_memory", "with_modules", "with_flops")


def companions_of_trace(path: Path) -> Sequence[Path]:
    """The files that describe a trace: they are no traces of their own."""
    if path.name != TRACE_NAME:
        return ()
    folder = path.parent.parent
    return [*(path.with_name(name) for name in _OTHERS), folder / _METADATA, *_infos(folder)]


def job_facts(path: Path) -> tuple[int | None, Mapping[str, Any], Mapping[str, Any]]:
    """(rank; ``metadata`` and ``distributed`` of :class:`~pptrace.model.traces.Trace`) next to a trace, as far as readable."""
    folder = path.parent.parent
    described = object_in(folder / _METADATA)
    args = described.get("distributed_args")
    args = args if isinstance(args, dict) else {}
    infos = _infos(folder)
    info = object_in(infos[0]) if len(infos) == 1 else {}
    claimed = (info.get("rank_id"), infos[0].stem.rpartition("_")[2] if len(infos) == 1 else None, args.get("rank"))
    ranks = (*map(rank_of_value, claimed), rank_of_file_name(folder.name), rank_of_file_name(path.name))
    rank = next((rank for rank in ranks if rank is not None), None)
    host = _FOLDER.fullmatch(folder.name)
    metadata: dict[str, Any] = {HOST_NAME: host["host"]} if host else {}
    config = info.get("config")
    common = config.get("common_config") if isinstance(config, dict) else None
    if isinstance(common, dict) and (settings := {name: True for name in _SETTINGS if common.get(name) is True}):
        metadata["recording"] = settings
    distributed: dict[str, Any] = {"backend": "hccl"}
    if rank is not None and (world := rank_of_value(args.get("world_size"))) and rank < world:
        distributed |= {"rank": rank, "world_size": world}
    if groups := _groups(described.get("parallel_group_info")):
        distributed["pg_config"] = groups
    return rank, metadata, distributed


def _infos(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if _INFO.fullmatch(entry.name))
    except OSError:
        return []


def _groups(groups: object) -> list[Mapping[str, Any]]:
    """The process groups with the keys of torch's ``pg_config``."""
    if not isinstance(groups, dict):
        return []
    return [
        {
            "pg_name": name,
            "pg_desc": str(group.get("group_name", "")),
            "pg_size": len(group["global_ranks"]),
            "ranks": group["global_ranks"],
        }
        for name, group in groups.items()
        if isinstance(group, dict) and isinstance(group.get("global_ranks"), list)
    ]


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
    is_valid = (time_ns >= 0) & (time_ns <= LIMIT_NS)
    for level in levels:
        is_valid &= (level >= 0) & (level < 2.0**53)
    order = np.flatnonzero(is_valid)
    order = order[np.argsort(time_ns[order], kind="stable")]
    allocated, reserved = (np.rint(level[order]).astype(np.int64) for level in levels)
    table_columns = {"t_ns": time_ns[order], "allocated_bytes": allocated, "reserved_bytes": reserved}
    return make_table(MEMORY, {"rank": np.full(len(order), rank, dtype=np.int64), **table_columns}), []
