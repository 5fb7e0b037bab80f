"""Read rocpd databases: what rocprofv3 and rocprof-sys write, one for each process, or several merged into one file.

Times are those of the node's clock since its start, which the processes of a node share. The environments of processes, which
are in the file, tell ranks and are not passed on.

    rocpd_region           start, end, name_id, event_id                 calls of HIP, HSA and RCCL, ranges of rocTX
    rocpd_kernel_dispatch  start, end, kernel_id, event_id
    rocpd_memory_copy      start, end, name_id, event_id, size
        where it was:      pid, tid, agent_id, queue_id, stream_id       until schema 4, then in rocpd_track
    rocpd_event            category_id, stack_id, extdata                the same stack_id: a call and what it launched
    rocpd_string, rocpd_info_{process,thread,agent,kernel_symbol,node,category}

Every table's name ends with the id of the process that it is of: a file that several were merged into has several of each.
(rocm-systems, ``projects/rocprofiler-sdk``: ``rocpd_tables.sql`` 3.0.0 to 4.1.0, ``generateRocpd.cpp``.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from pptrace.errors import TraceError
from pptrace.ingest.common.codes import Codes, RangeCodes
from pptrace.ingest.common.json_texts import object_of
from pptrace.ingest.common.rank_names import rank_of_file_name, rank_of_value
from pptrace.ingest.common.sort_events import EventColumns, sorted_events
from pptrace.ingest.common.sqlite import NONE, Database, as_integers
from pptrace.ingest.nsight.ranks import RANK_VARIABLES
from pptrace.model.tables import Int64
from pptrace.model.traces import DEVICE_NAMES, HOST, HOST_NAME, ONE_CLOCK, Category, InputFormat, Trace
from pptrace.model.wording import counted
from pptrace.slices import first_like

REGIONS, KERNELS, COPIES, EVENTS = "rocpd_region", "rocpd_kernel_dispatch", "rocpd_memory_copy", "rocpd_event"
_TABLE = re.compile(rf"({REGIONS}|{KERNELS}|{COPIES}|rocpd_info_process)((?:_[0-9a-fA-F]+)*)")
_PLACES = ("pid", "tid", "agent_id", "queue_id", "stream_id")
_RUNTIME, _LIBRARY, _MARKER = re.compile(r"HIP|HSA"), re.compile(r"RCCL"), re.compile(r"MARKER|ROCTX", re.IGNORECASE)
_ENDS = {"HOST": "Host", "DEVICE": "Device"}
_COPY = re.compile(r"(?:MEMORY_COPY_)?(HOST|DEVICE)_TO_(HOST|DEVICE)")


def read_tables(db: Database, suffix: str, names: Codes, warnings: list[str]) -> list[EventColumns]:
    """All events of a process, table by table; ``process`` is an id of ``rocpd_info_process``, -1 if unknown."""
    events = _EventTable.of(db, suffix)
    agents = db.all_rows(f"rocpd_info_agent{suffix}", ("id", "type", "type_index"))
    devices = {key: index for key, kind, index in agents if kind == "GPU" and type(index) is int and 0 <= index < 2**31}
    read = (
        _regions(db, suffix, names, events, warnings),
        _work(db, suffix, KERNELS, names, events, devices, warnings),
        _work(db, suffix, COPIES, names, events, devices, warnings),
    )
    return [columns for columns in read if columns is not None]


class _EventTable(Struct, frozen=True):
    """``rocpd_event``: the stack and the category of each event."""

    id: Int64
    stack: Int64
    category: Int64
    categories: Mapping[int, str]

    @classmethod
    def of(cls, db: Database, suffix: str) -> _EventTable:
        table = f"{EVENTS}{suffix}"
        if not db.has(table, "id", "stack_id", "category_id"):
            none = np.zeros(0, dtype=np.int64)
            return cls(none, none, none, {})
        key, stack, category = keyed(db, table, ("stack_id", "category_id"))
        source = (f"rocpd_info_category{suffix}", "name")
        if not db.has(source[0], "id", "name"):
            source = (f"rocpd_string{suffix}", "string")
        categories = db.texts(*source, [number for number in np.unique(category).tolist() if number != NONE])
        return cls(key, stack, category, categories)

    def rows_of(self, ids: Int64) -> Int64:
        """The row of each event, -1 where there is none."""
        return first_like([ids], [self.id])

    def of_rows(self, column: Int64, rows: Int64) -> Int64:
        return np.append(column, NONE)[rows]


def _columns(
    db: Database, table: str, suffix: str, chosen: Sequence[str], warnings: list[str]
) -> dict[str, Int64] | None:
    """Columns of a table, with where its rows were; None where the table is not there, or has no times."""
    if table + suffix not in db.tables:
        return None
    if not db.has(table + suffix, "start", "end"):
        warnings.append(f"left out table {table}: it has no columns start and end")
        return None
    needed = ("start", "end", *chosen, "event_id")
    on_track = db.has(table + suffix, "track_id") and not db.has(table + suffix, "pid")
    places = ("track_id",) if on_track else _PLACES
    present = [name if db.has(table + suffix, name) else None for name in (*needed, *places)]
    columns = dict(zip((*needed, *places), db.integers(table + suffix, present), strict=True))
    if on_track:
        columns |= _places_of(db, suffix, columns.pop("track_id"))
    is_complete = (columns["start"] != NONE) & (columns["end"] != NONE)
    if not is_complete.all():
        rows = counted(int(np.count_nonzero(~is_complete)), "row")
        warnings.append(f"left out {rows} of table {table} without a start or an end")
    return {name: column[is_complete] for name, column in columns.items()}


def _places_of(db: Database, suffix: str, track: Int64) -> dict[str, Int64]:
    """The process, thread, device, queue and stream of the track of each row."""
    table = f"rocpd_track{suffix}"
    places = {name: np.full(len(track), NONE) for name in _PLACES}
    if db.has(table, "id"):
        present = [name for name in _PLACES if db.has(table, name)]
        key, *columns = keyed(db, table, present)
        row = first_like([track], [key])
        places |= {name: np.append(column, NONE)[row] for name, column in zip(present, columns, strict=True)}
    return places


def keyed(db: Database, table: str, columns: Sequence[str]) -> tuple[Int64, ...]:
    """The ids of a table's rows, and columns. SQLite reads them: an id that is its own number of the row is in no record."""
    chunks = [tuple(map(as_integers, chunk)) for chunk in db.rows(table, ("id", *columns))]
    none = tuple(np.zeros(0, dtype=np.int64) for _ in range(len(columns) + 1))
    return tuple(np.concatenate(parts) for parts in zip(none, *chunks, strict=True))


