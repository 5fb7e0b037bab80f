"""What is found in each rank of a file ⇄ the cache: see :mod:`pptrace.ingest.job.disk_cache`.

Of the facts that a trace gives about itself only those are taken, cached or not, that the analysis asks for: an export may
also hold environment variables, command lines and home directories.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.ingest.common.byte_source import num_text_bytes
from pptrace.ingest.inputs.resolve import InputFile
from pptrace.ingest.job.disk_cache import MIN_TEXT_BYTES, Packed, cache_beside
from pptrace.model.tables import CALLS, COMMS, HOST_NAME, HOST_ORDER, MEMORY, OPS, InputFormat, Trace
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.recognised_rank import RecognisedRank

_FACTS = frozenset(
    {
        *("schema", "rank", "local_rank", "world_size", "host", "mesh", "pp_ranks", "plan", "model", "steps"),
        *("backend", "device", "clock", "one_clock", "notes", "framework", "hooks", "groups", "parallel"),
        *("communicators", HOST_NAME),
    }
)
_DISTRIBUTED = frozenset({"backend", "rank", "world_size", "pg_count", "pg_config"})
_SCHEMAS = {"ops": OPS, "comms": COMMS, "memory": MEMORY, "calls": CALLS, "host": HOST_ORDER}
_PATH = "\0path\0"  # in place of the file's path, which says where somebody's home is


def find_in_rank(trace: Trace) -> RecognisedRank:
    """:func:`recognise_rank` with no more of the trace's own words than are asked for."""
    found = recognise_rank(trace)
    info = found.info
    lean = replace(info, metadata=_only(info.metadata, _FACTS), distributed=_only(info.distributed, _DISTRIBUTED))
    return found.with_info(lean)


def _only(words: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in words.items() if name in names}


@dataclass(frozen=True, slots=True)
class RankStore:
    """Keeps what was found in files of at least ``min_text_bytes``, uncompressed. It can be sent to other processes."""

    min_text_bytes: int = MIN_TEXT_BYTES

    def known(self, file: InputFile) -> tuple[RecognisedRank, ...] | None:
        """What is kept of a file that has not changed since it was last seen."""
        return self._read(file, hash_now=False)

    def get(self, file: InputFile) -> tuple[RecognisedRank, ...] | None:
        """What is kept of a file of this content, wherever it lay."""
        return self._read(file, hash_now=True)

    def put(self, file: InputFile, found: Sequence[RecognisedRank]) -> None:
        if (
            num_text_bytes(file.path) < self.min_text_bytes or file.format is InputFormat.OPLOG
        ):  # told by other files as well
            return
        cache = cache_beside(file.path)
        key = cache.key(file.path, hash_now=True)
        if key is None:
            return
        try:
            packed = pack(found, str(file.path))
        except TypeError:  # of a kind that this cannot keep
            return
        cache.write(key, packed)

    def _read(self, file: InputFile, hash_now: bool) -> tuple[RecognisedRank, ...] | None:
        if (
            num_text_bytes(file.path) < self.min_text_bytes or file.format is InputFormat.OPLOG
        ):  # told by other files as well
            return None
        cache = cache_beside(file.path)
        key = cache.key(file.path, hash_now)
        packed = cache.read(key) if key is not None else None
        if packed is None:
            return None
        try:
            return unpack(packed, str(file.path))
        except (KeyError, ValueError, TypeError, IndexError, AttributeError):  # damaged, or of another making
            return None


