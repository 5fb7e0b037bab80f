"""Nsight Systems exports made to order: one description, written in the schema of any generation.

The layouts are those of real exports: 2022.2 (schema 2.9.1), 2022.4 (3.0.0) and 2026.2 (3.25.0), with the tables and columns
that pptrace reads and some that it must not mind. Times are given absolute and written relative to the session's start.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pptrace.model.traces import Category
from tests.support.synthetic import START, Event

SESSION = START - 5_000_000_000
"""Begin of the session, UTC ns."""
SECRETS = ("SECRET_TOKEN", "hunter2", "/home/somebody", "secret-host", "secret-daemon")
"""Texts that no report may repeat."""


@dataclass(frozen=True)
class Generation:
    """A schema of Nsight Systems."""

    version: str
    product: str
    metadata_table: str
    kernel_extra: tuple[str, ...] = ()  # columns between the context and the stream
    kernel_pid: bool = True
    registered: bool = False  # NVTX texts are strings of the domain
    api_suffix: str = ""
    text_column: bool = True
    domains: bool = True
    enums: bool = False


EARLY = Generation("2.0.1", "2020.3.1", "EXPORT_META_DATA", kernel_pid=False, api_suffix="_v7000", domains=False)
OLD = Generation("2.9.1", "2022.2.1.31", "EXPORT_META_DATA", registered=True, api_suffix="_v7000")
MIDDLE = Generation("3.0.0", "2022.4.2.1", "EXPORT_META_DATA", registered=True, api_suffix="_v7000")
LATEST = Generation(
    "3.25.0", "2026.2.1.210", "META_DATA_EXPORT", kernel_extra=("greenContextId",), api_suffix="_v7000", enums=True
)
GENERATIONS = (EARLY, OLD, MIDDLE, LATEST)


@dataclass(frozen=True)
class Process:
    """A process of a report: its events, in absolute times, and what it says about itself."""

    pid: int
    events: Sequence[Event]
    thread_names: Sequence[str] = ("python3",)
    facts: Mapping[str, Any] | None = None
    mpi_rank: int | None = None
    name: str = "/home/somebody/bin/python"


@dataclass(frozen=True)
class Report:
    """One report. ``open_ranges`` are NVTX ranges that never ended; ``environment`` that of the profiled program."""

    processes: Sequence[Process]
    generation: Generation = LATEST
    session: int | None = SESSION
    environment: Mapping[str, str] = field(default_factory=lambda: {"SECRET_TOKEN": "hunter2"})
    open_ranges: Sequence[str] = ()
    normalized: bool = False


class _Writer:
    def __init__(self, report: Report, path: Path) -> None:
        self.report = report
        self.generation = report.generation
        self.connection = sqlite3.connect(path)
        self.strings: dict[str, int] = {}
        self.base = 0 if report.normalized else report.session or 0

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 10)

    def table(self, name: str, columns: str, rows: Iterable[Sequence[Any]]) -> None:
        self.connection.execute(f"CREATE TABLE {name} ({columns})")
        rows = list(rows)
        if rows:
            marks = ",".join("?" * len(rows[0]))
            self.connection.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)

    def events(self, *categories: Category) -> list[tuple[Process, Event]]:
        """Of all processes, in the order of their starts, as nsys writes them."""
        rows = [
            (process, event)
            for process in self.report.processes
            for event in process.events
            if event.category in categories
        ]
        return sorted(rows, key=lambda pair: pair[1].start)

    def gpid(self, process: Process) -> int:
        return 1 << 48 | process.pid << 24

    def times(self, event: Event) -> tuple[int, int]:
        return event.start - self.base, event.end - self.base


def write_report(report: Report, path: Path) -> Path:
    """Write the export of a report."""
    path.unlink(missing_ok=True)
    writer = _Writer(report, path)
    _write_device(writer)
    _write_host(writer)
    _write_nvtx(writer)
    _write_identity(writer)
    writer.table("StringIds", "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL", list(_strings(writer)))
    writer.connection.commit()
    writer.connection.close()
    return path


def _strings(writer: _Writer) -> Iterable[tuple[int, str]]:
    yield from ((number, text) for text, number in writer.strings.items())
    if not writer.generation.enums:  # older exports keep the environment among their strings
        yield 5, "\0".join(f"{name}={value}" for name, value in writer.report.environment.items())


def _write_device(writer: _Writer) -> None:
    """Kernels, copies, fills. A table of which there are no rows is not written."""
    extra = writer.generation.kernel_extra
    kernels = writer.events(Category.KERNEL)
    pid_column = ["globalPid INTEGER"] if writer.generation.kernel_pid else []
    columns = [
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL",
        *(f"{name} INTEGER" for name in extra),
        "streamId INTEGER NOT NULL, correlationId INTEGER",
        *pid_column,
        "demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, gridX INTEGER NOT NULL",
    ]

    def row(process: Process, event: Event) -> tuple[Any, ...]:
        place = (event.device, 1, *(None for _ in extra), event.stream, event.correlation)
        owner = [writer.gpid(process)] if pid_column else []
        names = map(writer.string, (event.name, event.name.split("(")[0]))
        return (*writer.times(event), *place, *owner, *names, None, 128)

    if rows := [row(*pair) for pair in kernels]:
        writer.table("CUPTI_ACTIVITY_KIND_KERNEL", ", ".join(columns), rows)
    head = (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL, "
        "correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, "
    )

    def common(process: Process, event: Event) -> tuple[Any, ...]:
        return (*writer.times(event), event.device, event.stream, event.correlation, writer.gpid(process), 4096)

    copies = [(*common(*pair), 1, 1, 2) for pair in writer.events(Category.MEMCPY)]
    if copies:
        writer.table("CUPTI_ACTIVITY_KIND_MEMCPY", head + "copyKind INTEGER, srcKind INTEGER, dstKind INTEGER", copies)
    fills = [(*common(*pair), 2) for pair in writer.events(Category.MEMSET)]
    if fills:
        writer.table("CUPTI_ACTIVITY_KIND_MEMSET", head + "memKind INTEGER", fills)


def _write_host(writer: _Writer) -> None:
    suffix, calls = writer.generation.api_suffix, writer.events(Category.RUNTIME)
    ids = [(writer.gpid(of) | call.thread, call.correlation, writer.string(call.name + suffix)) for of, call in calls]
    rows = [(*writer.times(call), 0, *of_call, 0) for (_, call), of_call in zip(calls, ids, strict=True)]
    columns = (
        "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
        "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL"
    )
    if rows:
        writer.table("CUPTI_ACTIVITY_KIND_RUNTIME", columns, rows)


def _write_nvtx(writer: _Writer) -> None:
    """Push/pop ranges, every third one as start/end; with domain rows and instants beside them."""
    generation = writer.generation
    rows: list[tuple[Any, ...]] = []
    for number, (process, event) in enumerate(writer.events(Category.ANNOTATION)):
        start, end = writer.times(event)
        rows.append(_nvtx_row(writer, process, event.name, start, end, 60 if number % 3 == 2 else 59, event.thread))
    first = writer.report.processes[0]
    rows += [_nvtx_row(writer, first, name, 7, None, 59, 1) for name in writer.report.open_ranges]
    if not rows:
        return
    rows.append(_nvtx_row(writer, first, "an instant", 5, None, 34, 1))
    domain = ", domainId INTEGER" if generation.domains else ""
    columns = (
        "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, text TEXT, globalTid INTEGER, "
        f"endGlobalTid INTEGER, textId INTEGER{domain}"
    )
    if generation.domains:
        gtid = writer.gpid(first) | 1
        rows.insert(0, (3, None, 75, None, "pptrace", gtid, None, None, 1))
    writer.table("NVTX_EVENTS", columns, rows)
    if generation.enums:
        kinds = [(34, "NvtxMark"), (59, "NvtxPushPopRange"), (60, "NvtxStartEndRange"), (75, "NvtxDomainCreate")]
        writer.table("ENUM_NSYS_EVENT_TYPE", "id INTEGER PRIMARY KEY, name TEXT", kinds)


def _nvtx_row(
    writer: _Writer, process: Process, name: str, start: int, end: int | None, kind: int, thread: int
) -> tuple[Any, ...]:
    registered = writer.generation.registered and kind != 34
    gtid = writer.gpid(process) | thread
    row = (start, end, kind, None, None if registered else name, gtid, gtid if kind == 60 else None)
    domain = (1,) if writer.generation.domains else ()
    return (*row, writer.string(name) if registered else None, *domain)


def _write_identity(writer: _Writer) -> None:
    """Write who recorded what, where and when: with everything that must not be repeated."""
    report, generation = writer.report, writer.generation
    exported = [
        ("EXPORT_PRODUCT_NAME", "NVIDIA Nsight Systems"),
        ("EXPORT_PRODUCT_VERSION", generation.product),
        ("EXPORT_SCHEMA_VERSION", generation.version),
        ("EXPORT_HOST", "secret-host"),
        ("EXPORT_INPUT_PATH_ABS", "/home/somebody/run.nsys-rep"),
        ("EXPORT_PARAM_TIME_NORMALIZE", "true" if report.normalized else "false"),
    ]
    writer.table(generation.metadata_table, "name TEXT NOT NULL, value TEXT", exported)
    if report.session is not None:
        columns = "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT"
        writer.table("TARGET_INFO_SESSION_START_TIME", columns, [(report.session, "", "")])
    names = [
        (writer.string(name), 20, writer.gpid(process) | 0x10 + index)
        for process in report.processes
        for index, name in enumerate(process.thread_names)
    ]
    writer.table("ThreadNames", "nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER", names)
    processes = [(writer.gpid(process), process.pid, process.name) for process in report.processes]
    others = [(1 << 48 | 7 << 24, 7, "secret-daemon rank 5")]
    writer.table("PROCESSES", "globalPid INTEGER, pid INTEGER, name TEXT", processes + others)
    if generation.enums:
        variables = [
            ("PROCESS_0:ENVIRONMENT_VARIABLE", f'{name}="{value}"') for name, value in report.environment.items()
        ]
        writer.table("META_DATA_CAPTURE", "name TEXT NOT NULL, value TEXT", variables)
    ranks = [(writer.gpid(item) | item.pid, item.mpi_rank) for item in report.processes if item.mpi_rank is not None]
    if ranks:
        writer.table("MPI_RANKS", "globalTid INTEGER, rank INTEGER", ranks)
    facts = [(process.pid, json.dumps(process.facts)) for process in report.processes if process.facts is not None]
    if facts:
        writer.table("PPTRACE_METADATA", "pid INTEGER, facts TEXT", facts)
