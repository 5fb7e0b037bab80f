"""Graph of what each moment of one rank waited for: its threads' boundaries and its device work as the nodes of a graph.

A trace has the calls that make a stream wait for an event, but neither the streams nor the event. Work that was launched behind
such a call is taken to wait for all that was launched before it, and had ended when it began, as it does where the event is of
the last work so far. A graph runs behind what was launched before it, and in front of what is launched after it, on whichever
streams its nodes are.

Nodes are those boundaries of host events at which something depends on another thread, on the device or on another rank, and
the start and the end of everything the device did. An edge says how long after its source its target came in the recording, and
how much of that recording itself took. Each node comes as soon as all its edges let it:

    thread      boundary ──► the next one                  less what recording the events between them cost
                boundary of another thread ──► the one at which a thread goes on that had waited for it
                end of device work ──► end of the call that waited for it
    device      launching call ──► start                   the latency of a launch
                end before it on its stream ──► start
                end on another stream ──► start            where streams waited, or nothing else explains when it started
                start ──► end                              as long as it took

Of the edges into a node one is tight: it let the node come when it came. The others have the least time that such an edge is
seen to take, so that a node never comes earlier than what it needs. With a cost of zero all nodes come when they came.

Messages and collectives join the graphs of ranks: :mod:`pptrace.recognise.recording.replay`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.intervals import Int64
from pptrace.model.traces import Bool, Category, Events
from pptrace.recognise.device.idle import WAITS_ON_STREAM, synchronising_calls
from pptrace.recognise.device.work import device_rows, launch_calls
from pptrace.recognise.recording.boundaries import LONG_NS, Boundaries, Compact, Float, Rows
from pptrace.slices import Slice, compact


def waits_between_streams(
    events: Events, start: Int64, end: Int64, stream: Int64, launched_ns: Int64
) -> tuple[Rows, Rows]:
    """(work, work of another stream that begins after its end).

    What follows from the order of the streams themselves is not among them.

    Args:
        start, end, stream, launched_ns: of the device's work; ``launched_ns`` is −1 where that is not known.
    """
    known = np.flatnonzero(launched_ns >= 0)
    order = known[np.lexsort((start[known], launched_ns[known]))]
    before, behind = order[:-1], order[1:]
    by_one_call = behind[(launched_ns[behind] == launched_ns[before]) & (stream[behind] != stream[before])]
    waits = events.rows_named(WAITS_ON_STREAM, Category.RUNTIME)
    moments = np.union1d(events.start_ns[waits], launched_ns[by_one_call])
    of_streams = [order[stream[order] == number] for number in np.unique(stream[order])] if len(moments) else []
    sources, targets = [order[:0]], [order[:0]]
    for later in of_streams:
        begun = launched_ns[later]
        # The launch before it on its stream, maybe of the same graph.
        since = np.append(np.iinfo(np.int64).min, begun)[:-1]
        waiting = later[np.searchsorted(moments, begun, side="right") > np.searchsorted(moments, since)]
        for earlier in of_streams:
            if earlier is later:
                continue
            launched = np.searchsorted(launched_ns[earlier], launched_ns[waiting], side="right")
            ended = np.searchsorted(np.maximum.accumulate(end[earlier]), start[waiting], side="right")
            number = np.minimum(launched, ended)
            is_more = number > np.append(0, np.maximum.accumulate(number))[:-1]
            sources.append(earlier[number[is_more] - 1])
            targets.append(waiting[is_more])
    return np.concatenate(sources), np.concatenate(targets)


SOON_NS = 30_000
"""Longest time after something within which what follows may have waited for it."""
_LEAST_CALL_NS = 1_000
_PERCENTILE = 10
_LATENCY_NS, _STREAM_GAP_NS = 5_000, 1_000
"""Latencies where a recording shows none: from a launch to its start on an idle device; from a kernel to its stream's next."""
_NODE_NS = 250
"""Length that recording adds to each kernel of a graph, which the device begins without the host."""
_QUEUE = 1_024
"""Launches that a device takes ahead of their execution; a further one waits until the first of them has ended."""


