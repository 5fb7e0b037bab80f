"""Launchers of kernels: calls of communication, and operators that never communicate. They tell what a kernel without a name is,
or one whose name is another's.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pptrace.model.device import Rows
from pptrace.model.traces import Bool, Category, Events

NCCL_CALL = re.compile(r"^(?:(?:nccl|rccl):(?!coalesced)|record_param_comms|c10d::|p?nccl[A-Z])")
"""Names of NCCL's host calls, without the range of a batch, which may never end."""
_CALL = re.compile(NCCL_CALL.pattern + r"|^\w*ccl\w*:", re.ASCII)
_OPERATOR = re.compile(r"^aten::")
UNNAMED = re.compile(r"^\W*(?:unknown|null|none)?\W*$", re.IGNORECASE)
"""Names that are none."""
_MOST_OF_CALL = 4
"""Kernels that a call launches at most: the range of a batch that never ended has all that came later."""
FEWEST_CONTRADICTING = 3
"""Kernels with names that contradict their launches from which on no name is believed against a launch."""


class Labels(Struct, frozen=True):
    """Evidence on device rows, by their names and by what launched them: each a mark for each row."""

    named: Bool
    """The name is one of communication."""
    unnamed: Bool
    launched: Bool
    """The call that launched it, and nothing else, is known."""
    of_calls: Bool
    """Launched by a call of communication, outside of operators in it."""
    of_operators: Bool

    @property
    def contradict(self) -> Bool:
        """Kernels that communicate by their name or by what launched them, and not by the other."""
        marks: Bool = (self.named & self.of_operators) | (self.of_calls & ~self.named & ~self.unnamed)
        return marks

    @property
    def communicate(self) -> Bool:
        """Kernels that communicate by what launched them, else by their name, unless names of others are wrong."""
        sure = self.launched if np.count_nonzero(self.contradict) >= FEWEST_CONTRADICTING else self.of_operators
        marks: Bool = self.of_calls | (self.named & ~sure)
        return marks

    @property
    def unknown(self) -> Bool:
        """Kernels without a name of which no call tells what they do."""
        marks: Bool = self.unnamed & ~self.of_calls & ~self.of_operators
        return marks


def labels_of(events: Events, rows: Rows, calls: Rows, names: re.Pattern[str]) -> Labels:
    """Evidence that kernels communicate: their names, or the ``calls`` that launched them (-1: unknown)."""
    is_kernel = events.category[rows] == Category.KERNEL
    named = is_kernel & events.named(names, rows)[events.name_id[rows]]
    unnamed = is_kernel & events.named(UNNAMED, rows)[events.name_id[rows]]
    _, number, times = np.unique(calls, return_inverse=True, return_counts=True)
    launched = is_kernel & (calls >= 0) & (times[number] == 1)  # of several with one number it is not known
    is_range = events.named(_CALL)[events.name_id] & events.is_of(Category.CPU_OP, Category.ANNOTATION)
    inside = np.zeros(len(rows), dtype=np.bool_)
    inside[launched] = events.are_within(
        np.flatnonzero(is_range), events.thread[calls[launched]], events.start_ns[calls[launched]]
    )
    chosen = np.flatnonzero(launched & (named | unnamed | inside))
    around = innermost_ranges(events, calls[chosen])
    _, number, times = np.unique(around, return_inverse=True, return_counts=True)
    is_call = (around >= 0) & is_range[around] & (times[number] <= _MOST_OF_CALL)
    is_operator = (around >= 0) & events.named(_OPERATOR)[events.name_id[around]]
    of_calls, of_operators = np.zeros((2, len(rows)), dtype=np.bool_)
    of_calls[chosen], of_operators[chosen] = is_call, is_operator
    ids = events.name_id[rows]  # of a library with other names, whose launches are not all known
    named |= is_kernel & ~unnamed & np.isin(ids, np.setdiff1d(ids[of_calls], ids[launched & ~of_calls]))
    return Labels(named, unnamed, launched, of_calls, of_operators)


def innermost_ranges(events: Events, calls: Rows) -> npt.NDArray[np.intp]:
    """The row of the innermost operator or range around each call on its thread; -1 without one."""
    around = np.full(len(calls), -1, dtype=np.intp)
    on_host = np.flatnonzero(events.is_of(Category.CPU_OP, Category.ANNOTATION))
    threads = events.thread[calls]
    on_host = on_host[np.isin(events.thread[on_host], threads)]
    for thread, of_thread in events.rows_by_thread(on_host).items():
        chosen = np.flatnonzero(threads == thread)
        inner = events.intervals_of(of_thread).innermost(events.start_ns[calls[chosen]])
        around[chosen] = np.where(inner >= 0, of_thread[inner], -1)
    return around
