"""An independent reading of device time: slow, plain, exact, and sharing no code with pptrace.

It walks over every boundary of every kernel, copy and fill, and counts by the definitions of the report's ``device``: each
nanosecond belongs to one category, in the order compute, communication, memory. The time of a marked op is that of the
computing kernels launched inside its host range by any thread. Only json, gzip, re, sqlite3 and decimal are used.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from contextlib import closing
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

CATEGORIES = {
    "kernel": "kernel",
    "gpu_memcpy": "memory",
    "memcpy": "memory",
    "gpu_memset": "memory",
    "memset": "memory",
}
CARRIERS = ("nccl", "rccl")
LAUNCHES = ("cuda_runtime", "cuda_driver")
_OP = re.compile(r"pp1:(\d+[FBIW]\d+) .*\bstep=(\d+)")
Piece = tuple[int, int, str]
"""(start, end, category), ns."""


@dataclass
class Counted:
    """Figures of a rank's device in the report, with the numerator and the denominator of its overlap; ns."""

    span_ns: int
    busy_ns: int
    compute_ns: int
    communication_ns: int
    memory_ns: int
    idle_ns: int
    overlapped_ns: int
    communicating_ns: int


def kineto_pieces(path: Path) -> list[Piece]:
    """Device work of a Kineto file."""
    pieces = []
    for event in _complete_events(path):
        category = CATEGORIES.get(str(event.get("cat", "")).lower())
        if category is not None:
            start, end = _times(event)
            pieces.append((start, end, _category(category, event["name"])))
    return pieces


@dataclass
class Op:
    """A marked op; ``on_device`` where kernels were launched inside its host range, whose times it then has; ns."""

    step: int
    name: str
    start_ns: int
    end_ns: int
    on_device: bool


def kineto_ops(path: Path) -> list[Op]:
    """The marked ops of a Kineto file in the order of their host ranges; pairs of DualPipe apart."""
    marks: list[tuple[int, int, int, str]] = []
    launched: dict[Any, int] = {}
    kernels: list[tuple[Any, Piece]] = []  # those of a graph have its launch in common
    for event in _complete_events(path):
        category, correlation = event.get("cat", ""), event.get("args", {}).get("correlation")
        if category == "user_annotation" and (match := _OP.match(event["name"])):
            marks.append((*_times(event), int(match[2]), match[1]))
        elif category in LAUNCHES:
            launched[correlation] = _times(event)[0]
        elif category == "kernel":
            kernels.append((correlation, (*_times(event), _category("kernel", event["name"]))))
    computing = sorted(
        (launched[key], start, end)
        for key, (start, end, category) in kernels
        if category == "compute" and key in launched
    )
    ops = []
    for start, end, step, name in sorted(marks):
        inside = [(first, last) for at, first, last in computing if start <= at < end]
        times = (min(first for first, _ in inside), max(last for _, last in inside)) if inside else (start, end)
        ops.append(Op(step, name, *times, bool(inside)))
    return ops


def expectation(folder: Path) -> dict[str, Any]:
    """Compute what is expected of a recording with device events: of each rank its device time and its ops, from the first op
    on.
    """
    ranks = []
    for path in sorted(folder.glob("rank*.json.gz"), key=lambda path: int(path.name[4:].split(".")[0])):
        ops = kineto_ops(path)
        origin = ops[0].start_ns if ops else 0
        listed = [[op.step, op.name, op.start_ns - origin, op.end_ns - origin] for op in ops]
        ranks.append({"device": asdict(count(kineto_pieces(path))), "ops": listed})
    return {"ranks": ranks}


def _complete_events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace: Any = json.load(file, parse_float=Decimal)
    return [event for event in (trace["traceEvents"] if isinstance(trace, dict) else trace) if event.get("ph") == "X"]


def _times(event: dict[str, Any]) -> tuple[int, int]:
    """Start and end of an event, whole ns."""
    start, duration = Decimal(event["ts"]) * 1000, Decimal(event["dur"]) * 1000
    assert start == int(start)
    assert duration == int(duration)
    return int(start), int(start) + int(duration)


def nsight_pieces(path: Path) -> list[list[Piece]]:
    """Device work of a Nsight export, for each process that has any."""
    result: dict[object, list[Piece]] = {}
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db, db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table in ("KERNEL", "MEMCPY", "MEMSET"):
            full = f"CUPTI_ACTIVITY_KIND_{table}"
            if full not in tables:
                continue
            columns = [column[1] for column in db.execute(f"PRAGMA table_info({full})")]
            names = dict(db.execute("SELECT id, value FROM StringIds"))
            for row in db.execute(f"SELECT * FROM {full}"):
                event = dict(zip(columns, row, strict=True))
                name = names.get(event.get("demangledName"), "") if table == "KERNEL" else ""
                category = _category("kernel" if table == "KERNEL" else "memory", name)
                result.setdefault(event.get("globalPid"), []).append((event["start"], event["end"], category))
    return list(result.values())


def _category(category: str, name: str) -> str:
    if category == "kernel":
        return "communication" if any(carrier in name.lower() for carrier in CARRIERS) else "compute"
    return category


def count(pieces: list[Piece]) -> Counted:
    """Walk from boundary to boundary."""
    edges: dict[int, list[tuple[str, int]]] = {}
    for start, end, category in pieces:
        edges.setdefault(start, []).append((category, 1))
        edges.setdefault(end, []).append((category, -1))
    active = {"compute": 0, "communication": 0, "memory": 0}
    owned = dict.fromkeys(active, 0)
    overlapped = communicating = 0
    times = sorted(edges)
    for index, time in enumerate(times[:-1]):
        for category, change in edges[time]:
            active[category] += change
        length = times[index + 1] - time
        owner = next((category for category in ("compute", "communication", "memory") if active[category]), None)
        if owner is not None:
            owned[owner] += length
        if active["communication"]:
            communicating += length
            overlapped += length if active["compute"] else 0
    busy = sum(owned.values())
    span = times[-1] - times[0]
    return Counted(
        span, busy, owned["compute"], owned["communication"], owned["memory"], span - busy, overlapped, communicating
    )
