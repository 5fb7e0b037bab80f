"""Values of which some may not be known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

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