_HOST_NODES = {
    "time_ns": np.int64,
    "thread": np.int64,
    "lag_ns": np.int64,  # after the node before it, of which at most ``room_ns`` was recording
    "events": np.int64,  # that began since the node before it
    "units": np.float64,  # events recorded since the node before it, in units of the cost per event
    "overhead_ns": np.int64,  # of events of the profiler's own since the node before it
    "room_ns": np.int64,
    "waited": np.bool_,  # it came when something else let it
}
"""Columns of boundaries of host events, by thread and time; integers are in as few bytes as hold them."""


_NO_ROWS = np.empty(0, dtype=np.intp)


class Edges(Struct, frozen=True, eq=False):
    """Edges between nodes. Of those that ``recorded`` numbers, which ascend, recording took ``units`` of the lag, in units of the
    cost per event.
    """

    source: Compact = field(default_factory=lambda: _NO_ROWS)
    target: Compact = field(default_factory=lambda: _NO_ROWS)
    lag_ns: Compact = field(default_factory=lambda: _NO_ROWS)
    recorded: Rows = field(default_factory=lambda: _NO_ROWS)
    units: Float = field(default_factory=lambda: np.empty(0))

    @classmethod
    def of(cls, source: Compact, target: Compact, lag_ns: npt.ArrayLike, units: npt.ArrayLike = 0.0) -> Edges:
        every = np.broadcast_to(np.asarray(units, dtype=np.float64), source.shape)
        recorded = np.flatnonzero(every)
        lag = np.broadcast_to(np.asarray(lag_ns, dtype=np.int64), source.shape)
        return cls(compact(source), compact(target), compact(lag), recorded, every[recorded])

    @classmethod
    def joined(cls, parts: Sequence[Edges]) -> Edges:
        """The edges of several parts, one after the other."""
        number = np.cumsum([0, *map(len, parts)]).tolist()
        columns = [
            (part.source, part.target, part.lag_ns, part.recorded + before, part.units)
            for part, before in zip(parts, number, strict=False)
            if len(part)
        ]
        return cls(*map(np.concatenate, zip(*columns, strict=True)))

    def __len__(self) -> int:
        return len(self.source)

    def numbered_from(self, first: int) -> Edges:
        """The edges of nodes whose numbers begin at ``first``."""
        return replace(self, source=self.source + np.int64(first), target=self.target + np.int64(first))


class RankGraph(Struct, frozen=True, eq=False):
    """The graph of one rank, on its own clock. Nodes are numbered: those of the host, then the starts of the device's work, then
    their ends. ``edges`` are all but those from one node of a thread to the next.
    """

    host: Slice = field(
        default_factory=lambda: Slice({name: np.empty(0, dtype) for name, dtype in _HOST_NODES.items()})
    )
    start_ns: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    end_ns: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    edges: Edges = field(default_factory=Edges)

    def __len__(self) -> int:
        return len(self.host) + 2 * len(self.start_ns)

    @property
    def time_ns(self) -> Int64:
        """The recorded time of each node."""
        return np.concatenate((self.host["time_ns"], self.start_ns, self.end_ns))

    @property
    def launches(self) -> tuple[Compact, Compact]:
        """(the host node at which work was launched, the number of that work), of all work of which that is known."""
        edges, num_host = self.edges, len(self.host)
        chosen = (edges.source < num_host) & (edges.target >= num_host) & (edges.target < num_host + len(self.start_ns))
        launched = edges.target[chosen]  # numbers in as few bytes as hold them, that of a host where there are any
        return edges.source[chosen], launched - num_host if len(launched) else launched

    def split(self, values: Int64) -> tuple[Int64, Int64, Int64]:
        """Values of all nodes as those of the host, of starts and of ends."""
        host, start, end = np.split(values, (len(self.host), len(self.host) + len(self.start_ns)))
        return host, start, end


