"""The begins and ends of one rank's host events by thread: where a profiler's own work falls.

A profiler works before it stamps the begin of an event and after it has stamped the end, so that its cost lies in the gaps
between these boundaries: of torch's profiler see ``onFunctionEnter`` and ``onFunctionExit`` in
``torch/csrc/autograd/profiler_kineto.cpp``. Events of a profiler's own (``overhead``) cost as long as they last. While kernels
are recorded each node of a graph is prepared for it when the graph is launched.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pptrace.intervals import Int64
from pptrace.model.traces import Bool, Category, Events
from pptrace.recognise.device.work import REPLAYS_GRAPH, device_rows, launch_calls

Float = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

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


class Boundaries(Struct, frozen=True):
    """The boundaries of all host threads, by thread and then by time.

    ``event`` is the row in the events, ``is_end`` whether it is its end; ``before`` and ``after`` is the cost that lies right
    before and behind each boundary, in units of the cost per event, ``nodes`` that of each event of the trace which launched a
    graph, for its nodes; ``overhead_ns`` is what of the gap before it are events of
    the profiler's own. ``first`` has the index of each thread's first boundary and, at the end, their number.
    """

    time_ns: Int64
    event: Rows
    is_end: Bool
    before: Float
    after: Float
    nodes: Float
    overhead_ns: Int64
    threads: Int64
    first: Rows

    @classmethod
    def of(cls, events: Events) -> Boundaries:
        rows = np.flatnonzero(np.isin(events.category, tuple(UNITS)) & (events.thread != -1))
        time = np.concatenate((events.start_ns[rows], events.ends_of(rows)))
        thread = np.tile(events.thread[rows], 2)
        order = np.lexsort((np.repeat((0, 1), len(rows)), time, thread))
        event, is_end = np.tile(rows, 2)[order], order >= len(rows)
        threads, first = np.unique(thread[order], return_index=True)
        first = np.append(first, len(order))
        time = time[order]
        units = np.zeros(int(max(Category)) + 1)
        units[list(UNITS)] = list(UNITS.values())
        # Half of a runtime call's cost is inside it (CUPTI); of what is outside half comes before it, half after it.
        inside = np.where(events.category[event] == Category.RUNTIME, units[events.category[event]] / 2, 0.0)
        outside = (units[events.category[event]] - inside) / 2
        nodes = _node_units(events)
        inside += nodes[event]
        before, after = np.where(is_end, inside, outside), np.where(is_end, outside, 0.0)
        return cls(time, event, is_end, before, after, nodes, _overhead(events, time, threads, first), threads, first)

    def __len__(self) -> int:
        return len(self.time_ns)

    @property
    def thread_of(self) -> Rows:
        """The index of each boundary's thread in ``threads``."""
        return np.repeat(np.arange(len(self.threads)), np.diff(self.first))

    @property
    def gaps_ns(self) -> Int64:
        """The time since the thread's boundary before; 0 at the first one of a thread."""
        gaps = np.diff(self.time_ns, prepend=self.time_ns[:1])
        gaps[self.first[:-1]] = 0
        return gaps

    @property
    def units(self) -> Float:
        """The cost that lies in the gap before each boundary; none at the first one of a thread."""
        units = self.before.copy()
        units[1:] += self.after[:-1]
        units[self.first[:-1]] = 0.0
        return units

    @property
    def room_ns(self) -> Int64:
        """The part of the gap before each boundary that may have been recording, ns."""
        room = np.where(self.units > 0, (self.gaps_ns * _REMOVABLE).astype(np.int64), 0)
        return np.maximum(room, self.overhead_ns)

    def of_events(self, events: Rows, num_events: int, *, ends: bool) -> Rows:
        """The boundary at which each of these events ends or begins; −1 of events that are none of the host's."""
        chosen = np.flatnonzero(self.is_end == ends)
        boundaries = np.full(num_events, -1, dtype=np.intp)
        boundaries[self.event[chosen]] = chosen
        return boundaries[events]


def _node_units(events: Events) -> Float:
    """The cost of recording the nodes of the graph that each event launched but the first, in units of the cost per event."""
    calls = events.rows_named(REPLAYS_GRAPH, Category.RUNTIME)
    if not len(calls):
        return np.zeros(len(events))
    launched = launch_calls(events, device_rows(events))
    num_nodes = np.bincount(launched[launched >= 0], minlength=len(events))
    units = np.zeros(len(events))
    has_operators = bool((events.category == Category.CPU_OP).any())
    units[calls] = np.maximum(num_nodes[calls] - 1, 0) * (_NODE if has_operators else _NODE_WITHOUT_OPERATORS)
    return units


def _overhead(events: Events, time: Int64, threads: Int64, first: Rows) -> Int64:
    """The length of the profiler's own events in the gap before each boundary, ns."""
    overhead = np.zeros(len(time), dtype=np.int64)
    rows = np.flatnonzero((events.category == Category.OVERHEAD) & (events.thread != -1))
    for index, thread in enumerate(threads.tolist() if len(rows) else ()):
        of_thread = rows[events.thread[rows] == thread]
        low, high = first[index], first[index + 1]
        following = np.searchsorted(time[low:high], events.start_ns[of_thread], side="right") + low
        inside = (following > low) & (following < high)
        np.add.at(overhead, following[inside], events.dur_ns[of_thread[inside]])
    return np.minimum(overhead, np.diff(time, prepend=time[:1]))
