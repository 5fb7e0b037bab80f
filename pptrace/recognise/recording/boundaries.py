"""The begins and ends of one rank's host events by thread: where a profiler's own work falls.

A profiler works before it stamps the begin of an event and after it has stamped the end, so that its cost lies in the gaps
between these boundaries: of torch's profiler see ``onFunctionEnter`` and ``onFunctionExit`` in
``torch/csrc/autograd/profiler_kineto.cpp``. Events of a profiler's own (``overhead``) cost as long as they last. While kernels
are recorded each node of a graph is prepared for it when the graph is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pptrace.intervals import Int64
from pptrace.model.tables import Int8
from pptrace.model.traces import Bool, Category, Events
from pptrace.recognise.device.work import REPLAYS_GRAPH, device_rows, launch_calls
from pptrace.slices import compact, last_like, reduce_groups

Float = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
Compact = npt.NDArray[np.signedinteger[Any]]
"""Rows of events or numbers of nodes, in as few bytes as hold them."""

UNITS: dict[Category, float] = {
    Category.CPU_OP: 1.0,
    Category.ANNOTATION: 1.0,
    Category.RUNTIME: 1.0,
    Category.PYTHON: 0.6,
}
"""Cost of recording an event of each category, in units of the cost per event."""
_NODE, _NODE_WITHOUT_OPERATORS = 0.7, 0.2
"""Cost of each node of a launched graph but the first, in the same units, which are of calls where operators are not recorded."""
LONG_NS = 100_000
"""A thread without a boundary for this long waits, sleeps or computes in Python."""
_REMOVABLE = 0.9
_BLOCK = 2**18
_NO_ROWS = np.empty(0, dtype=np.intp)

# Half of a runtime call's cost is inside it (CUPTI); of what is outside half comes before it, half after it.
_UNITS = np.zeros(int(max(Category)) + 1)
_UNITS[list(UNITS)] = list(UNITS.values())
_INSIDE = np.where(np.arange(len(_UNITS)) == Category.RUNTIME, _UNITS / 2, 0.0)
_OUTSIDE = (_UNITS - _INSIDE) / 2
_BEFORE, _AFTER = np.stack((_OUTSIDE, _INSIDE)), np.stack((np.zeros_like(_UNITS), _OUTSIDE))
"""Cost right before and right behind a boundary: of begins, of ends; by category."""


class Boundaries(Struct, frozen=True):
    """The boundaries of all host threads, by thread and then by time: 14 bytes each, and what is computed of them by blocks.

    ``event`` is the row in the events, ``category`` that of the event, ``is_end`` whether it is its end; ``nodes`` are the events
    that launched a graph. ``overhead`` are the boundaries in front of which events of the profiler's own lie, and their length
    in ns. ``first`` has the index of each thread's first boundary and, at the end, their number.
    """

    time_ns: Int64
    event: Compact
    category: Int8
    is_end: Bool
    nodes: NodeUnits
    overhead: tuple[Rows, Int64]
    threads: Int64
    first: Rows

    @classmethod
    def of(cls, events: Events) -> Boundaries:
        chosen = events.is_of(*UNITS) & (events.thread != -1)
        rows = compact(np.flatnonzero(chosen))
        by_thread = events.rows_by_thread(rows)
        first = np.cumsum([0, *(2 * len(of_thread) for of_thread in by_thread.values())])
        num = int(first[-1])
        time, event = np.empty(num, dtype=np.int64), np.empty(num, dtype=rows.dtype)
        category, is_end = np.empty(num, dtype=np.int8), np.empty(num, dtype=np.bool_)
        for of_thread, low, high in zip(by_thread.values(), first[:-1].tolist(), first[1:].tolist(), strict=True):
            num_events, of_part = len(of_thread), time[low:high]
            of_part[:num_events], of_part[num_events:] = events.start_ns[of_thread], events.ends_of(of_thread)
            order = np.argsort(of_part, kind="stable")  # of equal ones begins are first
            of_part[:] = of_part[order]
            is_end[low:high] = order >= num_events
            order %= num_events
            event[low:high] = of_thread[order]
            category[low:high] = events.category[event[low:high]]
        threads = np.array(list(by_thread), dtype=np.int64)
        overhead = _overhead(events, time, threads, first)
        return cls(time, event, category, is_end, NodeUnits.of(events), overhead, threads, first)

    def __len__(self) -> int:
        return len(self.time_ns)

    def blocks(self) -> Iterator[slice]:
        """Parts of the boundaries of which more can be held at one time."""
        for low in range(0, len(self), _BLOCK):
            yield slice(low, min(low + _BLOCK, len(self)))

    def threads_of(self, rows: Rows) -> Rows:
        """The index in ``threads`` of the thread of some boundaries."""
        return np.searchsorted(self.first, rows, side="right") - 1

    def gaps_ns(self, block: slice) -> Int64:
        """The time since the thread's boundary before; 0 at the first one of a thread."""
        gaps = np.diff(self.time_ns[block], prepend=self.time_ns[max(block.start - 1, 0)])
        gaps[self._first_in(block)] = 0
        return gaps

    def gaps_at(self, rows: Rows) -> Int64:
        """The same of some boundaries."""
        gaps = self.time_ns[rows] - self.time_ns[np.maximum(rows - 1, 0)]
        gaps[np.isin(rows, self.first[:-1])] = 0
        return gaps

    def long_gaps(self) -> Rows:
        """The boundaries before which their thread had none for long."""
        return np.concatenate(
            [_NO_ROWS, *(b.start + np.flatnonzero(self.gaps_ns(b) >= LONG_NS) for b in self.blocks())]
        )

    def before(self, rows: Rows | slice) -> Float:
        """The cost that lies right before some boundaries, in units of the cost per event."""
        is_end = self.is_end[rows]
        units = _BEFORE[is_end.view(np.int8), self.category[rows]]
        return units + np.where(is_end, self.nodes.of_events(self.event[rows]), 0.0) if len(self.nodes) else units

    def after(self, rows: Rows | slice) -> Float:
        """The cost that lies right behind some boundaries, in the same units."""
        return _AFTER[self.is_end[rows].view(np.int8), self.category[rows]]

    def units(self, block: slice) -> Float:
        """The cost that lies in the gap before each boundary; none at the first one of a thread."""
        units = self.before(block)
        units[1:] += self.after(slice(block.start, block.stop - 1))
        if block.start:
            units[:1] += self.after(slice(block.start - 1, block.start))
        units[self._first_in(block)] = 0.0
        return units

    def overhead_ns(self, block: slice) -> Int64:
        """The length of the profiler's own events in the gap before each boundary, ns."""
        overhead = np.zeros(block.stop - block.start, dtype=np.int64)
        rows, lengths = self.overhead
        low, high = np.searchsorted(rows, (block.start, block.stop))
        overhead[rows[low:high] - block.start] = lengths[low:high]
        return overhead

    def room_ns(self, block: slice) -> Int64:
        """The part of the gap before each boundary that may have been recording, ns."""
        room = np.where(self.units(block) > 0, (self.gaps_ns(block) * _REMOVABLE).astype(np.int64), 0)
        return np.maximum(room, self.overhead_ns(block))

    def of_events(self, events: Rows, num_events: int, *, ends: bool) -> Rows:
        """The boundary at which each of these events ends or begins; −1 of events that are none of the host's, and of −1."""
        is_asked = np.zeros(num_events, dtype=np.bool_)
        is_asked[events[events >= 0]] = True
        rows = np.flatnonzero((self.is_end == ends) & is_asked[self.event])
        found = last_like([events], [self.event[rows]])
        return np.where(found >= 0, rows[found], -1) if len(rows) else found

    def _first_in(self, block: slice) -> Rows:
        low, high = np.searchsorted(self.first[:-1], (block.start, block.stop))
        rows: Rows = self.first[low:high] - block.start
        return rows


