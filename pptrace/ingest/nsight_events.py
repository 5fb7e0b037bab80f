"""Tables of an Nsight Systems export → rows of events, whatever their schema's age.

    device table  = start, end, deviceId, streamId, correlationId, [globalPid], name or kind     CUPTI_ACTIVITY_KIND_*
    host table    = start, end, globalTid, [correlationId], nameId | textId | name               CUDA API, MPI, overhead, …
    NVTX_EVENTS   = start, [end], eventType, globalTid, text | textId                            push/pop and start/end ranges

    globalTid = … pid:24 tid:24        globalPid = … pid:24 0:24

Names are ids of ``StringIds``, or texts. Times are ns since the session began. Names are given as Kineto writes them where it
has the same event, so that nothing after this needs to know which profiler it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.ingest.nsight_sqlite import NONE, Database
from pptrace.tables import Category, Int8, Int32, Int64

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
"""Calls of communication libraries; older exports have them as NVTX ranges, so they are annotations too."""

_RANGE_TYPES = {"NvtxPushPopRange": 59, "NvtxStartEndRange": 60, "NvtxtPushPopRange": 70, "NvtxtStartEndRange": 71}
_COPIES = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP", "HtoD", "DtoH", "DtoD")
_MEMORIES = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
_SYNCS = ("Sync", "Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync")

_EMITTED_SUFFIX = re.compile(rb", (?:seq = \d|op_id = \d|sizes = \[)")  # by torch's emit_nvtx
_TORCH_OP = re.compile(r"(?:aten|c10d|c10|_c10d_functional|prims?|quantized|sparse|mkldnn)::|autograd::engine::")
_API_VERSION = re.compile(r"_v\d+$")
_DENSE_IDS = 1 << 24
_NO_CORRELATION = 2**32 - 1
UNNAMED = "unnamed"
WHOLE_GRAPH = "CUDA graph"


@dataclass(slots=True)
class Block:
    """Rows of one table, one entry per row in every array; ``process`` is the pid, -1 where the table does not say."""

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


class Names(dict[str, int]):
    """Code by name, in order of first appearance. What torch's emit_nvtx adds to a name is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_ops: set[int] = set()

    def __missing__(self, name: str) -> int:
        code = len(self)
        self[name] = code
        return code


class _TextCodes(dict[bytes | None, int]):
    """Code of a range by its text, -1 for none. A text with a number that only it has is not kept."""

    def __init__(self, names: Names) -> None:
        super().__init__({None: -1})
        self._names = names
        self._plain: dict[bytes, int] = {}

    def __missing__(self, text: bytes | None) -> int:
        assert text is not None
        match = _EMITTED_SUFFIX.search(text) if b", " in text else None
        if match is None:
            code = self[text] = self._names[text.decode("utf-8", "replace")]
            return code
        plain = text[: match.start()]
        known = self._plain.get(plain)
        if known is None:
            name = plain.decode("utf-8", "replace")
            known = self._plain[plain] = self._names[name]
            if _TORCH_OP.match(name):
                self._names.torch_ops.add(known)
        return known


def read_blocks(db: Database, names: Names) -> tuple[list[Block], list[str]]:
    """All events of an export, a block per table, and a line for whatever is missing or left out."""
    warnings: list[str] = []
    blocks = [block for read in _readers(db) if (block := read(db, names, warnings)) is not None and len(block)]
    return blocks, warnings


_Reader = Callable[[Database, Names, list[str]], Block | None]
_Codes = Callable[[Sequence[Int64], int], Int32]


def _readers(db: Database) -> Iterator[_Reader]:
    """A reader for each table that holds events."""
    for table in db.tables:
        if table in KERNELS:
            yield _device_reader(table, Category.KERNEL, _kernel_codes)
        elif table == GRAPHS:
            yield _device_reader(table, Category.KERNEL, _graph_codes)
        elif table == "CUPTI_ACTIVITY_KIND_MEMCPY":
            yield _device_reader(table, Category.MEMCPY, _memcpy_codes)
        elif table == "CUPTI_ACTIVITY_KIND_MEMSET":
            yield _device_reader(table, Category.MEMSET, _memset_codes)
        elif table == "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION":
            yield _device_reader(table, Category.DEVICE_SYNC, _sync_codes)
        elif table in _HOST_TABLES:
            yield _host_reader(table, _HOST_TABLES[table])
        elif _LIBRARY_TABLE.fullmatch(table):
            yield _host_reader(table, Category.ANNOTATION)
        elif table == NVTX:
            yield _nvtx_block


_Namer = Callable[[Database, str, Names], tuple[Sequence[str], _Codes]]
"""(database, table, names) → the columns that the names are made of, and how."""


