"""Read the tables of an Nsight Systems export, of any schema version, as columns of events.

    device table  = start, end, deviceId, streamId, correlationId, [globalPid], name or kind     CUPTI_ACTIVITY_KIND_*
    host table    = start, end, globalTid, [correlationId], nameId | textId | name               CUDA API, MPI, overhead, …
    NVTX_EVENTS   = start, [end], eventType, globalTid, text | textId                            push/pop and start/end ranges
    CUDA_GPU_MEMORY_USAGE_EVENTS = start, globalPid, contextId, address, bytes, memKind, memoryOperationType

    globalTid = … pid:24 tid:24        globalPid = … pid:24 0:24

Names are ids of ``StringIds``, or texts. Times are ns since the start of the session. Events that Kineto has too are named as
Kineto names them, so that later stages are independent of the profiler. ``memKind`` 2 is memory of a device, 4 is managed; the
others are of the host. ``memoryOperationType`` is 0 for an allocation and 1 for a release. These are calls of the driver: what a
caching allocator reserves, not its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np
import pandas as pd

from pptrace.ingest.common.codes import Codes, RangeCodes
from pptrace.ingest.common.sort_events import EventColumns
from pptrace.ingest.common.sqlite import NONE, UNNAMED, Database
from pptrace.model.tables import MEMORY, Int32, Int64, make_table
from pptrace.model.traces import Category
from pptrace.model.wording import counted

KERNELS = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL")
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
GRAPH_NAME = "CUDA graph"
NVTX = "NVTX_EVENTS"
CUDA_CALLS = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")

_HOST_TABLES = {
    **dict.fromkeys(CUDA_CALLS, Category.RUNTIME),
    "CUDNN_EVENTS": Category.CPU_OP,
    "CUBLAS_EVENTS": Category.CPU_OP,
    "PROFILER_OVERHEAD": Category.OVERHEAD,
    "CUPTI_ACTIVITY_KIND_OVERHEAD": Category.OVERHEAD,
}
_LIBRARY_TABLE = re.compile(r"(?:MPI|NCCL|OSHMEM|OPENSHMEM|NVSHMEM|UCP|UCX)_\w*EVENTS", re.IGNORECASE)
"""Calls of communication libraries; they are annotations, since older exports have them as NVTX ranges."""

_RANGE_TYPES = {"NvtxPushPopRange": 59, "NvtxStartEndRange": 60, "NvtxtPushPopRange": 70, "NvtxtStartEndRange": 71}
_API_VERSION = re.compile(r"_v\d+$")  # Kineto names cudaLaunchKernel_v7000 cudaLaunchKernel
_COPIES = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP", "HtoD", "DtoH", "DtoD")
_MEMORIES = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
_SYNCS = ("Sync", "Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync")
_TID = (1 << 24) - 1
_NO_CORRELATION = 2**32 - 1


def read_tables(db: Database, names: Codes) -> tuple[list[EventColumns], list[str]]:
    """Read all events of an export: (columns per table, which is of one category but NVTX's; warnings of what is left out)."""
    warnings: list[str] = []
    found = []
    for table in db.tables:
        is_library = _LIBRARY_TABLE.fullmatch(table) is not None
        if not (is_library or table in _DEVICE_TABLES or table in _HOST_TABLES or table == NVTX):
            continue
        if not db.has(table, "start", "end"):
            warnings.append(f"left out table {table}: it has no columns start and end")
        elif table in _DEVICE_TABLES:
            found.append(_device_events(db, table, names, warnings))
        elif table == NVTX:
            found.append(_ranges(db, names, warnings))
        else:
            found.append(_host_calls(db, table, names, warnings))
    return [columns for columns in found if len(columns)], warnings


def _name_of_copy(kinds: dict[str, int]) -> str:
    """The name of a copy, such as ``Memcpy HtoD (Pageable -> Device)``."""
    copy = _lookup(_COPIES, kinds.get("copyKind"))
    source, target = _lookup(_MEMORIES, kinds.get("srcKind")), _lookup(_MEMORIES, kinds.get("dstKind"))
    return " ".join(filter(None, ("Memcpy", copy, f"({source} -> {target})" if source and target else "")))


def _lookup(texts: Sequence[str], number: int | None) -> str:
    return texts[number] if number is not None and 0 <= number < len(texts) else ""


_NameOf = Callable[[dict[str, int]], str]
_DEVICE_TABLES: dict[str, tuple[Category, tuple[str, ...], _NameOf]] = {
    **dict.fromkeys(KERNELS, (Category.KERNEL, (), lambda _: UNNAMED)),
    GRAPHS: (Category.KERNEL, (), lambda _: GRAPH_NAME),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (Category.MEMCPY, ("copyKind", "srcKind", "dstKind"), _name_of_copy),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        Category.MEMSET,
        ("memKind",),
        lambda kinds: f"Memset ({_lookup(_MEMORIES, kinds.get('memKind'))})".removesuffix(" ()"),
    ),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
        Category.DEVICE_SYNC,
        ("syncType",),
        lambda kinds: _lookup(_SYNCS, kinds.get("syncType")) or _SYNCS[0],
    ),
}
"""The category of a table's events, and the columns of small numbers from which their names are made."""


