"""Read the tables of an Nsight Systems export, of any schema version, as rows of events.

    device table  = start, end, deviceId, streamId, correlationId, [globalPid], name or kind     CUPTI_ACTIVITY_KIND_*
    host table    = start, end, globalTid, [correlationId], nameId | textId | name               CUDA API, MPI, overhead, …
    NVTX_EVENTS   = start, [end], eventType, globalTid, text | textId                            push/pop and start/end ranges

    globalTid = … pid:24 tid:24        globalPid = … pid:24 0:24

Names are ids of ``StringIds``, or texts. Times are ns since the start of the session. Events that Kineto has too are named as
Kineto names them, so that later stages are independent of the profiler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import compress

import numpy as np
import numpy.typing as npt

from pptrace.ingest.nsight.event_names import (
    Namer,
    Names,
    TextCodes,
    graph_codes,
    kernel_codes,
    memcpy_codes,
    memset_codes,
    string_codes,
    sync_codes,
    without_version,
)
from pptrace.ingest.nsight.sqlite import NONE, Database
from pptrace.model.tables import Int8, Int32, Int64
from pptrace.model.traces import Category

KERNELS = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL")
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
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


@dataclass(slots=True)
class Block:
    """Rows of one table, one entry per row in every array; ``process`` is the pid, -1 if unknown."""

    category: Int8
    process: Int32
    name_id: Int32
    start_ns: Int64
    dur_ns: Int64
    device: Int32
    stream: Int32
    thread: Int32
    correlation: Int64

    def __len__(self) -> int:
        return len(self.start_ns)


def read_blocks(db: Database, names: Names) -> tuple[list[Block], list[str]]:
    """Read all events of an export: (a block per table, warnings of what is missing or left out)."""
    warnings: list[str] = []
    blocks = [block for read in _readers(db) if (block := read(db, names, warnings)) is not None and len(block)]
    return blocks, warnings


_Reader = Callable[[Database, Names, list[str]], Block | None]


def _readers(db: Database) -> Iterator[_Reader]:
    """Yield a reader for each table with events."""
    for table in db.tables:
        if table in KERNELS:
            yield _device_reader(table, Category.KERNEL, kernel_codes)
        elif table == GRAPHS:
            yield _device_reader(table, Category.KERNEL, graph_codes)
        elif table == "CUPTI_ACTIVITY_KIND_MEMCPY":
            yield _device_reader(table, Category.MEMCPY, memcpy_codes)
        elif table == "CUPTI_ACTIVITY_KIND_MEMSET":
            yield _device_reader(table, Category.MEMSET, memset_codes)
        elif table == "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION":
            yield _device_reader(table, Category.DEVICE_SYNC, sync_codes)
        elif table in _HOST_TABLES:
            yield _host_reader(table, _HOST_TABLES[table])
        elif _LIBRARY_TABLE.fullmatch(table):
            yield _host_reader(table, Category.ANNOTATION)
        elif table == NVTX:
            yield _nvtx_block


def _device_reader(table: str, category: Category, namer: Namer) -> _Reader:
    def read(db: Database, names: Names, warnings: list[str]) -> Block | None:
        columns = _present(
            db, table, ["start"], ["end"], ["globalPid", "globalTid"], ["deviceId"], ["streamId"], ["correlationId"]
        )
        if not _has_times(db, table, warnings):
            return None
        needed, codes = namer(db, table, names)
        start, end, global_id, device, stream, correlation, *parts = db.integers(table, [*columns, *needed])
        block = Block(
            np.full(len(start), category, dtype=np.int8),
            _pid_of(global_id),
            codes(parts, len(start)),
            start,
            end - start,
            _int32_id(device),
            _int32_id(stream),
            np.full(len(start), -1, dtype=np.int32),
            _correlation(correlation),
        )
        return _complete_rows(block, table, (start != NONE) & (end != NONE), warnings)

    return read


def _host_reader(table: str, category: Category) -> _Reader:
    def read(db: Database, names: Names, warnings: list[str]) -> Block | None:
        if not _has_times(db, table, warnings):
            return None
        columns = _present(
            db, table, ["start"], ["end"], ["globalTid", "globalPid"], ["correlationId"], ["nameId", "textId"]
        )
        start, end, global_id, correlation, ids = db.integers(table, columns)
        block = _host_block(category, start, end, global_id, string_codes(db, ids, names, without_version))
        block.correlation = _correlation(correlation) if category is Category.RUNTIME else block.correlation
        return _complete_rows(block, table, (start != NONE) & (end != NONE), warnings)

    return read


def _host_block(category: Category, start: Int64, end: Int64, global_id: Int64, name_id: Int32) -> Block:
    none = np.full(len(start), -1, dtype=np.int32)
    return Block(
        np.full(len(start), category, dtype=np.int8),
        _pid_of(global_id),
        name_id,
        start,
        end - start,
        none,
        none,
        np.where(global_id == NONE, -1, global_id & _TID).astype(np.int32),
        np.full(len(start), -1, dtype=np.int64),
    )


def _nvtx_block(db: Database, names: Names, warnings: list[str]) -> Block | None:
    """Read the ranges of all domains; other NVTX events are skipped, and so are ranges without an end."""
    if not _has_times(db, NVTX, warnings):
        return None
    global_id, kind, text_id = _present(db, NVTX, ["globalTid", "globalPid"], ["eventType"], ["textId"])
    text = "text" if db.has(NVTX, "text") else None
    columns, texts = db.integers_and_texts(NVTX, ["start", "end", kind, global_id, text_id], text)
    start, end, kinds, global_ids, ids = columns
    is_range = np.isin(kinds, _range_types(db)) if kind is not None else np.ones(len(start), dtype=np.bool_)
    is_range &= start != NONE
    if num_open := int(np.count_nonzero(is_range & (end == NONE))):
        noun = "range that was" if num_open == 1 else "ranges that were"
        warnings.append(f"left out {num_open} NVTX {noun} still open when recording stopped")
    is_range &= end != NONE
    codes = TextCodes(names)
    if not is_range.all():
        start, end, global_ids, ids = (column[is_range] for column in (start, end, global_ids, ids))
        texts = compress(texts, is_range.tolist())
    name_id = np.fromiter(map(codes.__getitem__, texts), np.int32, len(start))
    registered = np.flatnonzero(name_id < 0)
    name_id[registered] = string_codes(db, ids[registered], names)
    block = _host_block(Category.ANNOTATION, start, end, global_ids, name_id)
    if names.torch_ops:
        block.category[np.isin(name_id, list(names.torch_ops))] = Category.CPU_OP
    return block


def _range_types(db: Database) -> list[int]:
    """The event types of ranges: as the export numbers them, else as all known versions do."""
    id_by_name = dict(db.all_rows("ENUM_NSYS_EVENT_TYPE", ("name", "id")))
    return [number for name, default in _RANGE_TYPES.items() if type(number := id_by_name.get(name, default)) is int]


def _present(db: Database, table: str, *choices: Sequence[str]) -> list[str | None]:
    """The first name of each list that is a column of the table, None if none is."""
    return [next((name for name in names if db.has(table, name)), None) for names in choices]


def _has_times(db: Database, table: str, warnings: list[str]) -> bool:
    if not db.has(table, "start", "end"):
        warnings.append(f"left out table {table}: it has no columns start and end")
        return False
    return True


def _complete_rows(block: Block, table: str, is_complete: npt.NDArray[np.bool_], warnings: list[str]) -> Block:
    """Drop the rows without a start or an end, with a warning."""
    if is_complete.all():
        return block
    warnings.append(f"left out {np.count_nonzero(~is_complete)} rows of table {table} without a start or an end")
    return select_rows(block, np.flatnonzero(is_complete))


def select_rows(block: Block, rows: npt.NDArray[np.intp]) -> Block:
    return Block(*(getattr(block, field.name)[rows] for field in fields(Block)))


_TID = (1 << 24) - 1
_NO_CORRELATION = 2**32 - 1


def _pid_of(global_id: Int64) -> Int32:
    return np.where(global_id == NONE, -1, global_id >> 24 & _TID).astype(np.int32)


def _int32_id(values: Int64) -> Int32:
    """Convert ids of devices and streams; -1 where there is none, as for the synchronisation of a context."""
    return np.where((values < 0) | (values > np.iinfo(np.int32).max), -1, values).astype(np.int32)


def _correlation(values: Int64) -> Int64:
    return np.where((values <= 0) | (values == _NO_CORRELATION), -1, values)
