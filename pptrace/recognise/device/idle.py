"""Idle time of a rank's device by cause: by the launch of the work that ended each idle time.

The device is idle while none of its kernels, copies and fills runs. Each idle time ends with some work, its *next work*:

    |-- launch-starved or blocking --|------ dependency ------|
    idle                             launched                 next work

The next work counts as launched when the host call with its correlation id has returned, or when it starts, if that is
earlier; of a call that returns only when its work is over (a copy without ``Async``, or from pageable memory) when the call
begins, and of a graph when its first node starts; idle time between two nodes of a graph is that of the graph, which had been
launched, whatever ends it. Before that the idle time is *launch-starved* or, where a thread that launches sat in a call that
waited for communication, *blocking*. After that it is *dependency*; but all earlier work of the device is over, so that work that
was launched into an idle device without a wait for an event before it has nothing to wait for but its own launch: that is
launch-starved to its start.

Work whose launch was not recorded leaves its idle time unknown, unless something shows that it had been launched when the device
went idle: later work of its stream had been (a stream runs its work in the order of launches), or a larger correlation id (they
count the calls of a process), or its own id is smaller than that of any recorded call: it was launched before the recording.

Sources: CUPTI joins a runtime call and its work by ``correlationId`` (CUpti_ActivityAPI, CUpti_ActivityKernel); Kineto writes
that as ``correlation``. HolisticTraceAnalysis (``hta/analyzers/breakdown_analysis.py``) calls the whole gap of a stream *host
wait* where the launching call began after the work before it had ended; here the gap is the whole device's, and is cut at the
launch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pptrace.intervals import Int64, NestedIntervals, intersect, reduce_ranges, subtract, union
from pptrace.model.device import Rows
from pptrace.model.device_idle import IdleTime, Synchronisations
from pptrace.model.traces import Category, Events
from pptrace.recognise.device.graphs import graph_spans, inside

Bool = npt.NDArray[np.bool_]

SYNCHRONISES = re.compile(r"(?:Stream|Device|Event|Ctx|Context)Synchronize|Memcpy(?!\w*(?:Async|Batch))")
"""Runtime calls that return when device work is over."""
_COPIES_AT_ONCE = re.compile(r"Memcpy(?!\w*(?:Async|Batch))")
PAGEABLE = re.compile(r"Pageable")
_WAITS_ON_STREAM = re.compile(r"Stream(?:Wait(?:Event|Value)|BatchMemOp)")
_LAUNCHES = re.compile(r"Launch(?!Host)")
_OPERATOR = re.compile(r"^\w+::")
"""Operators such as ``aten::item``, not ranges of steps, which old versions of Kineto list with them."""
_NEVER = np.iinfo(np.int64).max
_LONG_AGO = 1 << 60
"""Time before its first work for which a device counts as idle, ns: before any window."""

NO_LAUNCHES = "the trace holds no CUDA runtime calls, so that nothing tells when work was launched"


@dataclass(frozen=True, slots=True, eq=False)
class _Gaps:
    """Idle times of a device in order, each before the work ``row``; ``launched_ns`` is when that work was launched,
    :data:`_NEVER` where that is not known. ``behind_wait``: its launch followed a wait for an event.
    """

    start: Int64
    end: Int64
    row: Rows
    launched_ns: Int64
    behind_wait: Bool

    @property
    def is_known(self) -> Bool:
        known: Bool = self.launched_ns != _NEVER
        return known

    @property
    def not_launched_until(self) -> Int64:
        """Times until which the host had not launched the next work; the start where it had at once."""
        return np.clip(self.launched_ns, self.start, self.end)

    @property
    def starved_until(self) -> Int64:
        """The same with the delivery of a launch that had nothing to wait for."""
        is_delivery = (self.launched_ns > self.start) & ~self.behind_wait
        return np.where(is_delivery, self.end, self.not_launched_until)


def idle_time(events: Events, rows: Rows, calls: Rows, communicates: Bool) -> IdleTime:
    """The idle time of a rank.

    Args:
        rows: its device work, by start.
        calls: the host call that launched each of them, −1 where it was not recorded.
        communicates: which of them are communication.
    """
    if not len(rows):
        return IdleTime()
    if not (calls >= 0).any():
        return IdleTime(reason=NO_LAUNCHES)
    start, end = events.start_ns[rows], events.ends_of(rows)
    gaps = _gaps(events, rows, calls, start, end)
    known, launched, starved_until = gaps.is_known, gaps.not_launched_until, gaps.starved_until
    syncs = _SyncCalls.of(events, rows, calls)
    for_communication = syncs.awaits(end, events.stream[rows], communicates) & syncs.by_launcher
    waiting = union(syncs.start[for_communication], syncs.end[for_communication])
    blocking = intersect(union(gaps.start[known], launched[known]), waiting)
    starved = union(gaps.start[known], starved_until[known])
    tail, after = _after_last(events, calls, int(end.max()))
    return IdleTime(
        launch_starved=subtract(union(*_with(starved, tail)), blocking),
        blocking=blocking,
        dependency=union(starved_until[known], gaps.end[known]),
        unknown=union(*_with(union(gaps.start[~known], gaps.end[~known]), after)),
        synchronisations=syncs.with_drained(gaps, np.where(known, starved_until, gaps.start)),
    )


def _with(intervals: Int64, more: tuple[int, int]) -> tuple[Int64, Int64]:
    rows = np.concatenate((intervals, np.array([more], dtype=np.int64)))
    return rows[:, 0], rows[:, 1]


def _gaps(events: Events, rows: Rows, calls: Rows, start: Int64, end: Int64) -> _Gaps:
    """The idle times before work; of work that starts at the same time, that counts which was launched first."""
    busy_until = np.concatenate(([start[0] - _LONG_AGO], np.maximum.accumulate(end)[:-1]))
    first = np.flatnonzero(start > busy_until)
    begins = busy_until[first]
    launched = _launch_times(events, rows, calls, start)
    last = np.searchsorted(start, start[first], side="right")
    earliest = reduce_ranges(np.minimum, launched, first, last)
    unknown = np.cumsum(np.concatenate(([0], launched == _NEVER)))
    lacks = unknown[last] > unknown[first]
    uncertain = lacks & (earliest > begins)
    if uncertain.any():
        earliest = earliest.copy()
        chosen = first[uncertain]
        latest = np.minimum(
            _latest_by_stream(events.stream[rows], launched, chosen), _latest_by_number(events, rows, calls, chosen)
        )
        earliest[uncertain] = np.where(latest <= begins[uncertain], latest, _NEVER)
    behind_wait = np.zeros(len(first), dtype=np.bool_)
    earliest = np.where(inside(graph_spans(calls, start, end), begins, start[first]), begins, earliest)
    late = np.flatnonzero((earliest > begins) & (earliest != _NEVER) & (earliest < start[first]))
    behind_wait[late] = _follow_waits(events, calls, calls[first[late]])
    return _Gaps(begins, start[first], first, earliest, behind_wait)


def _launch_times(events: Events, rows: Rows, calls: Rows, start: Int64) -> Int64:
    """Times at which each work was launched; :data:`_NEVER` where its call was not recorded."""
    has_call = calls >= 0
    begun = events.start_ns[calls]
    launched = begun + events.dur_ns[calls]
    at_once = named(events, _COPIES_AT_ONCE)[events.name_id[calls]]
    copies = events.category[rows] == Category.MEMCPY
    at_once |= copies & named(events, PAGEABLE)[events.name_id[rows]]
    launched = np.where(at_once, begun, np.minimum(launched, start))
    order = np.argsort(calls, kind="stable")
    again = np.flatnonzero(calls[order][1:] == calls[order][:-1]) + 1
    if len(again):  # a graph: its later nodes were launched with the first
        leaders = np.arange(len(order))
        leaders[again] = 0
        leaders = np.maximum.accumulate(leaders)
        launched[order] = np.minimum(launched[order], start[order[leaders]])
    return np.where(has_call, launched, _NEVER)


def _latest_by_stream(stream: Int64, launched: Int64, chosen: Rows) -> Int64:
    """Times by which the chosen work, whose launch is not known, was launched: before what its stream ran after it."""
    latest = np.full(len(chosen), _NEVER, dtype=np.int64)
    for number in np.unique(stream[chosen]).tolist():
        of_stream, on_stream = np.flatnonzero(stream == number), stream[chosen] == number
        earliest_after = np.minimum.accumulate(launched[of_stream][::-1])[::-1]
        latest[on_stream] = earliest_after[np.searchsorted(of_stream, chosen[on_stream])]
    return latest


def _latest_by_number(events: Events, rows: Rows, calls: Rows, chosen: Rows) -> Int64:
    """The same by correlation ids, which count the calls of a process: before the recorded calls with larger ones.

    Where no smaller one was recorded, the call was before the recording.
    """
    recorded = np.unique(calls[calls >= 0])
    numbers = events.correlation[recorded]
    order = np.argsort(numbers, kind="stable")
    numbers, starts = numbers[order], events.start_ns[recorded[order]]
    earliest_after = np.append(np.minimum.accumulate(starts[::-1])[::-1], _NEVER)
    wanted = events.correlation[rows[chosen]]
    index = np.searchsorted(numbers, wanted)
    latest = np.where(index == 0, events.start_ns[rows[0]], earliest_after[index])
    return np.where(wanted >= 0, latest, _NEVER)


def _follow_waits(events: Events, calls: Rows, chosen: Rows) -> Bool:
    """Mask of the chosen launches that follow a wait for an event that their thread issued after its launch before them."""
    waits = runtime_rows(events, _WAITS_ON_STREAM)
    result = np.zeros(len(chosen), dtype=np.bool_)
    if not len(waits):
        return result
    launches = np.unique(calls[calls >= 0])
    for thread in np.unique(events.thread[chosen]).tolist():
        on_thread = events.thread[chosen] == thread
        of_thread = launches[events.thread[launches] == thread]
        wait_rows = waits[events.thread[waits] == thread]
        index = np.searchsorted(of_thread, chosen[on_thread])  # rows of events are in order of time
        before = np.where(index > 0, of_thread[np.maximum(index - 1, 0)], -1)
        result[on_thread] = np.searchsorted(wait_rows, chosen[on_thread]) > np.searchsorted(wait_rows, before)
    return result


def _after_last(events: Events, calls: Rows, last_end: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(idle time after all work in which nothing was launched, the time after it of which nothing is known).

    Nothing was launched to the end of the recording, nor after it: what a rank launches after its recording is of no recorded
    step, which may end later on other ranks. Where a launch was recorded later than that of any work, work is missing at the
    end, and nothing is known.
    """
    ever_after = (last_end, last_end + _LONG_AGO)
    lost = runtime_rows(events, _LAUNCHES)
    if len(lost) and lost[-1] > calls.max():
        return (last_end, last_end), ever_after
    return ever_after, (last_end, last_end)


