"""What is known of the ranks' clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import pandas as pd


class ClockMethod(StrEnum):
    SINGLE_RANK = "single-rank"
    SAME_HOST = "same-host"  # the ranks read one clock of one host
    ONE_FILE = "one-file"  # the ranks stand in one table, whose times are on one clock already
    SAME_SESSION = "same-session"  # one recording of several processes of a host, which its tool put on one clock
    BOUNDS = "message-bounds"  # offsets from the causality of messages and collectives
    OP_ORDER = "op-order"  # offsets from the order of the pipeline's ops, where no messages relate the ranks
    NONE = "none"  # nothing relates the ranks: their times are taken as they are


@dataclass(frozen=True, slots=True)
class Clock:
    """What was added to each rank's times, ns, and how far off that may be; None where nothing bounds it.

    ``unrelated`` are the ranks whose times nothing relates to the first one's.
    """

    method: ClockMethod
    offsets_ns: Mapping[int, int]
    uncertainty_ns: int | None
    warnings: tuple[str, ...] = field(default=())
    unrelated: frozenset[int] = frozenset()

    def relates(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks' times may be compared with each other."""
        if len(ranks) < 2:
            return True
        return self.method is not ClockMethod.NONE and len(self.unrelated & set(ranks)) in (0, len(ranks))


def shift(table: pd.DataFrame, clock: Clock) -> pd.DataFrame:
    """The table with every ``*_ns`` column on the common clock."""
    offset = table["rank"].map(clock.offsets_ns).fillna(0).astype("int64")
    return table.assign(**{name: table[name] + offset for name in table.columns if name.endswith("_ns")})


READING_NS = 50_000
"""A profiler's own conversion of one host clock may differ by some µs between processes; more than this is no reading error."""


def microseconds(span_ns: int) -> str:
    return f"{span_ns / 1000:,.1f} µs"
