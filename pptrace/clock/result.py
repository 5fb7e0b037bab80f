"""Clock alignment of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
import pandas as pd
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.model.tables import Int64


class ClockMethod(StrEnum):
    SINGLE_RANK = "single-rank"
    SAME_HOST = "same-host"  # the ranks read one clock of one host
    ONE_FILE = "one-file"  # the ranks stand in one table, whose times are on one clock already
    SAME_SESSION = "same-session"  # one recording of several processes of a host, which its tool put on one clock
    BOUNDS = "message-bounds"  # offsets from the causality of messages and collectives
    OP_ORDER = "op-order"  # offsets from the order of the pipeline's ops, where no messages relate the ranks
    NONE = "none"  # nothing relates the ranks: their times are taken as they are


_MOST_NAMED = 4
"""Ranks that a warning names."""


class Clock(Struct, frozen=True):
    """Offsets added to each rank's times, ns, and their uncertainty; None where nothing bounds it.

    ``unrelated`` are the ranks whose times nothing relates to the first one's. Where a clock drifts, ``rates`` has how much more
    is added for each ns after ``middle_ns``, which is on the common clock. ``early_ends`` are the ends of communication, on the
    clock of each rank, that were before the other side began. ``shifted`` are the ranks whose times are not those of their host.
    """

    method: ClockMethod
    offsets_ns: Mapping[int, int]
    uncertainty_ns: int | None
    warnings: tuple[str, ...] = field(default=())
    unrelated: frozenset[int] = frozenset()
    rates: Mapping[int, float] = field(default_factory=dict)
    middle_ns: int = 0
    early_ends: Mapping[int, Int64] = field(default_factory=dict)
    shifted: frozenset[int] = frozenset()

    def with_early_ends(self, early: pd.DataFrame) -> Clock:
        """The same, with the rows (schema COMMS) whose ends are wrong."""
        ends = {int(str(rank)): rows["end_ns"].to_numpy() for rank, rows in early.groupby("rank")}
        named = ", ".join(f"{len(times):,} of rank {rank}" for rank, times in list(ends.items())[:_MOST_NAMED])
        more = f" and {len(ends) - _MOST_NAMED} more ranks" if len(ends) > _MOST_NAMED else ""
        line = (
            f"{named}{more} of the messages and collectives end before the other side has begun, though the ranks read one "
            "clock: these ends were recorded or matched wrongly, and do not relate the clocks"
        )
        return replace(self, early_ends=ends, warnings=(*self.warnings, line))

    def to_common_clock(self, rank: int, times: Int64) -> Int64:
        """Convert times of a rank's own clock to the common clock."""
        moved: Int64 = times + self.offsets_ns.get(rank, 0)
        rate = self.rates.get(rank, 0.0)
        return moved + np.rint(rate * (moved - self.middle_ns)).astype(np.int64) if rate else moved

    def times_on_rank_clock(self, rank: int, times: Int64) -> Int64:
        """Convert times of the common clock to a rank's own clock; of a clock that drifts, to within a nanosecond."""
        rate = self.rates.get(rank, 0.0)
        moved: Int64 = times - self.offsets_ns.get(rank, 0)
        if rate:
            moved -= np.rint(rate / (1 + rate) * (times - self.middle_ns)).astype(np.int64)
        return moved

    def relates(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks' times may be compared with each other."""
        if len(ranks) < 2:
            return True
        return self.method is not ClockMethod.NONE and len(self.unrelated & set(ranks)) in (0, len(ranks))


def shift(table: pd.DataFrame, clock: Clock) -> pd.DataFrame:
    """The table with every ``*_ns`` column on the common clock."""
    if not any(clock.offsets_ns.values()) and not any(clock.rates.values()):
        return table
    rows_by_rank = table.groupby("rank").indices
    moved = {name: table[name].to_numpy(dtype=np.int64, copy=True) for name in table.columns if name.endswith("_ns")}
    for times in moved.values():
        for rank, rows in rows_by_rank.items():
            times[rows] = clock.to_common_clock(int(str(rank)), times[rows])
    return table.assign(**moved)


READING_NS = 50_000
"""A profiler's own conversion of one host clock may differ by some µs between processes; more than this is no reading error."""


def microseconds(span_ns: int) -> str:
    return f"{span_ns / 1000:,.1f} µs"