class NodeUnits(Struct, frozen=True):
    """The ``events`` that launched graphs, ascending, and what recording the nodes of each but the first took, in units of the
    cost per event.
    """

    events: Rows
    units: Float

    @classmethod
    def of(cls, events: Events) -> NodeUnits:
        calls = events.rows_named(REPLAYS_GRAPH, Category.RUNTIME)
        if not len(calls):
            return cls(calls, np.empty(0))
        launched = launch_calls(events, device_rows(events))
        num_nodes = np.bincount(launched[launched >= 0], minlength=len(events))[calls]
        has_operators = bool((events.category == Category.CPU_OP).any())
        of_node = _NODE if has_operators else _NODE_WITHOUT_OPERATORS
        return cls(calls, np.maximum(num_nodes - 1, 0) * of_node)

    def __len__(self) -> int:
        return len(self.events)

    def of_events(self, events: Rows) -> Float:
        """The units of each of these events; 0 of those that launched no graph."""
        if not len(self):
            return np.zeros(len(events))
        at = np.minimum(np.searchsorted(self.events, events), len(self) - 1)
        return np.where(self.events[at] == events, self.units[at], 0.0)


def _overhead(events: Events, time: Int64, threads: Int64, first: Rows) -> tuple[Rows, Int64]:
    """(boundaries in front of which the profiler's own events lie, their length in ns, at most the gap), ascending."""
    rows = np.flatnonzero((events.category == Category.OVERHEAD) & (events.thread != -1))
    before, lengths = [_NO_ROWS], [events.dur_ns[:0]]
    for index, thread in enumerate(threads.tolist() if len(rows) else ()):
        of_thread = rows[events.thread[rows] == thread]
        low, high = first[index], first[index + 1]
        following = np.searchsorted(time[low:high], events.start_ns[of_thread], side="right") + low
        inside = (following > low) & (following < high)
        before.append(following[inside])
        lengths.append(events.dur_ns[of_thread[inside]])
    boundaries, number = np.unique(np.concatenate(before), return_inverse=True)
    length = reduce_groups(np.add, np.concatenate(lengths), number, len(boundaries))
    return boundaries, np.minimum(length, time[boundaries] - time[boundaries - 1])