def _regions(db: Database, suffix: str, names: Codes, events: _EventTable, warnings: list[str]) -> EventColumns | None:
    """Calls and ranges of the host; a range of rocTX is named by its message."""
    columns = _columns(db, REGIONS, suffix, ("name_id",), warnings)
    if columns is None or not len(columns["start"]):
        return None
    row = events.rows_of(columns["event_id"])
    kinds = events.of_rows(events.category, row)
    category = np.full(len(kinds), Category.ANNOTATION, dtype=np.int8)
    marker_kinds = []
    for kind in np.unique(kinds).tolist():
        text = events.categories.get(kind, "")
        if _MARKER.search(text):
            marker_kinds.append(kind)
        elif _RUNTIME.search(text) and not _LIBRARY.search(text):
            category[kinds == kind] = Category.RUNTIME
    name = db.text_codes(f"rocpd_string{suffix}", "string", columns["name_id"], names)
    codes_of_texts = RangeCodes(names)
    if marker_kinds:
        codes = {
            key: codes_of_texts[message.encode("utf-8", "replace")]
            for key, message in _messages(db, suffix, marker_kinds)
        }
        marked = np.flatnonzero(np.isin(kinds, marker_kinds))
        found = [codes.get(key, -1) for key in columns["event_id"][marked].tolist()]
        name[marked] = np.where(np.array(found) >= 0, found, name[marked])
    category[np.isin(name, list(codes_of_texts.torch_ops)) & (category == Category.ANNOTATION)] = Category.CPU_OP
    is_call = category == Category.RUNTIME
    correlation = np.where(is_call, _positive(events.of_rows(events.stack, row)), -1)
    thread, process = (np.where(columns[name] == NONE, -1, columns[name]) for name in ("tid", "pid"))
    return EventColumns.of(category, name, columns["start"], columns["end"], -1, thread, correlation, process)