def pack(found: Sequence[RecognisedRank], path: str) -> Packed:
    """What was found in the ranks of the file at ``path``.

    Raises:
        TypeError: a value is of a kind that cannot be kept.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    facts = [_packed(RecognisedRank, rank, f"{place}", arrays, path) for place, rank in enumerate(found)]
    return Packed(facts, arrays)


def unpack(packed: Packed, path: str) -> tuple[RecognisedRank, ...]:
    """The same again, of the file that is now at ``path``.

    Raises:
        KeyError, ValueError, TypeError, IndexError, AttributeError: the entry is damaged.
    """
    return tuple(
        _unpacked(RecognisedRank, fact, f"{place}", packed.arrays, path) for place, fact in enumerate(packed.facts)
    )


def _packed(hint: Any, value: Any, name: str, arrays: dict[str, npt.NDArray[Any]], path: str) -> Any:
    """The JSON of a value of the annotated type; its arrays go into ``arrays`` under names that begin with ``name``."""
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return {
            item.name: _packed(hints[item.name], getattr(value, item.name), f"{name}.{item.name}", arrays, path)
            for item in fields(hint)
        }
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise TypeError(f"{name}: an array of {value.dtype}")
        arrays[name] = value
        return None
    if isinstance(value, pd.DataFrame):
        return [[str(column), _packed_column(value[column], f"{name}.{column}", arrays, path)] for column in value]
    if isinstance(value, str):
        return str(value).replace(path, _PATH)
    if isinstance(value, Mapping):
        return {str(key): _packed(None, item, name, arrays, path) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_packed(None, item, name, arrays, path) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(f"{name}: a {type(value).__name__}")


def _packed_column(column: pd.Series[Any], name: str, arrays: dict[str, npt.NDArray[Any]], path: str) -> Any:
    """Numbers as they are; texts as codes, and the different texts in the JSON."""
    if column.dtype != object:
        return _packed(None, column.to_numpy(), name, arrays, path)
    texts: dict[str, int] = {}
    codes = [texts.setdefault(text, len(texts)) for text in column]
    if not all(type(text) is str for text in texts):
        raise TypeError(f"{name}: a column of other things than texts")
    arrays[name] = np.array(codes, dtype=np.int32)
    return [text.replace(path, _PATH) for text in texts]


def _unpacked(hint: Any, node: Any, name: str, arrays: Mapping[str, npt.NDArray[Any]], path: str) -> Any:
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        values = {
            item.name: _unpacked(hints[item.name], node[item.name], f"{name}.{item.name}", arrays, path)
            for item in fields(hint)
        }
        if len({len(value) for value in values.values() if isinstance(value, np.ndarray)}) > 1:
            raise ValueError(f"{name}: arrays of different lengths")
        return hint(**values)  # type: ignore[operator]
    if isinstance(hint, types.UnionType):
        if node is None and types.NoneType in hint.__args__ and name not in arrays:
            return None
        hint = next(kind for kind in hint.__args__ if kind is not types.NoneType)
        return _unpacked(hint, node, name, arrays, path)
    origin = typing.get_origin(hint) or hint
    if origin is np.ndarray:
        return _one_dimension(arrays[name])
    if origin is pd.DataFrame:
        return _unpacked_table(node, name, arrays, path)
    if origin is tuple:
        return tuple(_plain(item, path) for item in node)
    if isinstance(origin, type) and issubclass(origin, StrEnum):
        return origin(node)
    return _plain(node, path)


def _unpacked_table(
    node: Sequence[tuple[str, Any]], name: str, arrays: Mapping[str, npt.NDArray[Any]], path: str
) -> pd.DataFrame:
    columns: dict[str, Any] = {}
    for column, texts in node:
        values: Any = _one_dimension(arrays[f"{name}.{column}"])
        if texts is not None:
            different = np.array([_plain(text, path) for text in texts] or [""], dtype=object)
            values = pd.Series(different[values], dtype=object)
        columns[column] = values
    table = pd.DataFrame(columns)
    schema = _SCHEMAS.get(name.rpartition(".")[2])
    if schema is not None and list(table.columns) != list(schema):
        raise ValueError(f"{name}: a table of other columns")
    return table


def _one_dimension(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if values.ndim != 1:
        raise ValueError(f"an array of {values.ndim} dimensions")
    return values


def _plain(node: Any, path: str) -> Any:
    if isinstance(node, str):
        return node.replace(_PATH, path)
    if isinstance(node, list):
        return [_plain(item, path) for item in node]
    if isinstance(node, dict):
        return {key: _plain(item, path) for key, item in node.items()}
    return node
