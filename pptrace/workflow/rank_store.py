"""Serialise recognised ranks for the disk cache: see :mod:`pptrace.ingest.job.disk_cache`.

Only those facts of a trace that the analysis uses are passed on, cached or not: an export may also hold environment
variables, command lines and home directories.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.links.peaks import PORTS
from pptrace.analysis.shared_devices import DEVICE_ID
from pptrace.environment import read_environment
from pptrace.fields import field_names
from pptrace.ingest.common.byte_source import num_text_bytes
from pptrace.ingest.inputs.resolve import InputFile
from pptrace.ingest.job.disk_cache import MIN_TEXT_BYTES, Cache, Packed, cache_for, key_of
from pptrace.model.predicted import PREDICTED
from pptrace.model.tables import CALLS, COMMS, HOST_ORDER, MEMORY, OPS
from pptrace.model.traces import HOST_NAME, InputFormat, Trace
from pptrace.recognise.damage.of_trace import damage_of, without_damaged_events
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.recording.rank import SETTINGS, STEP_TIMES, recording_of
from pptrace.recognise.recording.replay import Corrections
from pptrace.slices import Slice

_FACTS = frozenset(
    {
        *("schema", "rank", "local_rank", "world_size", "host", "mesh", "pp_ranks", "plan", "model", "steps"),
        *("backend", "device", "clock", "one_clock", "notes", "framework", "hooks", "groups", "parallel"),
        *("communicators", "memory", "versions", "environment", "core_wait", "experts", PORTS, HOST_NAME),
        *(DEVICE_ID, SETTINGS, STEP_TIMES, PREDICTED),
    }
)
_DISTRIBUTED = frozenset({"backend", "rank", "world_size", "pg_count", "pg_config"})
_SCHEMAS = {"ops": OPS, "comms": COMMS, "memory": MEMORY, "calls": CALLS, "host": HOST_ORDER}
_PATH = "\0path\0"  # replaces the file's path, which may name a home directory
_DAMAGE = (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError)


def recognise_trace(trace: Trace) -> RecognisedRank:
    """:func:`recognise_rank` with what its recording did to it, without the facts that the analysis does not use."""
    trace = without_damaged_events(trace)
    rank = _public_rank(trace)
    recording = recording_of(trace, (rank.ops, rank.comms, rank.calls))
    return replace(rank, recording=replace(recording, damage=damage_of(trace, rank.work)))


def recognise_corrected(corrections: Corrections, trace: Trace) -> RecognisedRank:
    """:func:`recognise_rank` of the trace as it would have been without its recording."""
    return _public_rank(corrections.corrected(without_damaged_events(trace)))


def _public_rank(trace: Trace) -> RecognisedRank:
    rank = recognise_rank(trace)
    info = rank.info
    public_info = replace(
        info, metadata=_only(info.metadata, _FACTS), distributed=_only(info.distributed, _DISTRIBUTED)
    )
    return rank.with_info(public_info)


def _only(facts: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    kept = {name: value for name, value in facts.items() if name in names}
    if isinstance(kept.get("environment"), Mapping):  # of another writer: anything may be in it
        kept["environment"] = read_environment(kept["environment"])
    return kept


class RankStore(Struct, frozen=True):
    """Disk cache of recognised ranks, for files of at least ``min_text_bytes`` of text. Picklable.

    ``corrections`` is the digest of those with which the files are recognised, "" without.
    """

    min_text_bytes: int = MIN_TEXT_BYTES
    corrections: str = ""

    def peek(self, file: InputFile) -> tuple[RecognisedRank, ...] | None:
        """The cached ranks of a file whose size and times have not changed since it was hashed; reads no content."""
        return self._read(file, hash_now=False)

    def get(self, file: InputFile) -> tuple[RecognisedRank, ...] | None:
        """The cached ranks of a file with this content, at whatever path; hashes it if necessary."""
        return self._read(file, hash_now=True)

    def put(self, file: InputFile, ranks: Sequence[RecognisedRank]) -> None:
        if not self._is_cached(file):
            return
        cache = cache_for(file.path)
        key = self._key(cache, file, hash_now=True)
        if key is None:
            return
        try:
            packed = pack(ranks, str(file.path))
        except TypeError:  # a value that cannot be cached
            return
        cache.write(key, packed)

    def _key(self, cache: Cache, file: InputFile, hash_now: bool) -> str | None:
        key = cache.key(file.path, hash_now)
        return key_of(key, self.corrections) if key is not None and self.corrections else key

    def _is_cached(self, file: InputFile) -> bool:
        """Return whether a file is large enough; the reading of an op table depends on other files as well, so it is never
        cached.
        """
        return num_text_bytes(file.path) >= self.min_text_bytes and file.format is not InputFormat.OPLOG

    def _read(self, file: InputFile, hash_now: bool) -> tuple[RecognisedRank, ...] | None:
        if not self._is_cached(file):
            return None
        cache = cache_for(file.path)
        key = self._key(cache, file, hash_now)
        packed = cache.read(key) if key is not None else None
        if packed is None:
            return None
        try:
            return unpack(packed, str(file.path))
        except _DAMAGE:  # damaged, or from another version
            return None


def pack(ranks: Sequence[RecognisedRank], path: str) -> Packed:
    """Pack the ranks of the file at ``path``.

    Raises:
        TypeError: a value is of a type that cannot be cached.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    facts = [_packed(RecognisedRank, rank, f"{index}", arrays, path) for index, rank in enumerate(ranks)]
    return Packed(json.dumps(facts), arrays)


