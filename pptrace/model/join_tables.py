"""Tables of one schema one behind the other: categories stay so, and parts of one table are joined without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api.types import union_categoricals

from pptrace.model.tables import Schema, empty_table, with_categories


def concat_tables(tables: Sequence[pd.DataFrame | None]) -> pd.DataFrame:
    """Concatenate tables of one schema; None and empty ones are skipped, since empty columns would become floats."""
    present = [table for table in tables if table is not None]
    filled = [table for table in present if len(table)] or present[:1]
    return filled[0].reset_index(drop=True) if len(filled) == 1 else _joined(filled, [str(name) for name in filled[0]])


def _joined(tables: Sequence[pd.DataFrame], names: Sequence[str]) -> pd.DataFrame:
    """Some columns of tables one behind the other; what are categories in all of them stay so."""
    joined: dict[Any, Any] = {}
    for name in names:
        parts = [table[name] for table in tables]
        whole = _concatenated(parts)
        if whole is not None:
            joined[name] = whole
            continue
        is_category = [isinstance(part.dtype, pd.CategoricalDtype) for part in parts]
        if not any(is_category) or all(part.dtype == parts[0].dtype for part in parts):
            joined[name] = pd.concat(parts, ignore_index=True)
        elif all(is_category):
            joined[name] = union_categoricals([part.array for part in parts], sort_categories=True)
        else:
            joined[name] = pd.concat([part.astype(object) for part in parts], ignore_index=True)
    return pd.DataFrame(joined, copy=False)


def _concatenated(parts: Sequence[pd.Series[Any]]) -> npt.NDArray[np.int64] | pd.Categorical[Any] | None:
    """Integers, or texts with the same categories, one behind the other; None of other columns."""
    first = parts[0].dtype
    if isinstance(first, pd.CategoricalDtype):
        texts: list[Any] = [part.array for part in parts]
        if not all(isinstance(part, pd.Categorical) and first.categories.equals(part.categories) for part in texts):
            return None
        codes = np.concatenate([part.codes for part in texts])
        return pd.Categorical.from_codes(codes, dtype=first, validate=False)
    if any(part.dtype != np.int64 for part in parts):
        return None
    return np.concatenate([part.to_numpy() for part in parts])


def join_adjacent(tables: Sequence[pd.DataFrame], without: Sequence[str] = ()) -> pd.DataFrame:
    """Concatenate tables of one schema without some columns; adjacent parts of one table are not copied."""
    names = [str(name) for name in tables[0] if name not in without]
    if len(tables) == 1:
        return tables[0][names].reset_index(drop=True)
    columns: dict[Any, Any] = {}
    for name in names:
        parts = [table[name].array for table in tables]
        categories = parts[0].dtype
        if isinstance(categories, pd.CategoricalDtype) and all(part.dtype is categories for part in parts):
            codes = _joined_view([part.codes for part in parts])
            columns[name] = (
                None if codes is None else pd.Categorical.from_codes(codes, dtype=categories, validate=False)
            )
        else:
            columns[name] = _joined_view([part.to_numpy() for part in parts])
        if columns[name] is None:
            return _joined(tables, names)
    return pd.DataFrame(columns, copy=False)


def _joined_view(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any] | None:
    """The array of which these arrays are the parts, one behind the other; None where they are not."""
    first = parts[0]
    if all(part.strides == (0,) and part[0] == first[0] for part in parts if len(part)):
        return np.broadcast_to(first[:1], sum(map(len, parts))) if len(first) else None  # one value takes no memory
    if not all(part.flags.c_contiguous and part.dtype == first.dtype and part.dtype != object for part in parts):
        return None
    begins = np.array([part.__array_interface__["data"][0] for part in parts])
    sizes = np.array([part.nbytes for part in parts])
    base = _owner(first)
    if (
        base is None
        or (begins[:-1] + sizes[:-1] != begins[1:]).any()
        or any(_owner(part) is not base for part in parts)
    ):
        return None
    offset = int(begins[0] - base.__array_interface__["data"][0])
    count = int(sizes.sum()) // first.itemsize
    view: npt.NDArray[Any] = (
        base.reshape(-1).view(np.uint8)[offset : offset + int(sizes.sum())].view(first.dtype)[:count]
    )
    return view


def _owner(array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """The contiguous array that owns the memory of a view; None where no array does."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array if array.base is None and array.flags.c_contiguous else None


def join_ranks(tables: Sequence[tuple[int, pd.DataFrame]], schema: Schema) -> pd.DataFrame:
    """Concatenate the tables of all ranks, each row with its rank."""
    filled = [(rank, table) for rank, table in tables if len(table)]
    if not filled:
        return with_categories(empty_table(schema))
    joined = join_adjacent([table for _, table in filled], without=("rank",))
    ranks = np.repeat([rank for rank, _ in filled], [len(table) for _, table in filled])
    joined.insert(0, "rank", ranks.astype(np.int64, copy=False))
    joined = with_categories(joined)
    columns: dict[str, Any] = {str(name): joined[name] for name in joined.columns}
    for name, column in columns.items():  # those of one integer alone are that integer, and take no memory
        if column.dtype == np.int64:
            values = column.to_numpy()
            columns[name] = np.broadcast_to(values[0], len(values)) if (values == values[0]).all() else values
    return pd.DataFrame(columns, copy=False)
