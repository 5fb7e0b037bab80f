"""Tables as users get them: each look has a copy, so that a change in one is seen by nobody else."""

from __future__ import annotations

import pandas as pd

_COPIES_ON_WRITE = int(pd.__version__.split(".")[0]) >= 3


def a_copy(table: pd.DataFrame) -> pd.DataFrame:
    """A copy of a table; where pandas copies on write, its columns are shared until one of them is written."""
    return table.copy(deep=not _COPIES_ON_WRITE)
