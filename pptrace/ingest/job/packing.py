"""Pack values for the disk cache (:mod:`pptrace.ingest.job.disk_cache`): Structs as JSON, by their types, and arrays by number.

Tables are packed column by column, texts of many rows as codes. Paths, which may name a home directory, are replaced by marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.ingest.job.disk_cache import Packed
from pptrace.slices import Array, Texts, compact, slice_of

# Errors of msgspec 0.19 are no ValueErrors.
DAMAGE = (LookupError, TypeError, ValueError, RecursionError, msgspec.MsgspecError)
_Value = TypeVar("_Value")


class _Column(Struct, frozen=True, array_like=True):
    """An array of the entry; of a ``repeated`` value it has one. ``texts`` are what its values are codes of."""

    name: str
    shape: tuple[int, ...]
    repeated: bool
    texts: tuple[str, ...] | None = None
    is_category: bool = False


def pack(value: Any, paths: Sequence[Path] = ()) -> Packed:
    """Pack a value, with marks in place of the paths.

    Raises:
        TypeError, ValueError: a part of it cannot be packed.
    """
    arrays: dict[str, Array] = {}
    text = msgspec.json.encode(value, enc_hook=partial(_packed, arrays)).decode()
    for path, mark in _marks(paths):
        text = text.replace(path, mark)
    return Packed(text, arrays)


def unpack(packed: Packed, kind: type[_Value], paths: Sequence[Path] = ()) -> _Value:
    """Restore a value of some type, with these paths in place of the marks.

    Raises:
        LookupError, TypeError, ValueError, ... (those of ``DAMAGE``): the entry is damaged.
    """
    text = packed.facts
    for path, mark in _marks(paths):
        text = text.replace(mark, path)
    return msgspec.json.decode(text, type=kind, dec_hook=partial(_unpacked, packed.arrays))


def _marks(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """(Path, mark) as JSON has them; of a bare name only as a whole value, since it may be part of any text."""
    marks = []
    for index, path in enumerate(map(Path, paths)):
        pair = (msgspec.json.encode(text).decode() for text in (str(path), f"\0path{index}\0"))
        old, new = (text[1:-1] if len(path.parts) > 1 else f":{text}" for text in pair)
        marks.append((old, new))
    return marks


def _packed(arrays: dict[str, Array], value: Any) -> Any:
    """The JSON form of a value of a type that msgspec does not know; its arrays are added to the others."""
    if isinstance(value, pd.DataFrame):
        return slice_of(value).columns
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Texts):
        return replace(_packed(arrays, value.codes), texts=value.names, is_category=True)
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a {type(value).__name__}")
    if value.dtype == object:
        codes, texts = pd.factorize(value, use_na_sentinel=False)
        if all(isinstance(text, str) for text in texts):
            return replace(_packed(arrays, compact(codes)), texts=tuple(texts))
    if value.dtype.kind not in "biuf":
        raise TypeError(f"an array of {value.dtype}")
    name, repeated = str(len(arrays)), value.size > 1 and value.strides == (0,)
    arrays[name] = value[:1] if repeated else value.reshape(-1)
    return _Column(name, value.shape, repeated)


def _unpacked(arrays: Mapping[str, Array], kind: Any, node: Any) -> Any:
    """The array, column or table of a JSON form."""
    if kind is not pd.DataFrame:
        return _column(arrays, msgspec.convert(node, _Column))
    columns = msgspec.convert(node, dict[str, _Column])
    return pd.DataFrame({name: _of_table(_column(arrays, column)) for name, column in columns.items()})


def _of_table(column: Array | Texts) -> Any:
    if isinstance(column, Texts):
        return pd.Categorical.from_codes(column.codes, pd.Index(column.names))
    return pd.Series(column, dtype=object) if column.dtype == object else column


def _column(arrays: Mapping[str, Array], packed: _Column) -> Any:
    values = arrays[packed.name]
    values = np.broadcast_to(values, packed.shape) if packed.repeated else values.reshape(packed.shape)
    if packed.texts is None:
        return values
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < len(packed.texts):
        raise ValueError(f"{packed.name}: codes of no text")
    if packed.is_category:
        return Texts(values, packed.texts)
    return np.array(packed.texts or [""], dtype=object)[values]
