"""The table of communication, which can be grouped by its column ``axis``.

pandas 3 asks a grouped table for an attribute ``axis`` before it calls several functions, and a grouped table answers with the
column of that name: ``comms.groupby("axis")[["bytes"]].agg(["sum", "count"])`` fails in any table that has one.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from pandas.api.typing import DataFrameGroupBy


class _RowGroups(DataFrameGroupBy):  # type: ignore[type-arg]
    """Groups of rows, whose ``axis`` is that of pandas: 0. Their column is ``groups["axis"]``."""

    axis = 0

    def __getitem__(self, key: Any) -> Any:
        selected = super().__getitem__(key)
        if isinstance(selected, DataFrameGroupBy):  # a plain one
            selected.__class__ = _RowGroups
        return selected


class CommsTable(pd.DataFrame):
    """A DataFrame, as are the tables made of it; only grouped ones differ from pandas'."""

    @property
    def _constructor(self) -> Any:
        return CommsTable

    def groupby(self, *args: Any, **options: Any) -> Any:
        grouped: Any = super().groupby(*args, **options)
        if isinstance(grouped, DataFrameGroupBy):
            grouped.__class__ = _RowGroups
        return grouped