def _device_reader(table: str, category: Category, namer: _Namer) -> _Reader:
    def read(db: Database, names: Names, warnings: list[str]) -> Block | None:
        columns = _present(
            db, table, ["start"], ["end"], ["globalPid", "globalTid"], ["deviceId"], ["streamId"], ["correlationId"]
        )
        if not _has_times(db, table, warnings):
            return None
        needed, codes = namer(db, table, names)
        start, end, owner, device, stream, correlation, *parts = db.integers(table, [*columns, *needed])
        block = Block(
            np.full(len(start), category, dtype=np.int8),
            _process(owner),
            codes(parts, len(start)),
            start,
            end - start,
            _small(device),
            _small(stream),
            np.full(len(start), -1, dtype=np.int32),
            _correlation(correlation),
        )
        return _whole(block, table, (start != NONE) & (end != NONE), warnings)

    return read


def _host_reader(table: str, category: Category) -> _Reader:
    def read(db: Database, names: Names, warnings: list[str]) -> Block | None:
        if not _has_times(db, table, warnings):
            return None
        columns = _present(
            db, table, ["start"], ["end"], ["globalTid", "globalPid"], ["correlationId"], ["nameId", "textId"]
        )
        start, end, owner, correlation, ids = db.integers(table, columns)
        block = _host_block(category, start, end, owner, _string_codes(db, ids, names, _without_version))
        block.correlation = _correlation(correlation) if category is Category.RUNTIME else block.correlation
        return _whole(block, table, (start != NONE) & (end != NONE), warnings)

    return read


def _host_block(category: Category, start: Int64, end: Int64, owner: Int64, name_id: Int32) -> Block:
    nowhere = np.full(len(start), -1, dtype=np.int32)
    return Block(
        np.full(len(start), category, dtype=np.int8),
        _process(owner),
        name_id,
        start,
        end - start,
        nowhere,
        nowhere,
        np.where(owner == NONE, -1, owner & _TID).astype(np.int32),
        np.full(len(start), -1, dtype=np.int64),
    )


def _nvtx_block(db: Database, names: Names, warnings: list[str]) -> Block | None:
    """Ranges of every domain; instants, names of threads and the like are none. A range still open has no end."""
    if not _has_times(db, NVTX, warnings):
        return None
    owner, kind, text_id = _present(db, NVTX, ["globalTid", "globalPid"], ["eventType"], ["textId"])
    text = "text" if db.has(NVTX, "text") else None
    columns, texts = db.integers_and_texts(NVTX, ["start", "end", kind, owner, text_id], text)
    start, end, kinds, owners, ids = columns
    is_range = np.isin(kinds, _range_types(db)) if kind is not None else np.ones(len(start), dtype=np.bool_)
    is_range &= start != NONE
    if num_open := int(np.count_nonzero(is_range & (end == NONE))):
        left = "range that was" if num_open == 1 else "ranges that were"
        warnings.append(f"left out {num_open} NVTX {left} still open when recording stopped")
    is_range &= end != NONE
    codes = _TextCodes(names)
    if not is_range.all():
        start, end, owners, ids = (column[is_range] for column in (start, end, owners, ids))
        texts = compress(texts, is_range.tolist())
    name_id = np.fromiter(map(codes.__getitem__, texts), np.int32, len(start))
    registered = np.flatnonzero(name_id < 0)
    name_id[registered] = _string_codes(db, ids[registered], names)
    block = _host_block(Category.ANNOTATION, start, end, owners, name_id)
    if names.torch_ops:
        block.category[np.isin(name_id, list(names.torch_ops))] = Category.CPU_OP
    return block


def _range_types(db: Database) -> list[int]:
    """The event types that are ranges, as the export numbers them, else as every known version does."""
    named = dict(db.all_rows("ENUM_NSYS_EVENT_TYPE", ("name", "id")))
    return [number for name, usual in _RANGE_TYPES.items() if type(number := named.get(name, usual)) is int]


def _present(db: Database, table: str, *choices: Sequence[str]) -> list[str | None]:
    """Of each list of names the first that is a column of the table."""
    return [next((name for name in names if db.has(table, name)), None) for names in choices]


def _has_times(db: Database, table: str, warnings: list[str]) -> bool:
    if not db.has(table, "start", "end"):
        warnings.append(f"left out table {table}: it has no columns start and end")
        return False
    return True


def _whole(block: Block, table: str, whole: npt.NDArray[np.bool_], warnings: list[str]) -> Block:
    """The rows that have a start and an end."""
    if whole.all():
        return block
    warnings.append(f"left out {np.count_nonzero(~whole)} rows of table {table} without a start or an end")
    return chosen_rows(block, np.flatnonzero(whole))


def chosen_rows(block: Block, rows: npt.NDArray[np.intp]) -> Block:
    return Block(*(getattr(block, field.name)[rows] for field in fields(Block)))


