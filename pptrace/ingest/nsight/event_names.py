"""Name the events of an Nsight Systems export as Kineto names the same events."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.ingest.nsight.sqlite import NONE, Database
from pptrace.model.tables import Int32, Int64

_COPIES = ("", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP", "HtoD", "DtoH", "DtoD")
_MEMORIES = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")
_SYNCS = ("Sync", "Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync")
_EMITTED_SUFFIX = re.compile(rb", (?:seq = \d|op_id = \d|sizes = \[)")  # by torch's emit_nvtx
_TORCH_OP = re.compile(r"(?:aten|c10d|c10|_c10d_functional|prims?|quantized|sparse|mkldnn)::|autograd::engine::")
_API_VERSION = re.compile(r"_v\d+$")
_DENSE_IDS = 1 << 24
UNNAMED = "unnamed"
GRAPH_NAME = "CUDA graph"


class Names(dict[str, int]):
    """Code by name, in order of first appearance, without the suffixes that torch's emit_nvtx adds."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_ops: set[int] = set()

    def __missing__(self, name: str) -> int:
        code = len(self)
        self[name] = code
        return code


class TextCodes(dict[bytes | None, int]):
    """Code of a range by its text, -1 for none. Texts with numbers that never repeat are not cached."""

    def __init__(self, names: Names) -> None:
        super().__init__({None: -1})
        self._names = names
        self._code_by_text: dict[bytes, int] = {}

    def __missing__(self, text: bytes | None) -> int:
        assert text is not None
        match = _EMITTED_SUFFIX.search(text) if b", " in text else None
        if match is None:
            code = self[text] = self._names[text.decode("utf-8", "replace")]
            return code
        without_suffix = text[: match.start()]
        known_code = self._code_by_text.get(without_suffix)
        if known_code is None:
            name = without_suffix.decode("utf-8", "replace")
            known_code = self._code_by_text[without_suffix] = self._names[name]
            if _TORCH_OP.match(name):
                self._names.torch_ops.add(known_code)
        return known_code


Codes = Callable[[Sequence[Int64], int], Int32]
"""(columns from which names are made, number of rows) → codes."""
Namer = Callable[[Database, str, Names], tuple[Sequence[str], Codes]]
"""(database, table, names) → (columns from which names are made, function that makes them)."""


def kernel_codes(db: Database, table: str, names: Names) -> tuple[Sequence[str], Codes]:
    """Name kernels by their demangled name, as Kineto does; by the short or mangled one where it is missing."""
    columns = [name for name in ("demangledName", "shortName", "mangledName", "nameId") if db.has(table, name)][:1]
    if not columns:
        return (), lambda _, length: _constant(names, UNNAMED, length)
    return columns, lambda parts, _: string_codes(db, parts[0], names)


def graph_codes(_db: Database, _table: str, names: Names) -> tuple[Sequence[str], Codes]:
    return (), lambda _, length: _constant(names, GRAPH_NAME, length)


def _constant(names: Names, name: str, length: int) -> Int32:
    return np.full(length, names[name] if length else 0, dtype=np.int32)


def string_codes(db: Database, ids: Int64, names: Names, change: Callable[[str], str] = str) -> Int32:
    """Codes of the names with these ids in ``StringIds``."""
    used, inverse = _distinct(ids)
    texts = db.strings([number for number in used.tolist() if number != NONE])
    codes = [names[change(texts.get(number) or UNNAMED)] for number in used.tolist()]
    return np.array(codes, dtype=np.int32)[inverse] if codes else np.zeros(len(ids), dtype=np.int32)


def _distinct(values: Int64) -> tuple[Int64, npt.NDArray[Any]]:
    """(distinct values, sorted; index of each row's value in them)."""
    if not len(values):
        return values, values
    if values.min() < 0 or values.max() >= _DENSE_IDS:
        used, inverse = np.unique(values, return_inverse=True)
        return used, inverse
    used = np.flatnonzero(np.bincount(values))
    index = np.zeros(int(used[-1]) + 1, dtype=np.int32)
    index[used] = np.arange(len(used))
    return used, index[values]


def without_version(name: str) -> str:
    """Strip the version: Kineto names ``cudaLaunchKernel_v7000`` ``cudaLaunchKernel``."""
    return _API_VERSION.sub("", name)


def memcpy_codes(db: Database, table: str, names: Names) -> tuple[Sequence[str], Codes]:
    """Name copies, such as ``Memcpy HtoD (Pageable -> Device)``."""
    columns = [name for name in ("copyKind", "srcKind", "dstKind") if db.has(table, name)]

    def name(kinds: dict[str, int]) -> str:
        copy = _lookup(_COPIES, kinds.get("copyKind"))
        source, target = _lookup(_MEMORIES, kinds.get("srcKind")), _lookup(_MEMORIES, kinds.get("dstKind"))
        return " ".join(filter(None, ("Memcpy", copy, f"({source} -> {target})" if source and target else "")))

    return columns, _by_kinds(columns, names, name)


def memset_codes(db: Database, table: str, names: Names) -> tuple[Sequence[str], Codes]:
    columns = [name for name in ("memKind",) if db.has(table, name)]

    def name(kinds: dict[str, int]) -> str:
        memory = _lookup(_MEMORIES, kinds.get("memKind"))
        return f"Memset ({memory})" if memory else "Memset"

    return columns, _by_kinds(columns, names, name)


def sync_codes(db: Database, table: str, names: Names) -> tuple[Sequence[str], Codes]:
    columns = [name for name in ("syncType",) if db.has(table, name)]
    return columns, _by_kinds(columns, names, lambda kinds: _lookup(_SYNCS, kinds.get("syncType")) or _SYNCS[0])


def _lookup(texts: Sequence[str], number: int | None) -> str:
    return texts[number] if number is not None and 0 <= number < len(texts) else ""


def _by_kinds(columns: Sequence[str], names: Names, name: Callable[[dict[str, int]], str]) -> Codes:
    """Make names from a few small numbers, once for each combination."""

    def codes(parts: Sequence[Int64], length: int) -> Int32:
        if not parts or not length:
            return _constant(names, name({}), length)
        used, inverse = np.unique(np.stack(parts, axis=1), axis=0, return_inverse=True)
        row_codes = [names[name(dict(zip(columns, row, strict=True)))] for row in used.tolist()]
        return np.array(row_codes, dtype=np.int32)[inverse.reshape(-1)]

    return codes
