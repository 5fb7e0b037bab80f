"""An independent reading of device time from Nsight exports: slow, plain, and sharing no code with pptrace."""

from __future__ import annotations

import sqlite3
from itertools import pairwise
from pathlib import Path

Interval = tuple[int, int]


def device_times(path: Path) -> dict[int, dict[str, int]]:
    """By pid: busy, compute, communication, memory and idle ns, segment by segment between all edges."""
    connection = sqlite3.connect(path)
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    work: dict[int, dict[str, list[Interval]]] = {}

    def add(owner: int, kind: str, start: int, end: int) -> None:
        kinds = work.setdefault((owner // 2**24) % 2**24, {"compute": [], "communication": [], "memory": []})
        kinds[kind].append((start, end))

    kernels = "SELECT globalPid, k.start, k.end, value FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = demangledName"
    for owner, start, end, name in connection.execute(kernels):
        add(owner, "communication" if "nccl" in name.lower() else "compute", start, end)
    for table in ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"):
        if table in tables:
            for owner, start, end in connection.execute(f"SELECT globalPid, start, end FROM {table}"):
                add(owner, "memory", start, end)
    connection.close()
    return {pid: _split(kinds) for pid, kinds in work.items()}


def _split(kinds: dict[str, list[Interval]]) -> dict[str, int]:
    edges = sorted({edge for intervals in kinds.values() for pair in intervals for edge in pair})
    moves: dict[str, dict[int, int]] = {kind: {} for kind in kinds}
    for kind, intervals in kinds.items():
        for start, end in intervals:
            moves[kind][start] = moves[kind].get(start, 0) + 1
            moves[kind][end] = moves[kind].get(end, 0) - 1
    depth = dict.fromkeys(kinds, 0)
    times = {"compute_ns": 0, "communication_ns": 0, "memory_ns": 0, "idle_ns": 0}
    for low, high in pairwise(edges):
        for kind in kinds:
            depth[kind] += moves[kind].get(low, 0)
        owner = next((kind for kind in ("compute", "communication", "memory") if depth[kind]), "idle")
        times[f"{owner}_ns"] += high - low
    return {**times, "busy_ns": edges[-1] - edges[0] - times["idle_ns"]}