def _device_events(db: Database, table: str, names: Codes, warnings: list[str]) -> EventColumns:
    category, kinds, name_of = _DEVICE_TABLES[table]
    kinds = tuple(name for name in kinds if db.has(table, name))
    kernel_name = None
    if table in KERNELS:  # by the demangled name, as Kineto; by the short or mangled one where it is missing
        (kernel_name,) = _present(db, table, ["demangledName", "shortName", "mangledName", "nameId"])
    columns = _present(
        db, table, ["start"], ["end"], ["globalPid", "globalTid"], ["deviceId"], ["streamId"], ["correlationId"]
    )
    start, end, global_id, device, stream, correlation, kernel_ids, *parts = db.integers(
        table, [*columns, kernel_name, *kinds]
    )
    if kernel_name is not None:
        name = db.text_codes("StringIds", "value", kernel_ids, names)
    elif not len(start):
        name = np.zeros(0, dtype=np.int32)
    elif not parts:
        name = np.full(len(start), names[name_of({})], dtype=np.int32)
    else:  # once for each combination
        used, inverse = np.unique(np.stack(parts, axis=1), axis=0, return_inverse=True)
        codes = names.of(name_of(dict(zip(kinds, row, strict=True))) for row in used.tolist())
        name = codes[inverse.reshape(-1)]
    places = (_int32_id(device), _int32_id(stream), _positive(correlation), pid_of(global_id))
    return _complete_rows(EventColumns.of(category, name, start, end, *places), table, start, end, warnings)


def _host_calls(db: Database, table: str, names: Codes, warnings: list[str]) -> EventColumns:
    category = _HOST_TABLES.get(table, Category.ANNOTATION)
    columns = _present(
        db, table, ["start"], ["end"], ["globalTid", "globalPid"], ["correlationId"], ["nameId", "textId"]
    )
    start, end, global_id, correlation, ids = db.integers(table, columns)
    name = db.text_codes("StringIds", "value", ids, names, lambda text: _API_VERSION.sub("", text))
    launch = _positive(correlation) if category is Category.RUNTIME else -1
    events = EventColumns.of(category, name, start, end, -1, tid_of(global_id), launch, pid_of(global_id))
    return _complete_rows(events, table, start, end, warnings)


def _ranges(db: Database, names: Codes, warnings: list[str]) -> EventColumns:
    """Read the ranges of all domains; other NVTX events are skipped, and so are ranges without an end."""
    global_id, kind, text_id = _present(db, NVTX, ["globalTid", "globalPid"], ["eventType"], ["textId"])
    text = "text" if db.has(NVTX, "text") else None
    columns, texts = db.integers_and_texts(NVTX, ["start", "end", kind, global_id, text_id], text)
    start, end, kinds, global_ids, ids = columns
    is_range = start != NONE
    if kind is not None:  # as the export numbers them, else as all known versions do
        id_by_name = dict(db.all_rows("ENUM_NSYS_EVENT_TYPE", ("name", "id")))
        numbers = (id_by_name.get(name, default) for name, default in _RANGE_TYPES.items())
        is_range &= np.isin(kinds, [number for number in numbers if type(number) is int])
    if num_open := int(np.count_nonzero(is_range & (end == NONE))):
        noun = "range that was" if num_open == 1 else "ranges that were"
        warnings.append(f"left out {num_open} NVTX {noun} still open when recording stopped")
    is_range &= end != NONE
    codes = RangeCodes(names)
    if not is_range.all():
        start, end, global_ids, ids = (column[is_range] for column in (start, end, global_ids, ids))
        texts = compress(texts, is_range.tolist())
    name = np.fromiter(map(codes.__getitem__, texts), np.int32, len(start))
    registered = np.flatnonzero(name < 0)
    name[registered] = db.text_codes("StringIds", "value", ids[registered], names)
    of_thread = {"lane": tid_of(global_ids), "process": pid_of(global_ids)}
    events = EventColumns.of(Category.ANNOTATION, name, start, end, **of_thread)
    if codes.torch_ops:
        events.category[np.isin(name, list(codes.torch_ops))] = Category.CPU_OP
    return events