_TID = (1 << 24) - 1


def _process(owner: Int64) -> Int32:
    return np.where(owner == NONE, -1, owner >> 24 & _TID).astype(np.int32)


def _small(values: Int64) -> Int32:
    """Devices and streams: -1 where there is none, as for what synchronises a whole context."""
    return np.where((values < 0) | (values > np.iinfo(np.int32).max), -1, values).astype(np.int32)


def _correlation(values: Int64) -> Int64:
    return np.where((values <= 0) | (values == _NO_CORRELATION), -1, values)


def _kernel_codes(db: Database, table: str, names: Names) -> tuple[Sequence[str], _Codes]:
    """The demangled name, as Kineto has it; the short or the mangled one where there is no other."""
    columns = [name for name in ("demangledName", "shortName", "mangledName", "nameId") if db.has(table, name)][:1]
    if not columns:
        return (), lambda _, length: _constant(names, UNNAMED, length)
    return columns, lambda parts, _: _string_codes(db, parts[0], names)


def _graph_codes(_db: Database, _table: str, names: Names) -> tuple[Sequence[str], _Codes]:
    return (), lambda _, length: _constant(names, WHOLE_GRAPH, length)


def _constant(names: Names, name: str, length: int) -> Int32:
    return np.full(length, names[name] if length else 0, dtype=np.int32)


def _string_codes(db: Database, ids: Int64, names: Names, change: Callable[[str], str] = str) -> Int32:
    """Codes of the names that ids of ``StringIds`` stand for."""
    used, places = _distinct(ids)
    texts = db.strings([number for number in used.tolist() if number != NONE])
    codes = [names[change(texts.get(number) or UNNAMED)] for number in used.tolist()]
    return np.array(codes, dtype=np.int32)[places] if codes else np.zeros(len(ids), dtype=np.int32)


def _distinct(values: Int64) -> tuple[Int64, npt.NDArray[Any]]:
    """The different values, sorted, and of each row which it is."""
    if not len(values):
        return values, values
    if values.min() < 0 or values.max() >= _DENSE_IDS:
        used, places = np.unique(values, return_inverse=True)
        return used, places
    used = np.flatnonzero(np.bincount(values))
    place = np.zeros(int(used[-1]) + 1, dtype=np.int32)
    place[used] = np.arange(len(used))
    return used, place[values]


def _without_version(name: str) -> str:
    """``cudaLaunchKernel_v7000`` is the call that Kineto names ``cudaLaunchKernel``."""
    return _API_VERSION.sub("", name)


def _memcpy_codes(db: Database, table: str, names: Names) -> tuple[Sequence[str], _Codes]:
    """Such as ``Memcpy HtoD (Pageable -> Device)``."""
    columns = [name for name in ("copyKind", "srcKind", "dstKind") if db.has(table, name)]

    def name(kinds: dict[str, int]) -> str:
        copy = _of(_COPIES, kinds.get("copyKind"))
        source, target = _of(_MEMORIES, kinds.get("srcKind")), _of(_MEMORIES, kinds.get("dstKind"))
        return " ".join(filter(None, ("Memcpy", copy, f"({source} -> {target})" if source and target else "")))

    return columns, _by_kinds(columns, names, name)


def _memset_codes(db: Database, table: str, names: Names) -> tuple[Sequence[str], _Codes]:
    columns = [name for name in ("memKind",) if db.has(table, name)]

    def name(kinds: dict[str, int]) -> str:
        memory = _of(_MEMORIES, kinds.get("memKind"))
        return f"Memset ({memory})" if memory else "Memset"

    return columns, _by_kinds(columns, names, name)


def _sync_codes(db: Database, table: str, names: Names) -> tuple[Sequence[str], _Codes]:
    columns = [name for name in ("syncType",) if db.has(table, name)]
    return columns, _by_kinds(columns, names, lambda kinds: _of(_SYNCS, kinds.get("syncType")) or _SYNCS[0])


def _of(texts: Sequence[str], number: int | None) -> str:
    return texts[number] if number is not None and 0 <= number < len(texts) else ""


def _by_kinds(columns: Sequence[str], names: Names, name: Callable[[dict[str, int]], str]) -> _Codes:
    """Codes of names that are made of a few small numbers, looked at once for each combination."""

    def codes(parts: Sequence[Int64], length: int) -> Int32:
        if not parts or not length:
            return _constant(names, name({}), length)
        used, places = np.unique(np.stack(parts, axis=1), axis=0, return_inverse=True)
        found = [names[name(dict(zip(columns, row, strict=True)))] for row in used.tolist()]
        return np.array(found, dtype=np.int32)[places.reshape(-1)]

    return codes
