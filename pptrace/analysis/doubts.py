"""Doubts that all times of a report hang on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class InDoubt(StrEnum):
    """Thing in doubt: how the clocks of ranks relate, or what ops take on a device that several ranks have."""

    CLOCK = "clock"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Doubt:
    """A doubt, and the line of the report's warnings that tells of it."""

    cause: InDoubt
    line: str


CLOCKS_OFF = "the clocks may be off by"
"""Beginning of the line that says by how much, and where that is much."""
