"""Synthetic rocpd databases, in the columns of the schema of rocprofiler-sdk (3.0 and 4.1) that pptrace reads."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

UUID = "_0197a1b2_c3d4_7e5f_8a9b_0c1d2e3f4a5b"
SECRET = "hunter2"
_PLACES = {"pid": 0, "tid": 0, "agent_id": None, "queue_id": None, "stream_id": None}


@dataclass(frozen=True)
class Entry:
    """A row of a table: its name and times, the number that joins a call with what it launched, and where it was."""

    name: str
    start: int
    end: int
    stack: int = 0
    category: str = ""
    message: str = ""
    tid: int = 500
    queue: int = 0
    stream: int = 0
    agent: int = 4


@dataclass(frozen=True)
class Recording:
    """The events of one process."""

    regions: Sequence[Entry] = ()
    kernels: Sequence[Entry] = ()
    copies: Sequence[Entry] = ()
    pid: int = 77
    environment: dict[str, str] = field(default_factory=dict)
    uuid: str = UUID


def write(path: Path, *recordings: Recording, has_tracks: bool = False) -> Path:
    connection = sqlite3.connect(path)
    for recording in recordings:
        _write_one(connection, recording, has_tracks=has_tracks)
    connection.commit()
    connection.close()
    return path


def _write_one(db: sqlite3.Connection, recording: Recording, *, has_tracks: bool) -> None:
    uuid = recording.uuid
    where = "track_id" if has_tracks else " ".join(_PLACES)
    key = '"id" INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT'
    for table, columns in {
        "rocpd_metadata": "tag value",
        "rocpd_string": "guid string",
        "rocpd_info_node": "hash machine_id hostname",
        "rocpd_info_process": "nid pid environment",
        "rocpd_info_agent": "type type_index product_name",
        "rocpd_info_kernel_symbol": "kernel_name display_name",
        "rocpd_info_category": "name",
        "rocpd_track": " ".join(_PLACES),
        "rocpd_event": "category_id stack_id correlation_id extdata",
        "rocpd_region": f"guid {where} start end name_id event_id",
        "rocpd_kernel_dispatch": f"guid {where} kernel_id start end event_id",
        "rocpd_memory_copy": f"guid {where} start end name_id dst_agent_id src_agent_id size event_id",
    }.items():
        if table == "rocpd_info_category" and not has_tracks:
            continue
        listed = ", ".join(f'"{column}"' for column in columns.split())
        db.execute(f"CREATE TABLE IF NOT EXISTS `{table}{uuid}` ({key}, {listed})")
        db.execute(f"CREATE VIEW IF NOT EXISTS `{table}` AS SELECT * FROM `{table}{uuid}`")
    strings: dict[str, int] = {}

    def add(table: str, **values: object) -> int:
        names, marks = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
        statement = f"INSERT INTO `{table}{uuid}` ({names}) VALUES ({marks})"
        return db.execute(statement, [*values.values()]).lastrowid

    def string(text: str) -> int:
        if text not in strings:
            strings[text] = add("rocpd_string", string=text)
        return strings[text]

    def category(text: str) -> int:
        return add("rocpd_info_category", name=text) if has_tracks else string(text)

    def event(entry: Entry, kind: str) -> int:
        extdata = json.dumps({"message": entry.message} if entry.message else {})
        return add("rocpd_event", category_id=category(kind), stack_id=entry.stack, correlation_id=0, extdata=extdata)

    def place(entry: Entry, *, on_device: bool) -> dict[str, object]:
        values: dict[str, object] = {**_PLACES, "pid": recording.pid, "tid": entry.tid}
        if on_device:
            values |= {"agent_id": entry.agent, "queue_id": entry.queue, "stream_id": entry.stream}
        return {"track_id": add("rocpd_track", **values)} if has_tracks else values

    add("rocpd_metadata", tag="schema_version", value="3.0.3")
    add("rocpd_info_node", id=9, hash=9, machine_id="m", hostname="node-7")
    environment = json.dumps({"TOKEN": SECRET, **recording.environment})
    add("rocpd_info_process", id=recording.pid, nid=9, pid=recording.pid, environment=environment)
    add("rocpd_info_agent", id=1, type="CPU", type_index=0, product_name="EPYC")
    for number in range(2):
        add("rocpd_info_agent", id=4 + number, type="GPU", type_index=number, product_name="MI300X")
    for entry in recording.regions:
        kind = entry.category or "HIP_RUNTIME_API_EXT"
        add("rocpd_region", **place(entry, on_device=False), start=entry.start, end=entry.end,
            name_id=string(entry.name), event_id=event(entry, kind))  # fmt: skip
    symbols: dict[str, int] = {}
    for entry in recording.kernels:
        if (name := entry.name) not in symbols:
            symbols[name] = add("rocpd_info_kernel_symbol", kernel_name=f"_Z{name}", display_name=name)
        add("rocpd_kernel_dispatch", **place(entry, on_device=True), kernel_id=symbols[entry.name], start=entry.start,
            end=entry.end, event_id=event(entry, "KERNEL_DISPATCH"))  # fmt: skip
    for entry in recording.copies:
        add("rocpd_memory_copy", **place(entry, on_device=True), start=entry.start, end=entry.end, name_id=string(entry.name),
            dst_agent_id=entry.agent, src_agent_id=1, size=64, event_id=event(entry, "MEMORY_COPY"))  # fmt: skip


def write_json(path: Path, recording: Recording) -> Path:
    """The same as rocprofv3's JSON."""
    entries = (*recording.regions, *recording.kernels, *recording.copies)
    names = list(dict.fromkeys(entry.name for entry in entries))
    lists: dict[str, list[object]] = {}

    def add(kind: str, entry: Entry, **more: object) -> None:
        number = {"internal": entry.stack, "external": 0}
        record = {"kind": 0, "operation": names.index(entry.name), "correlation_id": number}
        times = {"start_timestamp": entry.start, "end_timestamp": entry.end, "thread_id": entry.tid}
        lists.setdefault(kind, []).append({"size": 64, **record, **times, **more})

    for entry in recording.regions:
        kinds = {"RCCL_API": "rccl_api", "HSA_CORE_API": "hsa_api", "MARKER_CORE_RANGE_API": "marker_api"}
        add(kinds.get(entry.category, "hip_api"), entry)
    for entry in recording.kernels:
        where = {"agent_id": {"handle": entry.agent}, "queue_id": {"handle": entry.queue}}
        where["kernel_id"] = names.index(entry.name)
        add("kernel_dispatch", entry, dispatch_info=where, stream_id={"handle": entry.stream})
    for entry in recording.copies:
        ends = {"src_agent_id": {"handle": 1}, "dst_agent_id": {"handle": entry.agent}}
        add("memory_copy", entry, stream_id={"handle": entry.stream}, **ends)
    messages = [{"key": entry.stack, "value": entry.message} for entry in entries if entry.message]
    process = {
        "metadata": {"pid": recording.pid, "node": {"hostname": "node-7"}, "config": {"token": SECRET}},
        "agents": [{"id": {"handle": 1}, "type": 1}]
        + [{"id": {"handle": 4 + number}, "type": 2, "product_name": "MI300X"} for number in range(2)],
        "strings": {"buffer_records": [{"kind": "ANY", "operations": names}], "marker_api": messages},
        "kernel_symbols": [{"kernel_id": index, "formatted_kernel_name": name} for index, name in enumerate(names)],
        "buffer_records": lists,
    }
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [process]}))
    return path


