"""Columns of texts as categories: few texts on many rows, held as codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

TEXTS = ("kind", "axis", "direction", "phase", "clock", "source", "pair", "splits", "algorithm")
"""Columns of the tables of ops and communication with few texts on many rows: of a whole run they are categories (codes)."""

_USUAL_TEXTS: Mapping[str, tuple[str, ...]] = {
    "direction": ("", "B", "F"),
    "phase": ("", "cooldown", "steady", "warmup"),
    "clock": ("", "device", "host", "none"),
}


def with_categories(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its texts as categories, in alphabetical order, the usual ones of each column among them."""
    columns = {}
    for name in [name for name in TEXTS if name in table]:
        usual = _USUAL_TEXTS.get(name, ("",))
        if not isinstance(table[name].dtype, pd.CategoricalDtype):
            columns[name] = as_category(table[name], usual)
        elif not set(usual) <= set(table[name].cat.categories):
            columns[name] = table[name].array.set_categories(sorted({*table[name].cat.categories, *usual}))
    return table.assign(**columns)


def without_categories(table: pd.DataFrame) -> pd.DataFrame:
    """The table with its categories as texts."""
    texts = {}
    for name, dtype in table.dtypes.items():
        if isinstance(dtype, pd.CategoricalDtype):
            values = dtype.categories.to_numpy(dtype=object)[table[name].array.codes]
            texts[str(name)] = pd.Series(values, index=table.index, dtype=object, copy=False)
    return table.assign(**texts)


def as_category(
    texts: pd.Series[Any] | npt.NDArray[Any] | Sequence[str], others: Sequence[str] = ()
) -> pd.Categorical[Any]:
    """A column of texts as categories, those of ``others`` among them."""
    codes, distinct = pd.factorize(np.asarray(texts, dtype=object))
    return category_of_codes(codes, distinct.tolist(), others)


def category_of_codes(
    codes: npt.NDArray[np.integer[Any]], texts: Sequence[str], others: Sequence[str] = ()
) -> pd.Categorical[Any]:
    """A column of indices into ``texts``, as :func:`as_category` makes it of the texts themselves."""
    present = np.flatnonzero(np.bincount(codes, minlength=len(texts)))
    categories = sorted({*(texts[code] for code in present.tolist()), *others})
    index = np.full(len(texts), -1, dtype=np.int64)
    place = {text: code for code, text in enumerate(categories)}  # of splits there may be as many as calls
    index[present] = [place[texts[code]] for code in present.tolist()]
    codes = index[codes] if len(texts) else codes
    return pd.Categorical.from_codes(codes, dtype=_dtype_of(categories), validate=False)


def _dtype_of(categories: Sequence[str]) -> pd.CategoricalDtype[Any]:
    """The type of a column; short ones are made once, since making one takes longer than a small column."""
    return _short_dtype(tuple(categories)) if len(categories) <= _SHORT else pd.CategoricalDtype(list(categories))


@lru_cache(maxsize=256)
def _short_dtype(categories: tuple[str, ...]) -> pd.CategoricalDtype[Any]:
    return pd.CategoricalDtype(list(categories))


_SHORT = 16


def same_category(text: str, num_rows: int) -> pd.Categorical[Any]:
    """A column with one text, as :func:`as_category` makes it."""
    dtype = _dtype_of(sorted({"", text}))
    return pd.Categorical.from_codes(np.full(num_rows, bool(text), dtype=np.int8), dtype=dtype)
