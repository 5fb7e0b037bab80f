"""Memory events of Nsight Systems: levels by process, from a table as the export's schema documents it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from pptrace.ingest.common.sqlite import Database
from pptrace.ingest.nsight.event_tables import read_memory

FIRST, SECOND = 77 << 24, 78 << 24
ALLOCATES, RELEASES, HOST, DEVICE = 0, 1, 1, 2
Event = tuple[int, int, int, int, int, int, int]


def levels(tmp_path: Path, events: list[Event], columns: str = "") -> dict[int, list[tuple[int, int]]]:
    """Times and levels by pid, of events (start, globalPid, contextId, address, bytes, memKind, memoryOperationType)."""
    path = tmp_path / "export.sqlite"
    names = columns or "start, globalPid, contextId, address, bytes, memKind, memoryOperationType"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS ({names})")
        marks = ",".join("?" * len(names.split(",")))
        db.executemany(f"INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS VALUES ({marks})", events)
    with Database(path, "") as export:
        memory = read_memory(export, base_ns=1000)
    assert all((table["reserved_bytes"] == -1).all() for table in memory.values())
    return {
        pid: list(zip(table["t_ns"].tolist(), table["allocated_bytes"].tolist(), strict=True))
        for pid, table in memory.items()
    }


def test_allocations_and_releases_add_up_by_process(tmp_path: Path) -> None:
    events: list[Event] = [
        (30, FIRST, 1, 0xA, 100, DEVICE, RELEASES),
        (10, FIRST, 1, 0xA, 100, DEVICE, ALLOCATES),
        (20, FIRST, 1, 0xB, 40, DEVICE, ALLOCATES),
        (15, SECOND, 1, 0xA, 7, DEVICE, ALLOCATES),
        (16, SECOND, 1, 0xC, 9, HOST, ALLOCATES),
    ]
    assert levels(tmp_path, events) == {77: [(1010, 100), (1020, 140), (1030, 40)], 78: [(1015, 7)]}


def test_a_release_gives_back_what_its_address_got_and_nothing_else(tmp_path: Path) -> None:
    events: list[Event] = [
        (5, FIRST, 1, 0x1, 500, DEVICE, RELEASES),  # of before the recording
        (10, FIRST, 1, 0xA, 100, DEVICE, ALLOCATES),
        (20, FIRST, 1, 0xA, 0, DEVICE, RELEASES),
        (20, FIRST, 1, 0xA, 60, DEVICE, ALLOCATES),
        (30, FIRST, 2, 0xA, 60, DEVICE, RELEASES),  # of another context
        (40, FIRST, 1, 0xA, 60, DEVICE, 7),
    ]
    assert levels(tmp_path, events) == {77: [(1010, 100), (1020, 0), (1020, 60)]}


@pytest.mark.parametrize("columns", ["start, globalPid", "start, globalPid, contextId, address, bytes, memKind, other"])
def test_a_table_with_other_columns_is_left_alone(tmp_path: Path, columns: str) -> None:
    assert levels(tmp_path, [], columns) == {}