def named(events: Events, pattern: re.Pattern[str]) -> Bool:
    """For each name of the events whether it has the pattern."""
    return np.array([bool(pattern.search(name)) for name in events.names], dtype=np.bool_)


def runtime_rows(events: Events, pattern: re.Pattern[str]) -> Rows:
    """The runtime and driver calls whose name has the pattern."""
    has_pattern = named(events, pattern)
    if not has_pattern.any():
        return np.empty(0, dtype=np.intp)
    return np.flatnonzero((events.category == Category.RUNTIME) & has_pattern[events.name_id])


@dataclass(frozen=True, slots=True, eq=False)
class _SyncCalls:
    """Synchronising calls; ``stream`` is the one that a call waited for, −1 for any or where it was not recorded."""

    start: Int64
    end: Int64
    stream: Int64
    by_launcher: Bool
    name: Int64
    names: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, events: Events, rows: Rows, calls: Rows) -> _SyncCalls:
        sync_rows = runtime_rows(events, SYNCHRONISES)
        pageable = (events.category[rows] == Category.MEMCPY) & named(events, PAGEABLE)[events.name_id[rows]]
        sync_rows = _distinct(events, np.union1d(sync_rows, calls[pageable & (calls >= 0)]).astype(np.intp))
        launchers = np.unique(events.thread[calls[calls >= 0]])
        name, names = _call_names(events, sync_rows)
        return cls(
            events.start_ns[sync_rows],
            events.ends_of(sync_rows),
            _synchronised_streams(events, sync_rows),
            np.isin(events.thread[sync_rows], launchers),
            name,
            names,
        )

    def awaits(self, ends: Int64, streams: Int64, chosen: Bool) -> Bool:
        """Mask of the calls that returned when ``chosen`` work was over: of what ended before they returned, it was the last."""
        result = np.zeros(len(self.start), dtype=np.bool_)
        for stream in np.unique(self.stream).tolist():
            of_stream = np.flatnonzero(self.stream == stream)
            work = np.flatnonzero(streams == stream) if stream >= 0 else np.arange(len(ends))
            if not len(work):
                continue
            work = work[np.argsort(ends[work], kind="stable")]
            last = np.searchsorted(ends[work], self.end[of_stream], side="right") - 1
            awaited = work[np.maximum(last, 0)]
            result[of_stream] = (last >= 0) & chosen[awaited] & (ends[awaited] > self.start[of_stream])
        return result

    def with_drained(self, gaps: _Gaps, until: Int64) -> Synchronisations:
        """The calls with the idle time that each caused: the gap in which it returned, if that began during the call."""
        index = np.searchsorted(gaps.start, self.end, side="right") - 1
        has_gap = (index >= 0) & self.by_launcher
        index = np.maximum(index, 0)
        begin, stop = (gaps.start[index], until[index]) if len(gaps.start) else (self.end, self.end)
        has_gap &= (begin >= self.start) & (self.end <= gaps.end[index]) & (stop > begin)
        having = np.flatnonzero(has_gap)[::-1]
        has_gap[having] = False
        has_gap[having[np.unique(index[having], return_index=True)[1]]] = True  # of nested calls the innermost
        return Synchronisations(
            self.start,
            self.end,
            self.name,
            np.where(has_gap, begin, self.end),
            np.where(has_gap, stop, self.end),
            self.names,
        )