def _messages(db: Database, suffix: str, kinds: Sequence[int]) -> Iterator[tuple[int, str]]:
    """The messages of rocTX ranges by the event that has them."""
    table = f"{EVENTS}{suffix}"
    if not db.has(table, "extdata"):
        return
    for keys, texts in db.rows(table, ("id", "extdata"), f"WHERE category_id IN ({','.join(map(str, kinds))})"):
        for key, text in zip(keys, texts, strict=True):
            message = object_of(text).get("message")
            if isinstance(message, str) and message:
                yield key, message


def _work(
    db: Database,
    suffix: str,
    table: str,
    names: Codes,
    events: _EventTable,
    devices: Mapping[int, int],
    warnings: list[str],
) -> EventColumns | None:
    """Kernels or copies."""
    is_copy = table == COPIES
    needed = ("name_id", "src_agent_id", "dst_agent_id") if is_copy else ("kernel_id",)
    columns = _columns(db, table, suffix, needed, warnings)
    if columns is None or not len(columns["start"]):
        return None
    if is_copy:  # its device is where it goes to, or from where it comes if that is the host
        name = db.text_codes(f"rocpd_string{suffix}", "string", columns["name_id"], names, copy_name)
        source, target = columns["src_agent_id"], columns["dst_agent_id"]
        agent = np.where(np.isin(target, list(devices)), target, source)
    else:
        symbols = f"rocpd_info_kernel_symbol{suffix}"
        column = "display_name" if db.has(symbols, "display_name") else "kernel_name"
        name = db.text_codes(symbols, column, columns["kernel_id"], names)
        agent = columns["agent_id"]
    agents, of_agent = np.unique(agent, return_inverse=True)
    return EventColumns.of(
        Category.MEMCPY if is_copy else Category.KERNEL,
        name,
        columns["start"],
        columns["end"],
        np.array([devices.get(key, -1) for key in agents.tolist()], dtype=np.int32)[of_agent],
        streams_of(columns["stream_id"], columns["queue_id"]),
        _positive(events.of_rows(events.stack, events.rows_of(columns["event_id"]))),
        np.where(columns["pid"] == NONE, -1, columns["pid"]),
    )


def streams_of(stream: Int64, queue: Int64) -> Int64:
    """The stream of each row; the queue where HIP's streams were not recorded, that is where all rows are of one."""
    chosen = queue if len(np.unique(stream)) == 1 < len(np.unique(queue)) else stream
    return np.where(chosen < 0, -1, chosen)


def _positive(values: Int64) -> Int64:
    return np.where(values > 0, values, -1)


def copy_name(text: str) -> str:
    """The name that Kineto gives such a copy."""
    match = _COPY.fullmatch(text)
    return text if match is None else f"Memcpy {match[1][0]}to{match[2][0]} ({_ENDS[match[1]]} -> {_ENDS[match[2]]})"


EXPECTED_INPUT = "expected the database that 'rocprofv3 --output-format rocpd' writes; copy it anew or record again"


def read_rocpd(path: Path) -> tuple[Trace, ...]:
    """Read a trace for each process with kernels, else with copies, else with calls or ranges.

    Raises:
        TraceError: the file cannot be read, is no such database, or holds no events.
    """
    with Database(path, EXPECTED_INPUT) as db:
        # The ends of the names of the tables, one for each process that recorded.
        suffixes = sorted({match[2] for match in map(_TABLE.fullmatch, db.tables) if match})
        if not suffixes:
            raise TraceError(f"{path}: an SQLite database without the tables of rocpd; {EXPECTED_INPUT}")
        warnings: list[str] = []
        processes = [process for suffix in suffixes for process in _processes(db, suffix, warnings)]
        version = dict(db.all_rows(f"rocpd_metadata{suffixes[0]}", ("tag", "value"))).get("schema_version")
    producer = f"rocpd (schema {version})" if isinstance(version, str) and len(version) < 20 else "rocpd"
    return traces_of(path, processes, warnings, producer, EXPECTED_INPUT, db.damage)


