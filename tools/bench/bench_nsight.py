"""Speed and memory with which ``read_nsight`` reads a large export.

    python tools/bench/bench_nsight.py [--kernels N] [--ranges N] [--calls N] [--rounds N]

The export is made up: kernels (the latest schema's columns), NVTX push/pop ranges with their texts, and, where asked for, CUDA
calls that launched the kernels. Each round reads it in a process of its own; beside it the same columns through sqlite3 and
numpy, a chunk of rows at a time. The limit is that of 5 million kernels and 1 million ranges: 10 seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from pptrace.ingest.nsight.reader import read_nsight

LIMIT_S = 10.0
_OWNER = 1 << 48 | 4711 << 24
_KERNEL_COLUMNS = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
    "greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
    "demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, "
    "cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, "
    "gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL"
)


def make_export(path: Path, num_kernels: int, num_ranges: int, num_calls: int) -> None:
    """Write the export; times are of a run of 5 million kernels in 15 seconds."""

    def kernels() -> Iterator[tuple[int | None, ...]]:
        for number in range(num_kernels):
            start, name = 10**9 + 3000 * number, 100 + number % 300
            row = (start, start + 2500, 0, 1, None, 7 + number % 4, number + 1, _OWNER, name, name, None, 0, 0, 32)
            yield (*row, 128, 1, 1, 256, 1, 1)

    def ranges() -> Iterator[tuple[int | str | None, ...]]:
        for number in range(num_ranges):
            start = 10**9 + 15000 * number
            text = f"aten::op{number % 40}, op_id = {number}" if number % 2 else f"forward {number % 64}"
            yield (start, start + 14000, 59, text, _OWNER | 4711 + number % 2, None, 0)

    def calls() -> Iterator[tuple[int, ...]]:
        for number in range(num_calls):
            start = 10**9 - 5000 + 3000 * number
            yield (start, start + 2000, 0, _OWNER | 4711, number + 1, 90, 0)

    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({_KERNEL_COLUMNS})")
        connection.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * 20)})", kernels())
        columns = "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, textId INTEGER"
        connection.execute(f"CREATE TABLE NVTX_EVENTS ({columns}, domainId INTEGER)")
        connection.executemany("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?,?)", ranges())
        if num_calls:
            columns = "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, correlationId INTEGER"
            connection.execute(
                f"CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME ({columns}, nameId INTEGER, returnValue INTEGER)"
            )
            connection.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,?,?,?,?)", calls())
        connection.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        names = [
            (90, "cudaLaunchKernel_v7000"),
            *((100 + kind, f"void kernel{kind}<float>(int)") for kind in range(300)),
        ]
        connection.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
        connection.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER)")
        connection.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1790000000000000000)")
    connection.close()


def _read_pptrace(path: Path) -> int:
    return sum(trace.num_events for trace in read_nsight(path))


def _read_chunks(path: Path) -> int:
    """The same columns of kernels and ranges, unsorted, as arrays."""
    connection = sqlite3.connect(path)
    count = 0
    for columns in (
        "start, end, deviceId, streamId, correlationId, globalPid, demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL",
        "start, end, globalTid FROM NVTX_EVENTS",
    ):
        cursor = connection.execute(f"SELECT {columns}")
        while rows := cursor.fetchmany(1 << 16):
            arrays = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
            count += len(arrays[0])
    connection.close()
    return count


def _peak_bytes() -> int:
    status = Path("/proc/self/status")
    result = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(result[1]) * 1024 if result else 0


def _measure(reader: Callable[[Path], int], path: Path, answer: Connection) -> None:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    count = reader(path)
    answer.send((time.perf_counter() - begin, time.process_time() - begin_cpu, _peak_bytes(), count))
    answer.close()


def _in_process(reader: Callable[[Path], int], path: Path) -> tuple[float, float, int, int]:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(reader, path, send))
    process.start()
    result: Any = receive.recv()
    process.join()
    return result  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", type=int, default=5_000_000)
    parser.add_argument("--ranges", type=int, default=1_000_000)
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.sqlite"
        make_export(path, options.kernels, options.ranges, options.calls)
        print(f"{path.stat().st_size / 1e6:.0f} MB of SQLite, best of {options.rounds}")
        readers = {"read_nsight": _read_pptrace, "sqlite3 in chunks": _read_chunks}
        results: dict[str, list[tuple[float, float, int, int]]] = {name: [] for name in readers}
        for _ in range(options.rounds):  # in turns, so that other load on the machine meets all alike
            for name, reader in readers.items():
                results[name].append(_in_process(reader, path))
    for name, measured in results.items():
        seconds, cpu, peak, count = min(measured)
        memory = f"peak {peak / 1e6:.0f} MB, {peak / count:.0f} bytes per event"
        print(f"{name:18} {count} events in {seconds:.2f} s ({cpu:.2f} s of CPU), {memory}")
    if options.kernels <= 5_000_000 and min(results["read_nsight"])[0] > LIMIT_S:
        raise SystemExit(f"over the limit of {LIMIT_S:g} s")


if __name__ == "__main__":
    main()