def write_rpd(path: Path, recording: Recording) -> Path:
    """The same as a database of rocmProfileData, whose devices count from 0 on."""
    db = sqlite3.connect(path)
    key = '"id" integer NOT NULL PRIMARY KEY AUTOINCREMENT'
    db.execute(f'CREATE TABLE "rocpd_string" ({key}, "string")')
    db.execute(f'CREATE TABLE "rocpd_api" ({key}, "pid", "tid", "start", "end", "apiName_id", "args_id")')
    db.execute(f'CREATE TABLE "rocpd_op" ({key}, "gpuId", "queueId", "start", "end", "description_id", "opType_id")')
    db.execute(f'CREATE TABLE "rocpd_api_ops" ({key}, "api_id", "op_id")')

    def string(text: str) -> int | None:
        return db.execute("INSERT INTO rocpd_string (string) VALUES (?)", [text]).lastrowid

    for entry in recording.regions:
        name = string("UserMarker" if entry.message else entry.name)
        row = (entry.stack, recording.pid, entry.tid, entry.start, entry.end, name, string(entry.message))
        db.execute("INSERT INTO rocpd_api VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    work = [(entry, entry.name, "KernelExecution") for entry in recording.kernels]
    for entry, name, kind in [*work, *((entry, "", "CopyHostToDevice") for entry in recording.copies)]:
        op = (entry.agent - 4, entry.stream, entry.start, entry.end, string(name), string(kind))
        number = db.execute("INSERT INTO rocpd_op VALUES (NULL, ?, ?, ?, ?, ?, ?)", op).lastrowid
        db.execute("INSERT INTO rocpd_api_ops VALUES (NULL, ?, ?)", (entry.stack, number))
    db.commit()
    db.close()
    return path