def unpack(packed: Packed, path: str) -> tuple[RecognisedRank, ...]:
    """Restore packed ranks, with ``path`` as the path of their file.

    Raises:
        KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError: the entry is damaged.
    """
    facts = json.loads(packed.facts.replace(_in_json(_PATH), _in_json(path)))
    return tuple(_unpacked(RecognisedRank, fact, f"{index}", packed.arrays) for index, fact in enumerate(facts))


def _in_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _packed(hint: Any, value: Any, name: str, arrays: dict[str, npt.NDArray[Any]], path: str) -> Any:
    """The JSON form of a value of the type ``hint``; its arrays go into ``arrays`` under names that begin with ``name``."""
    if isinstance(value, Slice):
        return {column: _packed(None, value[column], f"{name}.{column}", arrays, path) for column in value.columns}
    if names := field_names(hint):
        hints = typing.get_type_hints(hint)
        return {key: _packed(hints[key], getattr(value, key), f"{name}.{key}", arrays, path) for key in names}
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf" or value.ndim not in (1, 2):
            raise TypeError(f"{name}: an array of {value.dtype} with {value.ndim} dimensions")
        arrays[name] = value.reshape(-1)
        return None if value.ndim == 1 else value.shape[1]
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
    """Pack a column: numbers as an array; texts as an array of codes, with the distinct texts and whether they are categories."""
    is_categorical = isinstance(column.dtype, pd.CategoricalDtype)
    if not is_categorical and column.dtype != object:
        return _packed(None, column.to_numpy(), name, arrays, path)
    if is_categorical:
        codes, texts = column.cat.codes.to_numpy(), column.cat.categories
    else:
        codes, texts = pd.factorize(column, use_na_sentinel=False)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name}: a column with values that are not texts")
    arrays[name] = codes.astype(np.int32)
    return [is_categorical, [str(text).replace(path, _PATH) for text in texts]]


def _unpacked(hint: Any, node: Any, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
    if names := field_names(hint):
        if hint is Slice:
            values = {
                column: _unpacked(np.ndarray, width, f"{name}.{column}", arrays) for column, width in node.items()
            }
        else:
            hints = typing.get_type_hints(hint)
            values = {key: _unpacked(hints[key], node[key], f"{name}.{key}", arrays) for key in names}
        columns = [value for value in values.values() if isinstance(value, np.ndarray) and value.ndim == 1]
        if len({len(column) for column in columns}) > 1:
            raise ValueError(f"{name}: arrays of different lengths")
        return Slice(values) if hint is Slice else hint(**values)
    if isinstance(hint, types.UnionType):
        if node is None and types.NoneType in hint.__args__ and name not in arrays:
            return None
        hint = next(kind for kind in hint.__args__ if kind is not types.NoneType)
        return _unpacked(hint, node, name, arrays)
    origin = _origin_of(hint)
    if origin is np.ndarray:
        return arrays[name] if node is None else arrays[name].reshape(-1, node)
    if origin is pd.DataFrame:
        return _unpacked_table(node, name, arrays)
    if origin is tuple:
        return tuple(tuple(item) if isinstance(item, list) else item for item in node)
    if isinstance(origin, type) and issubclass(origin, StrEnum):
        return origin(node)
    return node


def _origin_of(hint: Any) -> Any:
    """Return the class of a type, also where that is an alias of another (``NDArray`` of newer versions of numpy)."""
    origin = typing.get_origin(hint) or hint
    return _origin_of(origin.__value__) if hasattr(origin, "__value__") else origin


def _unpacked_table(node: Sequence[tuple[str, Any]], name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> pd.DataFrame:
    columns: dict[str, Any] = {}
    for column, packed_texts in node:
        values: Any = arrays[f"{name}.{column}"]
        if packed_texts is not None:
            is_categorical, texts = packed_texts
            if is_categorical:
                values = pd.Categorical.from_codes(values, texts)
            else:
                values = pd.Series(np.array(texts or [""], dtype=object)[values], dtype=object)
        columns[column] = values
    table = pd.DataFrame(columns)
    schema = _SCHEMAS.get(name.rpartition(".")[2])
    if schema is not None and list(table.columns) != list(schema):
        raise ValueError(f"{name}: a table of other columns")
    return table
