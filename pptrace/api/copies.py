"""Tables as users get them: each look has a copy, so that a change in one is seen by nobody else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


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