def graph_of(events: Events, boundaries: Boundaries, times_ns: Int64, cost_ns: float = 0.0) -> RankGraph:
    """The graph of a rank.

    Args:
        boundaries: of its host events.
        times_ns: times at which boundaries are nodes, ascending: where its ops and calls of communication begin and end.
        cost_ns: of recording one host event, which that of other things is a part or a multiple of.
    """
    if not len(boundaries):
        return RankGraph()
    device = _Device.of(events, boundaries, cost_ns)
    work, call_end, call_lag, call_waited = _waits_for_device(events, boundaries, device, cost_ns)
    source, target, lag = _hand_overs(events, boundaries)
    fresh = ~np.isin(target, call_end)
    source, target, lag = source[fresh], target[fresh], lag[fresh]
    is_node, long = _are_at(boundaries, times_ns), boundaries.long_gaps()
    of_threads, launches = (boundaries.first[:-1], boundaries.first[1:] - 1), device.launch[device.launch >= 0]
    for rows in (*of_threads, long, long - 1, launches, source, target, target - 1, call_end, call_end - 1):
        is_node[rows] = True
    chosen = np.flatnonzero(is_node)

    def node_of(rows: Rows) -> Rows:
        return np.searchsorted(chosen, rows)

    starts = len(chosen) + np.arange(len(device))
    ends = starts + len(device)
    units = boundaries.after(source) + boundaries.before(target)
    waits = [Edges.of(node_of(source), node_of(target), lag, units), Edges.of(ends[work], node_of(call_end), call_lag)]
    before, behind = waits_between_streams(events, device.start, device.end, device.stream, device.launched_ns)
    gap = np.minimum(device.start[behind] - device.end[before], _STREAM_GAP_NS)
    waits.append(Edges.of(ends[before], starts[behind], gap))
    edges = Edges.joined([*device.edges(node_of(device.launch), starts, ends), *waits])
    waited, index = np.unique(np.concatenate((target, call_end[call_waited])), return_index=True)
    least = np.where(index < len(target), 0, _LEAST_CALL_NS)
    host = _host_nodes(boundaries, chosen, waited, np.minimum(least, boundaries.gaps_at(waited)))
    return RankGraph(host, device.start, device.end, edges)


def _are_at(boundaries: Boundaries, times_ns: Int64) -> Bool:
    """Mark the boundaries at one of some times, which ascend."""
    marked = np.zeros(len(boundaries), dtype=np.bool_)
    for block in boundaries.blocks() if len(times_ns) else ():
        times = boundaries.time_ns[block]
        marked[block] = times_ns[np.minimum(np.searchsorted(times_ns, times), len(times_ns) - 1)] == times
    return marked


def _host_nodes(boundaries: Boundaries, chosen: Rows, waited: Rows, least_ns: Int64) -> Slice:
    """The chosen boundaries as nodes; those that ``waited`` come at least ``least_ns`` after the boundary before them."""
    has_waited, sums = np.isin(chosen, waited), _sums_since_nodes(boundaries, chosen)
    sums["lag_ns"][has_waited] = least_ns
    threads = boundaries.threads[boundaries.threads_of(chosen)]
    columns = {"time_ns": boundaries.time_ns[chosen], "thread": threads, "waited": has_waited, **sums}
    return Slice({name: compact(column) for name, column in columns.items()})


def _sums_since_nodes(boundaries: Boundaries, chosen: Rows) -> dict[str, npt.NDArray[Any]]:
    """Sums over the boundaries from behind the chosen one before each of the chosen to itself, none at the first of a thread."""
    dtypes = {name: _HOST_NODES[name] for name in ("lag_ns", "events", "units", "overhead_ns", "room_ns")}
    sums: dict[str, npt.NDArray[Any]] = {name: np.zeros(len(chosen) + 1, dtype) for name, dtype in dtypes.items()}
    for block in boundaries.blocks():
        values = {
            "lag_ns": boundaries.gaps_ns(block),
            "events": ~boundaries.is_end[block],
            "units": boundaries.units(block),
            "overhead_ns": boundaries.overhead_ns(block),
            "room_ns": boundaries.room_ns(block),
        }
        low, high = np.searchsorted(chosen, (block.start, block.stop)).tolist()
        # Each part ends with a chosen one; the last part goes on in the next block.
        begins = np.concatenate(([0], chosen[low:high] + 1 - block.start))
        for name, column in values.items():
            padded = np.append(column, np.zeros(1, column.dtype))
            sums[name][low : high + 1] += np.add.reduceat(padded, begins, dtype=dtypes[name])
    begins = np.isin(chosen, boundaries.first[:-1])
    for column in sums.values():
        column[:-1][begins] = 0
    return {name: column[:-1] for name, column in sums.items()}


