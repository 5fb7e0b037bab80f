"""Files that are read together with another one, or hold the same recording in another form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pptrace.nsys import RECORDED_SUFFIXES

ASCEND_TRACE = "trace_view.json"
ASCEND_METADATA = "profiler_metadata.json"
ASCEND_MEMORY = "memory_record.csv"
_ASCEND_OTHERS = ("communication.json", "communication_matrix.json", ASCEND_MEMORY)
_ASCEND_INFO = re.compile(r"profiler_info(?:_(\d{1,9}))?\.json")
_OPS_NAME = re.compile(r"(?<![a-z])ops(?![a-z])")


def partner(path: Path, table: str) -> Path | None:
    """The file of another table next to ``path``: comms.csv for ops.csv, rank0.comms.csv for rank0.ops.csv."""
    if not _OPS_NAME.search(path.name):
        return None
    other = path.with_name(_OPS_NAME.sub(table, path.name, count=1))
    return other if other != path and other.is_file() else None


def partners(path: Path) -> list[Path]:
    """The files of other tables that are read together with one of ops."""
    return [other for table in ("comms", "memory") if (other := partner(path, table)) is not None]


def companions_of_dump(path: Path) -> list[Path]:
    """The sizes of a run, next to the dump of each pipeline rank."""
    return [path.with_name("config.json")] if path.name.startswith("pp_rank_") else []


def companions_of_trace(path: Path) -> Sequence[Path]:
    """The files that describe a trace: they are no traces of their own."""
    if path.name != ASCEND_TRACE:
        return ()
    folder = path.parent.parent
    return [*(path.with_name(name) for name in _ASCEND_OTHERS), folder / ASCEND_METADATA, *ascend_infos(folder)]


def ascend_infos(folder: Path) -> list[Path]:
    """The files in a folder of the Ascend profiler that say which rank it is of."""
    try:
        return sorted(entry for entry in folder.iterdir() if _ASCEND_INFO.fullmatch(entry.name))
    except OSError:
        return []


def earlier_forms(path: Path) -> Sequence[Path]:
    """The files of Nsight Systems that one was exported from."""
    steps = (".sqlite", *RECORDED_SUFFIXES)
    return [path.with_suffix(step) for step in steps[steps.index(path.suffix) + 1 :]] if path.suffix in steps else []
