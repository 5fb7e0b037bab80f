"""Damage of a recording: events that its recorder lost, stretched, doubled or put elsewhere, and when they were.

So are records that some ranks of a run lack though the others have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

import numpy as np
from msgspec import Struct, field

from pptrace.model.tables import Int8, Int64


class Damage(StrEnum):
    """Kinds of damage in the events of one rank, as ``recording.audit[].kind`` of the report names them."""

    LOST_KERNELS = "lost_kernels"
    NO_DEVICE_EVENTS = "no_device_events"
    KERNELS_WITHOUT_LAUNCH = "kernels_without_launch"
    WORK_BEFORE_RECORDING = "work_before_recording"
    NO_CORRELATION = "no_correlation"
    REPEATED_CORRELATION = "repeated_correlation"
    KERNELS_BEFORE_LAUNCH = "kernels_before_launch"
    KERNELS_AFTER_WAIT = "kernels_after_wait"
    KERNELS_OUT_OF_ORDER = "kernels_out_of_order"
    OVERRUNNING_KERNELS = "overrunning_kernels"
    REPEATED_KERNELS = "repeated_kernels"
    EMPTY_KERNELS = "empty_kernels"
    UNNAMED_KERNELS = "unnamed_kernels"
    CONTRADICTING_NAMES = "contradicting_names"
    GRAPHS_AS_ONE_EVENT = "graphs_as_one_event"
    GRAPHS_WITHOUT_KERNELS = "graphs_without_kernels"
    FAR_TIMES = "far_times"
    UNSET_TIMES = "unset_times"
    IMPOSSIBLE_TIMES = "impossible_times"
    UNREADABLE_EVENTS = "unreadable_events"
    CUT_FILE = "cut_file"
    UNFINISHED_OPERATORS = "unfinished_operators"
    REPEATED_OPERATORS = "repeated_operators"
    UNFINISHED_CALLS = "unfinished_calls"
    CROSSING_RANGES = "crossing_ranges"
    EMPTY_RANGES = "empty_ranges"
    BUFFER_REQUESTS = "buffer_requests"
    EARLY_ENDS = "early_ends"


KINDS = tuple(Damage)
CLOCK_KINDS = (Damage.KERNELS_BEFORE_LAUNCH, Damage.KERNELS_AFTER_WAIT)
"""Kinds of a device whose clock is not its host's."""
NO_TIME = int(np.iinfo(np.int64).min)
"""The time of damage of which it is not known when it was."""


class RankDamage(Struct, frozen=True, eq=False):
    """A row for each damaged event of a rank: its kind, an index into :data:`KINDS`, and when it was, ns on the rank's clock."""

    kind: Int8 = field(default_factory=lambda: np.zeros(0, dtype=np.int8))
    start_ns: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.kind)

    def has(self, *kinds: Damage) -> bool:
        """Return whether there is damage of one of these kinds."""
        return bool(np.isin(self.kind, [KINDS.index(kind) for kind in kinds]).any())

    @classmethod
    def of(cls, kind: Damage, start_ns: Int64) -> RankDamage:
        """Damage of one kind at these times."""
        return cls(np.full(len(start_ns), KINDS.index(kind), dtype=np.int8), start_ns.astype(np.int64))

    @classmethod
    def counted(cls, kind: Damage, count: int) -> RankDamage:
        """Damage of one kind, so much of it, at times that are not known."""
        return cls.of(kind, np.full(count, NO_TIME))

    @classmethod
    def joined(cls, parts: Iterable[RankDamage]) -> RankDamage:
        """The rows of all parts."""
        rows = [part for part in parts if len(part)]
        if not rows:
            return cls()
        return cls(np.concatenate([part.kind for part in rows]), np.concatenate([part.start_ns for part in rows]))


class LackingRecords(Struct, frozen=True):
    """Records that single ranks lack.

    ``messages`` are the steps (−1: of none) of those messages whose other end is not in the trace of the rank;
    ``ranges`` are the ranks without labelled ops.
    """

    messages: Mapping[int, Int64] = field(default_factory=dict)
    ranges: tuple[int, ...] = ()