class _Device(Struct, frozen=True, eq=False):
    """The device work of a rank by start: ``rows`` of the events, launched by the ``calls`` (−1 where that was not recorded).

    ``launch`` is the boundary at which the call begins, −1 where nothing tells when the work was launched; recording took
    ``units_before`` and ``recording_ns`` of the time since then, and ``units`` of its length.
    """

    rows: Rows
    calls: Rows
    start: Int64
    end: Int64
    stream: Int64
    launch: Rows
    launched_ns: Int64
    units_before: Float
    recording_ns: Int64
    units: Float

    @classmethod
    def of(cls, events: Events, boundaries: Boundaries, cost_ns: float) -> _Device:
        rows = device_rows(events)
        calls = launch_calls(events, rows)
        launch = boundaries.of_events(calls, len(events), ends=False)
        launched = np.where(launch >= 0, boundaries.time_ns[launch], -1)
        start = events.start_ns[rows]
        late = launched > start  # clocks of host and device that differ: nothing starts before it is launched
        ends, stream = events.ends_of(rows), events.stream[rows]
        # Nodes of a graph that start while its launch goes on have waited for the recording of those before them alone.
        passed = np.clip((start - launched) / np.maximum(events.dur_ns[calls], 1), 0.0, 1.0)
        of_nodes = boundaries.nodes.of_events(calls)
        launch, launched = np.where(late, -1, launch), np.where(late, -1, launched)
        units = np.where(of_nodes > 0, _NODE_NS / max(cost_ns, 1.0), 0.0)
        units_before = of_nodes * passed
        recording_ns = np.rint(units_before * cost_ns).astype(np.int64)
        return cls(rows, calls, start, ends, stream, launch, launched, units_before, recording_ns, units)

    def __len__(self) -> int:
        return len(self.start)

    def edges(self, launch: Rows, starts: Int64, ends: Int64) -> list[Edges]:
        """The edges into the starts and ends of all work, and of its queue; ``launch`` are the nodes of the launching calls."""
        if not len(self):
            return []
        order = np.argsort(self.stream, kind="stable")
        same = np.flatnonzero(np.append(False, self.stream[order][1:] == self.stream[order][:-1]))
        before = np.full(len(self), -1, dtype=np.intp)  # the work before each on its stream
        before[order[same]] = order[same - 1]
        ended = np.where(before >= 0, self.end[before], 0)
        # The work of another stream that ended last before each start, where that is soon before it.
        order = np.argsort(self.end, kind="stable")
        last = np.searchsorted(self.end[order], self.start, side="right") - 1
        cause = np.where(last >= 0, order[np.maximum(last, 0)], -1)
        caused_ns = np.where(cause >= 0, self.start - self.end[cause], 0)
        may_cause = (
            (cause >= 0) & (self.stream[cause] != self.stream) & (caused_ns <= SOON_NS) & (self.end[cause] > ended)
        )
        launched = self.launch >= 0
        prepared_ns = self.launched_ns + self.recording_ns
        latency = np.where(launched, self.start - prepared_ns, 0)
        behind = np.where(before >= 0, self.start - ended, 0)  # negative where work of one stream overlaps
        idle = launched & ((before < 0) | (ended <= prepared_ns))
        least_latency = _low(latency[idle], _LATENCY_NS)
        least_gap = _low(behind[launched & ~idle & (behind >= 0) & (behind <= SOON_NS)], _STREAM_GAP_NS)
        by_launch = idle & (latency <= least_latency + SOON_NS)
        by_stream = ~idle & (before >= 0) & (behind <= least_gap + SOON_NS)
        by_other = ~by_launch & ~by_stream & may_cause
        by_launch |= idle & ~by_other
        by_stream |= ~by_launch & ~by_other
        follows, overlaps = (before >= 0) & (behind >= 0), (before >= 0) & (behind < 0)
        lag_of_launch = self.recording_ns + np.where(by_launch, latency, np.minimum(latency, least_latency))
        lag_of_stream = np.where(by_stream, behind, np.minimum(behind, least_gap))
        return [
            Edges.of(launch[launched], starts[launched], lag_of_launch[launched], self.units_before[launched]),
            Edges.of(ends[before[follows]], starts[follows], lag_of_stream[follows]),
            Edges.of(starts[before[overlaps]], starts[overlaps], (self.start - self.start[before])[overlaps]),
            Edges.of(ends[cause[by_other]], starts[by_other], caused_ns[by_other]),
            Edges.of(starts, ends, self.end - self.start, self.units),
            self._queue_edges(launch, ends),
        ]

    def _queue_edges(self, launch: Rows, ends: Int64) -> Edges:
        """A launch waits while the device has as many before it as it takes."""
        launched = np.flatnonzero(self.launch >= 0)
        launched = launched[np.argsort(self.launched_ns[launched], kind="stable")]
        first, later = launched[:-_QUEUE], launched[_QUEUE:]
        ahead = self.end[first] <= self.launched_ns[later]
        return Edges.of(ends[first[ahead]], launch[later[ahead]], 0)


