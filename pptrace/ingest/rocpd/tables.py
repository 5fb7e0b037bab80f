"""Read the tables of a rocpd database, of any schema version, as rows of events.

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

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from pptrace.ingest.nsight.event_names import UNNAMED, Names, TextCodes
from pptrace.ingest.nsight.sqlite import NONE, Database, as_integers
from pptrace.model.tables import Int64
from pptrace.model.traces import Category

REGIONS, KERNELS, COPIES, EVENTS = "rocpd_region", "rocpd_kernel_dispatch", "rocpd_memory_copy", "rocpd_event"
_TABLE = re.compile(rf"({REGIONS}|{KERNELS}|{COPIES}|rocpd_info_process)((?:_[0-9a-fA-F]+)*)")
_PLACES = ("pid", "tid", "agent_id", "queue_id", "stream_id")
_RUNTIME, _LIBRARY, _MARKER = re.compile(r"HIP|HSA"), re.compile(r"RCCL"), re.compile(r"MARKER|ROCTX", re.IGNORECASE)
_ENDS = {"HOST": "Host", "DEVICE": "Device"}
_COPY = re.compile(r"(?:MEMORY_COPY_)?(HOST|DEVICE)_TO_(HOST|DEVICE)")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table, one entry per row in every array; ``process`` is an id of ``rocpd_info_process``, -1 if unknown."""

    category: npt.NDArray[np.int8]
    name: npt.NDArray[np.int32]
    start_ns: Int64
    dur_ns: Int64
    device: npt.NDArray[np.int32]
    lane: Int64
    correlation: Int64
    process: Int64

    def __len__(self) -> int:
        return len(self.start_ns)

    def select(self, rows: npt.NDArray[np.intp]) -> Rows:
        return Rows(*(getattr(self, item.name)[rows] for item in fields(Rows)))


def suffixes_of(db: Database) -> list[str]:
    """The ends of the names of the tables, one for each process that recorded."""
    found = (_TABLE.fullmatch(table) for table in db.tables)
    return sorted({match[2] for match in found if match})


