"""Values of which some may not be known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")


def all_known(values: Iterable[T | None]) -> list[T] | None:
    """The values; None where one of them is not known (None)."""
    every = list(values)
    known = [value for value in every if value is not None]
    return known if len(known) == len(every) else None


def sum_of(values: Iterable[int | None]) -> int | None:
    """The sum; None where one of them is not known."""
    known = all_known(values)
    return None if known is None else sum(known)


def common(values: Iterable[T]) -> T | None:
    """The value that all have; None where they differ, or there are none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def masked(values: npt.NDArray[Any] | Sequence[Any], known: npt.NDArray[np.bool_]) -> list[Any]:
    """The values, None where they are not known."""
    every = values.tolist() if isinstance(values, np.ndarray) else values
    return [value if is_known else None for value, is_known in zip(every, known.tolist(), strict=True)]