def _low(values: Int64, default: int) -> int:
    """A low percentile of some times; the default where there are too few."""
    return int(np.percentile(values, _PERCENTILE)) if len(values) >= 5 else default


def _waits_for_device(
    events: Events, boundaries: Boundaries, device: _Device, cost_ns: float
) -> tuple[Rows, Rows, Int64, Bool]:
    """Calls that return when device work is over, by what synchronises, and others that lasted until work had ended: launches
    into a full queue, allocations: (the work, the boundary of their end, how long after the work that came, whether they had to
    wait).
    """
    if not len(device):
        return _NO_ROWS, _NO_ROWS, _NO_ROWS, np.empty(0, dtype=np.bool_)
    explicit = synchronising_calls(events, device.rows, device.calls)
    # A launch of a graph that is long because its nodes are recorded waits for nothing.
    long = np.flatnonzero((events.category == Category.RUNTIME) & (events.dur_ns >= LONG_NS // 2))
    long = long[events.dur_ns[long] - boundaries.nodes.of_events(long) * cost_ns >= LONG_NS // 2]
    rows = np.union1d(explicit, long).astype(np.intp)
    end = boundaries.of_events(rows, len(events), ends=True)
    leaf = (end > 0) & (boundaries.event[end - 1] == rows)
    rows, end = rows[leaf], end[leaf]
    order = np.argsort(device.end, kind="stable")
    last = np.searchsorted(device.end[order], boundaries.time_ns[end], side="right") - 1
    work = order[np.maximum(last, 0)]
    lag = boundaries.time_ns[end] - device.end[work]
    is_explicit = np.isin(rows, explicit)
    waited = (last >= 0) & (device.end[work] > events.start_ns[rows]) & (is_explicit | (lag <= SOON_NS))
    used = (last >= 0) & (waited | is_explicit)
    return work[used], end[used], np.where(waited, lag, 0)[used], waited[used]


_COMPUTES = re.compile(r"^(?:aten::|autograd::|.*Backward)")
"""Operators that compute: a thread inside one waits for no other thread."""
_MANY = 10
_HAND_OVER_NS, _WAKE_NS = 2_000_000, 200_000
_LATE_WAKE = 0.2
"""Part of the time that a thread was idle by which it may go on after what it waited for."""


def _hand_overs(events: Events, boundaries: Boundaries) -> tuple[Rows, Rows, Int64]:
    """Boundaries at which a thread went on when another one had done something: (that boundary of the other, this one, lag).

    A thread that has been idle and begins an event was woken by what another thread did last. The main thread waited if another
    one that was idle began and did a good deal in the meantime (the backward pass, on autograd's thread), or ended a long event
    (a receive, on a worker of gloo) just before.
    """
    if len(boundaries.threads) < 2:
        return _NO_ROWS, _NO_ROWS, _NO_ROWS
    time, begins_of_threads = boundaries.time_ns, boundaries.first[:-1]
    rows = np.union1d(boundaries.long_gaps(), begins_of_threads)
    other = _last_of_others(boundaries, rows)
    is_first = np.isin(rows, begins_of_threads)
    seen = (other >= 0) & (is_first | (time[other] > time[rows - 1]))
    rows, other, is_first = rows[seen], other[seen], is_first[seen]
    thread = boundaries.threads_of(rows)
    inside = ~is_first & boundaries.is_end[rows] & (boundaries.event[rows - 1] == boundaries.event[rows])
    counts = np.diff(boundaries.first)
    begins = np.where(counts >= counts.max() / 20, time[begins_of_threads], np.iinfo(np.int64).max)
    on_main = thread == np.argmin(begins)  # of those with a good part of the boundaries the first
    woken = ~on_main & ~boundaries.is_end[rows]
    lag = time[rows] - time[other]
    count, idle_before = _activity_since(boundaries, boundaries.threads_of(other), time[rows - 1], time[rows])
    # Late where threads wait for a core, or the one that goes on does something in Python first.
    late = _LATE_WAKE * boundaries.gaps_at(rows)
    did_much = idle_before & (count >= _MANY) & (lag <= np.maximum(_HAND_OVER_NS, late))
    woke_soon = lag <= np.maximum(_WAKE_NS, late)
    ended_long = boundaries.is_end[other] & (events.dur_ns[boundaries.event[other]] >= LONG_NS // 2) & woke_soon
    computes = inside & events.named(_COMPUTES)[events.name_id[boundaries.event[rows]]]
    waited = on_main & ~computes & ~is_first & (did_much | ended_long)
    used = woken | waited
    return other[used], rows[used], lag[used]


def _last_of_others(boundaries: Boundaries, rows: Rows) -> Rows:
    """The last boundary of another thread before each of some boundaries; −1 for none."""
    # One that its thread's next one follows before the next of these is the last one before none of them.
    times, may_be_last = np.unique(boundaries.time_ns[rows]), np.zeros(len(boundaries), dtype=np.bool_)
    for block in boundaries.blocks():
        until = boundaries.time_ns[block.start : block.stop + 1]
        for side in ("left", "right"):
            passed = np.searchsorted(times, until, side=side)
            may_be_last[block.start : block.start + len(passed) - 1] |= passed[1:] != passed[:-1]
    may_be_last[boundaries.first[1:] - 1] = may_be_last[rows] = True
    chosen = np.flatnonzero(may_be_last)
    order = np.argsort(boundaries.time_ns[chosen], kind="stable")
    thread, index = boundaries.threads_of(chosen[order]), np.arange(len(order))
    run = np.maximum.accumulate(np.where(np.concatenate(([True], thread[1:] != thread[:-1])), index, 0))
    last = np.empty(len(chosen), dtype=np.intp)
    last[order] = np.where(run > 0, chosen[order[run - 1]], -1)
    return last[np.searchsorted(chosen, rows)]


def _activity_since(boundaries: Boundaries, threads: Rows, began: Int64, until: Int64) -> tuple[Rows, Bool]:
    """(boundaries of these threads within these times; whether each had been idle when they began)."""
    count, idle = np.zeros(len(threads), dtype=np.intp), np.zeros(len(threads), dtype=np.bool_)
    for thread in np.unique(threads).tolist():
        chosen = threads == thread
        times = boundaries.time_ns[boundaries.first[thread] : boundaries.first[thread + 1]]
        low, high = np.searchsorted(times, began[chosen], side="right"), np.searchsorted(times, until[chosen])
        count[chosen] = high - low
        idle[chosen] = (low == 0) | (began[chosen] - times[np.maximum(low - 1, 0)] >= LONG_NS)
    return count, idle