def read_rows(db: Database, suffix: str, names: Names, warnings: list[str]) -> list[Rows]:
    """All events of a process, table by table."""
    strings = _Texts(db, f"rocpd_string{suffix}", ("string",))
    symbols = _Texts(db, f"rocpd_info_kernel_symbol{suffix}", ("display_name", "kernel_name"))
    events = _EventTable.of(db, suffix, strings)
    agents = db.all_rows(f"rocpd_info_agent{suffix}", ("id", "type", "type_index"))
    devices = {key: index for key, kind, index in agents if kind == "GPU" and type(index) is int and 0 <= index < 2**31}
    read = (
        _regions(db, suffix, names, strings, events, warnings),
        _work(db, suffix, KERNELS, Category.KERNEL, ("kernel_id", symbols), names, events, devices, warnings),
        _work(db, suffix, COPIES, Category.MEMCPY, ("name_id", strings), names, events, devices, warnings),
    )
    return [rows for rows in read if rows is not None and len(rows)]


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts of a table by id, from the first of several columns that is there."""

    db: Database
    table: str
    columns: tuple[str, ...]

    def of(self, ids: Int64) -> tuple[list[str], npt.NDArray[np.intp]]:
        """(a text for each distinct id, the index of each row's)."""
        used, inverse = np.unique(ids, return_inverse=True)
        column = next((name for name in self.columns if self.db.has(self.table, "id", name)), None)
        if column is None:
            return [UNNAMED] * len(used), inverse
        wanted_ids = set(used.tolist())
        texts = {
            key: str(text)
            for keys, values in self.db.rows(self.table, ("id", column))
            for key, text in zip(keys, values, strict=True)
            if key in wanted_ids and text is not None
        }
        return [texts.get(number) or UNNAMED for number in used.tolist()], inverse


@dataclass(frozen=True, slots=True)
class _EventTable:
    """``rocpd_event``: by id, sorted, the stack and the category of each event."""

    id: Int64
    stack: Int64
    category: Int64
    categories: Mapping[int, str]

    @classmethod
    def of(cls, db: Database, suffix: str, strings: _Texts) -> _EventTable:
        table = f"{EVENTS}{suffix}"
        if not db.has(table, "id", "stack_id", "category_id"):
            none = np.zeros(0, dtype=np.int64)
            return cls(none, none, none, {})
        key, stack, category = _keyed(db, table, ("stack_id", "category_id"))
        order = np.argsort(key, kind="stable")
        own = f"rocpd_info_category{suffix}"
        texts = _Texts(db, own, ("name",)) if db.has(own, "id", "name") else strings
        found, _ = texts.of(category)
        return cls(
            key[order], stack[order], category[order], dict(zip(np.unique(category).tolist(), found, strict=True))
        )

    def rows_of(self, ids: Int64) -> npt.NDArray[np.intp]:
        """The row of each event, -1 where there is none."""
        if not len(self.id):
            return np.full(len(ids), -1, dtype=np.intp)
        at = np.minimum(np.searchsorted(self.id, ids), len(self.id) - 1)
        return np.where(self.id[at] == ids, at, -1)

    def of_rows(self, column: Int64, rows: npt.NDArray[np.intp]) -> Int64:
        return np.where(rows >= 0, column[np.maximum(rows, 0)], NONE) if len(column) else np.full(len(rows), NONE)


def _columns(
    db: Database, table: str, suffix: str, wanted: Sequence[str], warnings: list[str]
) -> dict[str, Int64] | None:
    """Columns of a table, with where its rows were; None where the table is not there, or has no times."""
    if table + suffix not in db.tables:
        return None
    if not db.has(table + suffix, "start", "end"):
        warnings.append(f"left out table {table}: it has no columns start and end")
        return None
    needed = ("start", "end", *wanted, "event_id")
    on_track = db.has(table + suffix, "track_id") and not db.has(table + suffix, "pid")
    places = ("track_id",) if on_track else _PLACES
    present = [name if db.has(table + suffix, name) else None for name in (*needed, *places)]
    columns = dict(zip((*needed, *places), db.integers(table + suffix, present), strict=True))
    if on_track:
        columns |= _places_of(db, suffix, columns.pop("track_id"))
    is_complete = (columns["start"] != NONE) & (columns["end"] != NONE)
    if not is_complete.all():
        warnings.append(f"left out {np.count_nonzero(~is_complete)} rows of table {table} without a start or an end")
    return {name: column[is_complete] for name, column in columns.items()}


def _places_of(db: Database, suffix: str, track: Int64) -> dict[str, Int64]:
    """The process, thread, device, queue and stream of the track of each row."""
    table = f"rocpd_track{suffix}"
    if not db.has(table, "id"):
        return {name: np.full(len(track), NONE) for name in _PLACES}
    present = [name for name in _PLACES if db.has(table, name)]
    key, *columns = _keyed(db, table, present)
    if not len(key):
        return {name: np.full(len(track), NONE) for name in _PLACES}
    order = np.argsort(key, kind="stable")
    at = np.minimum(np.searchsorted(key[order], track), len(key) - 1)
    is_known = key[order][at] == track
    found = {name: np.where(is_known, column[order][at], NONE) for name, column in zip(present, columns, strict=True)}
    return {name: found.get(name, np.full(len(track), NONE)) for name in _PLACES}


def _keyed(db: Database, table: str, columns: Sequence[str]) -> tuple[Int64, ...]:
    """The ids of a table's rows, and columns. SQLite reads them: an id that is its own number of the row is in no record."""
    chunks = [tuple(map(as_integers, chunk)) for chunk in db.rows(table, ("id", *columns))]
    none = tuple(np.zeros(0, dtype=np.int64) for _ in range(len(columns) + 1))
    return tuple(np.concatenate(parts) for parts in zip(none, *chunks, strict=True))


def _regions(
    db: Database, suffix: str, names: Names, strings: _Texts, events: _EventTable, warnings: list[str]
) -> Rows | None:
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
    texts, inverse = strings.of(columns["name_id"])
    name = np.array([names[text] for text in texts], dtype=np.int32)[inverse]
    if marker_kinds:
        codes_of_texts = TextCodes(names)
        codes = {
            key: codes_of_texts[message.encode("utf-8", "replace")]
            for key, message in _messages(db, suffix, marker_kinds)
        }
        marked = np.flatnonzero(np.isin(kinds, marker_kinds))
        found = [codes.get(key, -1) for key in columns["event_id"][marked].tolist()]
        name[marked] = np.where(np.array(found) >= 0, found, name[marked])
    category[np.isin(name, list(names.torch_ops)) & (category == Category.ANNOTATION)] = Category.CPU_OP
    is_call = category == Category.RUNTIME
    correlation = np.where(is_call, _positive(events.of_rows(events.stack, row)), -1)
    return Rows(
        category,
        name,
        columns["start"],
        columns["end"] - columns["start"],
        np.full(len(kinds), -1, dtype=np.int32),
        np.where(columns["tid"] == NONE, -1, columns["tid"]),
        correlation,
        np.where(columns["pid"] == NONE, -1, columns["pid"]),
    )


def _messages(db: Database, suffix: str, kinds: Sequence[int]) -> Iterator[tuple[int, str]]:
    """The messages of rocTX ranges by the event that has them."""
    table = f"{EVENTS}{suffix}"
    if not db.has(table, "extdata"):
        return
    for keys, texts in db.rows(table, ("id", "extdata"), f"WHERE category_id IN ({','.join(map(str, kinds))})"):
        for key, text in zip(keys, texts, strict=True):
            try:
                value = json.loads(text)
            except (TypeError, ValueError, RecursionError):
                continue
            if isinstance(value, dict) and isinstance(value.get("message"), str) and value["message"]:
                yield key, value["message"]


def _work(
    db: Database,
    suffix: str,
    table: str,
    category: Category,
    named_by: tuple[str, _Texts],
    names: Names,
    events: _EventTable,
    devices: Mapping[int, int],
    warnings: list[str],
) -> Rows | None:
    """Kernels or copies."""
    column, source = named_by
    columns = _columns(
        db, table, suffix, (column, *_ONLY_COPIES) if category is Category.MEMCPY else (column,), warnings
    )
    if columns is None or not len(columns["start"]):
        return None
    texts, inverse = source.of(columns[column])
    agent = columns["agent_id"]
    if category is Category.MEMCPY:
        texts = [_copy_name(text) for text in texts]
        agent = _device_of_copy(columns, devices)
    agents, of_agent = np.unique(agent, return_inverse=True)
    device = np.array([devices.get(key, -1) for key in agents.tolist()], dtype=np.int32)[of_agent]
    return Rows(
        np.full(len(inverse), category, dtype=np.int8),
        np.array([names[text] for text in texts], dtype=np.int32)[inverse],
        columns["start"],
        columns["end"] - columns["start"],
        device,
        _streams(columns),
        _positive(events.of_rows(events.stack, events.rows_of(columns["event_id"]))),
        np.where(columns["pid"] == NONE, -1, columns["pid"]),
    )


_ONLY_COPIES = ("src_agent_id", "dst_agent_id")


def _device_of_copy(columns: Mapping[str, Int64], devices: Mapping[int, int]) -> Int64:
    """The device of each copy: where it goes to, or from where it comes if that is the host."""
    source, target = columns["src_agent_id"], columns["dst_agent_id"]
    return np.where(np.isin(target, list(devices)), target, source)


def _streams(columns: Mapping[str, Int64]) -> Int64:
    """The stream of each row; the queue where HIP's streams were not recorded, that is where all rows are of one."""
    stream, queue = columns["stream_id"], columns["queue_id"]
    chosen = queue if len(np.unique(stream)) == 1 < len(np.unique(queue)) else stream
    return np.where(chosen < 0, -1, chosen)


def _positive(values: Int64) -> Int64:
    return np.where(values > 0, values, -1)


def _copy_name(text: str) -> str:
    """The name that Kineto gives such a copy."""
    match = _COPY.fullmatch(text)
    return text if match is None else f"Memcpy {match[1][0]}to{match[2][0]} ({_ENDS[match[1]]} -> {_ENDS[match[2]]})"
