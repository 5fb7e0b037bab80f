"""Values that a report may lack."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def not_none(value: T | None) -> T:
    """Return a value that must not be null."""
    assert value is not None
    return value