def _distinct(events: Events, calls: Rows) -> Rows:
    """The calls, without those that a driver and a runtime table both have."""
    columns = np.stack((events.start_ns[calls], events.dur_ns[calls], events.thread[calls]))
    if len(calls) < 2:
        return calls
    again = (columns[:, 1:] == columns[:, :-1]).all(axis=0)
    return calls[np.concatenate(([True], ~again))]


def _synchronised_streams(events: Events, calls: Rows) -> Int64:
    """The stream that each call waited for, where the profiler recorded that; else −1."""
    records = np.flatnonzero((events.category == Category.DEVICE_SYNC) & (events.correlation >= 0))
    streams = np.full(len(calls), -1, dtype=np.int64)
    if not len(records) or not len(calls):
        return streams
    records = records[np.argsort(events.correlation[records], kind="stable")]
    known, wanted = events.correlation[records], events.correlation[calls]
    index = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where((known[index] == wanted) & (wanted >= 0), events.stream[records[index]], streams)


def _call_names(events: Events, calls: Rows) -> tuple[Int64, tuple[tuple[str, str], ...]]:
    """(for each call the index of its name, the names): (the call, the outermost operator around it)."""
    operator = np.full(len(calls), -1, dtype=np.int64)
    operators = np.empty(0, dtype=np.intp)
    if len(calls):
        operators = np.flatnonzero((events.category == Category.CPU_OP) & named(events, _OPERATOR)[events.name_id])
    for thread, on_thread in events.rows_by_thread(operators).items() if len(operators) else ():
        chosen = np.flatnonzero(events.thread[calls] == thread)
        if len(chosen):
            around = NestedIntervals(events.start_ns[on_thread], events.ends_of(on_thread)).outermost(
                events.start_ns[calls[chosen]], events.ends_of(calls[chosen])
            )
            operator[chosen] = np.where(around >= 0, events.name_id[on_thread[np.maximum(around, 0)]], -1)
    pairs = np.stack((events.name_id[calls].astype(np.int64), operator), axis=1)
    distinct, name = np.unique(pairs, axis=0, return_inverse=True)
    names = tuple((events.names[call], events.names[op] if op >= 0 else "") for call, op in distinct.tolist())
    return name.reshape(-1).astype(np.int64), names
