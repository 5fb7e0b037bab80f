"""Facts that the Ascend profiler writes next to a ``trace_view.json``: rank, groups, settings.

    <host>_<pid>_<time>_ascend_pt/profiler_info_<rank>.json       rank_id, config
    <host>_<pid>_<time>_ascend_pt/profiler_metadata.json          distributed_args, parallel_group_info
    <host>_<pid>_<time>_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json

Environment variables, which are there too, are not passed on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pptrace.ingest.common.rank_names import rank_of_file_name, rank_of_value
from pptrace.model.traces import HOST_NAME
from pptrace.regular import read_regular

TRACE_NAME = "trace_view.json"
_INFO = re.compile(r"profiler_info(?:_(\d{1,9}))?\.json")
_METADATA = "profiler_metadata.json"
RECORD_NAME = "memory_record.csv"
_OTHERS = ("communication.json", "communication_matrix.json", RECORD_NAME)
_FOLDER = re.compile(r"(?P<host>.+)_\d+_\d{14,20}_ascend_(?:pt|ms)")
_SETTINGS = ("record_shapes", "with_stack", "profile_memory", "with_modules", "with_flops")


@dataclass(frozen=True, slots=True)
class JobFacts:
    """``metadata`` and ``distributed`` as in :class:`~pptrace.model.traces.Trace`."""

    rank: int | None
    metadata: Mapping[str, Any]
    distributed: Mapping[str, Any]


def companions_of_trace(path: Path) -> Sequence[Path]:
    """The files that describe a trace: they are no traces of their own."""
    if path.name != TRACE_NAME:
        return ()
    folder = path.parent.parent
    return [*(path.with_name(name) for name in _OTHERS), folder / _METADATA, *_infos(folder)]


def job_facts(path: Path) -> JobFacts:
    """The facts next to a trace; what cannot be read is not known."""
    folder = path.parent.parent
    described = _object(folder / _METADATA)
    args = described.get("distributed_args")
    args = args if isinstance(args, dict) else {}
    infos = _infos(folder)
    info = _object(infos[0]) if len(infos) == 1 else {}
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
    return JobFacts(rank, metadata, distributed)


def _infos(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if _INFO.fullmatch(entry.name))
    except OSError:
        return []


def _object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


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
