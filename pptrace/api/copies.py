"""Tables as users get them: each look has a copy, so that a change in one is seen by nobody else.

A table of communication can be grouped by its column ``axis``: pandas 3 asks a grouped table for an attribute ``axis`` before it
calls several functions, and a grouped table answers with the column of that name: ``comms.groupby("axis")[["bytes"]].agg(["sum",
"count"])`` fails in any table that has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


import pandas as pd
from pandas.api.typing import DataFrameGroupBy


class CopiedTable(property):
    """A property that is a table: made when it is first asked for, and copied for each look.

    Where pandas copies on write, the columns of a copy are shared until one of them is written.
    """

    def __init__(self, make: Callable[[Any], pd.DataFrame]) -> None:
        super().__init__(make)
        self._make, self._name = make, f"_{make.__name__}"

    def __get__(self, owner: Any, kind: type | None = None) -> pd.DataFrame:  # type: ignore[override]
        if owner is None:
            return self  # type: ignore[return-value]  # of the class: its docstring is asked for
        import pandas as pd

        made = owner.__dict__
        if self._name not in made:
            made[self._name] = self._make(owner)
        table: pd.DataFrame = made[self._name]
        return table.copy(deep=int(pd.__version__.split(".")[0]) < 3)


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