def _present(db: Database, table: str, *choices: Sequence[str]) -> list[str | None]:
    """The first name of each list that is a column of the table, None if none is."""
    return [next((name for name in names if db.has(table, name)), None) for names in choices]


def _complete_rows(events: EventColumns, table: str, start: Int64, end: Int64, warnings: list[str]) -> EventColumns:
    """Drop the rows without a start or an end, with a warning."""
    is_complete = (start != NONE) & (end != NONE)
    if is_complete.all():
        return events
    rows = counted(int(np.count_nonzero(~is_complete)), "row")
    warnings.append(f"left out {rows} of table {table} without a start or an end")
    return events.select(np.flatnonzero(is_complete))


def tid_of(global_id: Int64) -> Int32:
    return np.where(global_id == NONE, -1, global_id & _TID).astype(np.int32)


def pid_of(global_id: Int64) -> Int32:
    return np.where(global_id == NONE, -1, global_id >> 24 & _TID).astype(np.int32)


def _int32_id(values: Int64) -> Int32:
    """Convert ids of devices and streams; -1 where there is none, as for the synchronisation of a context."""
    return np.where((values < 0) | (values > np.iinfo(np.int32).max), -1, values).astype(np.int32)


def _positive(correlation: Int64) -> Int64:
    return np.where((correlation <= 0) | (correlation == _NO_CORRELATION), -1, correlation)


_MEMORY_TABLE = "CUDA_GPU_MEMORY_USAGE_EVENTS"
_MEMORY_COLUMNS = ("start", "globalPid", "contextId", "address", "bytes", "memKind", "memoryOperationType")
_DEVICE_MEMORY = (2, 4)
_ALLOCATION, _RELEASE = 0, 1


def read_memory(db: Database, base_ns: int) -> dict[int, pd.DataFrame]:
    """Memory that each process has taken from its devices since recording began, by pid, rank -1.

    A release of what was allocated before recording began counts nothing. ``reserved_bytes`` is -1: what is there is unknown.
    """
    if not db.has(_MEMORY_TABLE, *_MEMORY_COLUMNS):
        return {}
    start, process, context, address, num_bytes, kind, operation = db.integers(_MEMORY_TABLE, _MEMORY_COLUMNS)
    is_used = np.isin(kind, _DEVICE_MEMORY) & np.isin(operation, (_ALLOCATION, _RELEASE)) & (start >= 0)
    is_used &= (process != NONE) & (num_bytes != NONE) & (num_bytes >= 0)
    columns = [column[is_used] for column in (start, (process >> 24) & _TID, context, address)]
    time, pid, context, address = columns
    num_bytes, operation = num_bytes[is_used], operation[is_used]
    # A release counts what its address got last, and 0 where that was not recorded.
    change = np.where(operation == _ALLOCATION, num_bytes, 0)
    order = np.lexsort((operation == _ALLOCATION, time, address, context, pid))
    before, after = order[:-1], order[1:]
    is_pair = (operation[before] == _ALLOCATION) & (operation[after] == _RELEASE)
    for column in (pid, context, address):
        is_pair &= column[before] == column[after]
    change[after[is_pair]] = -num_bytes[before[is_pair]]
    memory = {}
    for number in np.unique(pid[change != 0]).tolist():
        rows = np.flatnonzero((pid == number) & (change != 0))
        rows = rows[np.lexsort((change[rows], time[rows]))]
        unknown = np.full(len(rows), -1, dtype=np.int64)
        level = np.cumsum(change[rows])
        memory[number] = make_table(
            MEMORY, {"rank": unknown, "t_ns": time[rows] + base_ns, "allocated_bytes": level, "reserved_bytes": unknown}
        )
    return memory