def traces_of(
    path: Path,
    processes: Sequence[Process],
    warnings: list[str],
    producer: str,
    expected: str,
    damage: Sequence[str] = (),
) -> tuple[Trace, ...]:
    """A trace for each process with kernels, else with copies, else with calls or ranges.

    Raises:
        TraceError: there are no events.
    """
    most = max((process.worth for process in processes), default=0)
    chosen = [process for process in processes if process.worth == most > 0]
    if not chosen:
        what = f" ({'; '.join(damage)})" if damage else ""
        raise TraceError(f"{path}: no kernel, copy, call or range{what}; {expected} with --sys-trace")
    if others := len(processes) - len(chosen):
        warnings.append(f"left out {counted(others, 'process', 'processes')} without {_MISSING[chosen[0].worth]}")
    warnings += damage
    if len(chosen) == 1 and chosen[0].rank is None:
        chosen[0].rank = rank_of_file_name(path.name)
    traces: list[Trace] = []
    for process in chosen:
        ordered = sorted_events(process.rows, process.names, 0)
        traces.append(
            Trace(
                path=str(path),
                format=InputFormat.ROCPD,
                rank=process.rank,
                producer=producer,
                events=ordered.without_comm_args,
                metadata=process.facts,
                warnings=(*(() if traces else warnings), *ordered.warnings),
                damage=ordered.damage_with(is_cut=bool(damage)),
            )
        )
    if not any(len(trace.events) for trace in traces):
        raise TraceError(f"{path}: no event has a usable time; {expected}")
    return tuple(sorted(traces, key=lambda trace: (trace.rank is None, trace.rank or 0)))


_MISSING = {3: "kernels", 2: "device work", 1: "events"}


class Process(Struct):
    """The events of a process, and what the file says of it. ``worth``: 3 with kernels, 2 with copies, 1 with others, 0."""

    rows: Sequence[EventColumns]
    names: Sequence[str]
    rank: int | None
    facts: Mapping[str, Any]

    @property
    def worth(self) -> int:
        kinds = {int(kind) for rows in self.rows for kind in np.unique(rows.category).tolist()}
        return 3 if Category.KERNEL in kinds else 2 if Category.MEMCPY in kinds else 1 if kinds else 0


def _processes(db: Database, suffix: str, warnings: list[str]) -> list[Process]:
    """The processes of which the tables of one suffix are: one, as a rule."""
    names = Codes()
    tables = read_tables(db, suffix, names, warnings)
    described = {
        key: (node, environment)
        for key, node, environment in db.all_rows(f"rocpd_info_process{suffix}", ("id", "nid", "environment"))
    }
    ids = sorted({number for rows in tables for number in np.unique(rows.process).tolist()} | set(described))
    hosts = dict(db.all_rows(f"rocpd_info_node{suffix}", ("id", "hostname")))
    gpus = [
        str(name)
        for name, kind in db.all_rows(f"rocpd_info_agent{suffix}", ("product_name", "type"))
        if kind == "GPU" and name
    ]
    found = []
    for number in ids:
        own_rows = [rows.select(np.flatnonzero(rows.process == number)) for rows in tables]
        node, environment = described.get(number, (None, None))
        variables = object_of(environment)  # the launcher of the process set them
        ranks = (rank_of_value(variables.get(name)) for name in RANK_VARIABLES)
        rank = next((rank for rank in ranks if rank is not None), None)
        facts: dict[str, Any] = {DEVICE_NAMES: gpus} if gpus else {}
        if node is not None:
            facts[ONE_CLOCK] = f"{HOST}{node}"
        if hosts.get(node):
            facts[HOST_NAME] = str(hosts[node])
        found.append(Process([rows for rows in own_rows if len(rows)], names.texts, rank, facts))
    return found
