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

import numpy as np

from pptrace.intervals import EMPTY, Int64, earliest_from, find_interval, intersect, reduce_ranges, subtract, union
from pptrace.model.device import IdleTime, Rows, Synchronisations
from pptrace.model.traces import Bool, Category, Events
from pptrace.slices import last_like

SYNCHRONISES = re.compile(r"(?:Stream|Device|Event|Ctx|Context)Synchronize|Memcpy(?!\w*(?:Async|Batch))")
"""Runtime calls that return when device work is over."""
_COPIES_AT_ONCE = re.compile(r"Memcpy(?!\w*(?:Async|Batch))")
_PAGEABLE = re.compile(r"Pageable")
WAITS_ON_STREAM = re.compile(r"Stream(?:Wait(?:Event|Value)|BatchMemOp)")
LAUNCHES = re.compile(r"Launch(?!Host)")
_OPERATOR = re.compile(r"^\w+::")
"""Operators such as ``aten::item``, not ranges of steps, which old versions of Kineto list with them."""
_NEVER = np.iinfo(np.int64).max
_LONG_AGO = 1 << 60
"""Time before its first work for which a device counts as idle, ns: before any window."""

_PAUSE_NS = 1_000_000

NO_LAUNCHES = "the trace holds no runtime calls of CUDA or HIP, so that nothing tells when work was launched"


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
    busy_until = np.append(start[0] - _LONG_AGO, np.maximum.accumulate(end)[:-1])
    first = np.flatnonzero(start > busy_until)  # the work that ends each gap
    begins, ends = busy_until[first], start[first]
    launched = _launches_of_gaps(events, rows, calls, first, begins)
    known, is_late = launched != _NEVER, launched > begins
    is_launch = np.zeros(len(events), dtype=np.bool_)
    is_launch[calls[calls >= 0]] = True
    launches = np.flatnonzero(is_launch)
    followed_wait = np.zeros(len(first), dtype=np.bool_)
    late = np.flatnonzero(is_late & (launched < ends))
    followed_wait[late] = _follow_waits(events, launches, calls[first[late]])
    not_launched_until = np.clip(launched, begins, ends)
    starved_until = np.where(is_late & ~followed_wait, ends, not_launched_until)  # with the delivery of the launch
    synchronising = synchronising_calls(events, rows, calls)
    columns = np.stack([values[synchronising] for values in (events.start_ns, events.dur_ns, events.thread)])
    # Drivers and runtimes may both have a table of the same calls.
    synchronising = synchronising[(np.diff(columns, prepend=-1) != 0).any(axis=0)]
    by_launcher = np.isin(events.thread[synchronising], np.unique(events.thread[launches]))
    sync_start, sync_end = events.start_ns[synchronising], events.ends_of(synchronising)
    awaits = _await_communication(events, rows, communicates, synchronising) & by_launcher
    blocking = intersect(union(begins[known], not_launched_until[known]), union(sync_start[awaits], sync_end[awaits]))
    last = int(end.max())
    # What a rank launches after its recording is of no recorded step, which may end later on other ranks. Where a launch was
    # recorded later than that of any work, work is missing at the end, and nothing is known.
    lost = events.rows_named(LAUNCHES, Category.RUNTIME)
    ever_after, never = (last, last + _LONG_AGO), (last, last)
    starved_after, unknown_after = ever_after, never
    if len(lost) and lost[-1] > calls.max():
        starved_after, unknown_after = never, ever_after
    starved = _union_with(begins[known], starved_until[known], starved_after)
    gaps = (begins, np.where(known, starved_until, begins), ends)
    return IdleTime(
        launch_starved=subtract(starved, blocking),
        blocking=blocking,
        dependency=union(starved_until[known], ends[known]),
        unknown=_union_with(begins[~known], ends[~known], unknown_after),
        synchronisations=_synchronisations(events, synchronising, _long_calls(events, launches), launches, *gaps),
        between_operators=times_between_operators(events),
    )


def times_between_operators(events: Events) -> Int64 | None:
    """Times of a millisecond or more without an operator or a runtime call on any thread: less is the Python of a model."""
    is_operator = events.category == Category.CPU_OP
    if not is_operator.any():
        return None
    works = is_operator | (events.category == Category.RUNTIME)
    begins, latest = events.start_ns[works], events.dur_ns[works]  # in order of begins, as all events are
    latest += begins
    np.maximum.accumulate(latest, out=latest)
    pauses = np.flatnonzero(begins[1:] - latest[:-1] >= _PAUSE_NS)
    starts = np.concatenate((events.start_ns[:1], latest[pauses], latest[-1:]))
    ends = np.append(begins[np.append(0, pauses + 1)], events.end_ns.max())
    are_long = ends - starts >= _PAUSE_NS
    return np.stack((starts[are_long], ends[are_long]), axis=1)


def _union_with(starts: Int64, ends: Int64, more: tuple[int, int]) -> Int64:
    return union(np.append(starts, more[0]), np.append(ends, more[1]))


def _launches_of_gaps(events: Events, rows: Rows, calls: Rows, first: Rows, begins: Int64) -> Int64:
    """The time at which the work that ends each gap was launched, :data:`_NEVER` where that is not known: of work that starts
    at the same time that counts which was launched first.
    """
    start = events.start_ns[rows]
    launched = _launch_times(events, rows, calls)
    behind = np.searchsorted(start, start[first], side="right")
    earliest = reduce_ranges(np.minimum, launched, first, behind)
    num_unknown = np.cumsum(np.append(0, launched == _NEVER))
    uncertain = (num_unknown[behind] > num_unknown[first]) & (earliest > begins)
    if uncertain.any():
        latest = _launched_by(events, rows, calls, launched, first[uncertain])
        earliest[uncertain] = np.where(latest <= begins[uncertain], latest, _NEVER)
    graphs = _graph_spans(calls, start, events.ends_of(rows))
    return np.where(find_interval(graphs[:, 0], graphs[:, 1], begins, start[first]) >= 0, begins, earliest)


def _graph_spans(calls: Rows, start: Int64, end: Int64) -> Int64:
    """Times from the first node to the last one of every CUDA graph that ran, as a set of intervals.

    A launch with a single piece of work is no graph. What the device does not do inside a graph is due to the graph: all of it
    had been launched, and its nodes wait for each other.
    """
    order = np.argsort(calls, kind="stable")
    order = order[np.searchsorted(calls[order], 0) :]
    first = np.flatnonzero(np.diff(calls[order], prepend=-1))
    behind = np.append(first[1:], len(order))
    several = behind - first > 1
    if not several.any():
        return EMPTY
    low, high = first[several], behind[several]
    return union(reduce_ranges(np.minimum, start[order], low, high), reduce_ranges(np.maximum, end[order], low, high))


def _launch_times(events: Events, rows: Rows, calls: Rows) -> Int64:
    """Times at which each work was launched; :data:`_NEVER` where its call was not recorded."""
    start, begun = events.start_ns[rows], events.start_ns[calls]
    at_once = events.named(_COPIES_AT_ONCE)[events.name_id[calls]] | _are_pageable(events, rows)
    launched = np.where(at_once, begun, np.minimum(begun + events.dur_ns[calls], start))
    order = np.argsort(calls, kind="stable")
    again = np.flatnonzero(calls[order][1:] == calls[order][:-1]) + 1
    if len(again):  # a graph: its later nodes were launched with the first
        leaders = np.arange(len(order))
        leaders[again] = 0
        leaders = np.maximum.accumulate(leaders)
        launched[order] = np.minimum(launched[order], start[order[leaders]])
    return np.where(calls >= 0, launched, _NEVER)


def _are_pageable(events: Events, rows: Rows) -> Bool:
    """Mark the copies from or to pageable memory, whose calls return when they are over."""
    pageable: Bool = (events.category[rows] == Category.MEMCPY) & events.named(_PAGEABLE)[events.name_id[rows]]
    return pageable


def _launched_by(events: Events, rows: Rows, calls: Rows, launched: Int64, chosen: Rows) -> Int64:
    """Times by which the chosen work, whose launch is not known, was launched: before what its stream ran after it, and before
    the recorded calls with larger correlation ids, which count the calls of a process. Where no smaller one was recorded, it
    was launched before the recording.
    """
    stream, by_stream = events.stream[rows], np.empty(len(chosen), dtype=np.int64)
    for number in np.unique(stream[chosen]).tolist():
        of_stream, on_stream = np.flatnonzero(stream == number), stream[chosen] == number
        by_stream[on_stream] = earliest_from(launched[of_stream])[np.searchsorted(of_stream, chosen[on_stream])]
    recorded = np.unique(calls[calls >= 0])
    recorded = recorded[np.argsort(events.correlation[recorded], kind="stable")]
    number = events.correlation[rows[chosen]]
    index = np.searchsorted(events.correlation[recorded], number)
    by_number = np.where(index == 0, events.start_ns[rows[0]], earliest_from(events.start_ns[recorded])[index])
    return np.minimum(by_stream, np.where(number >= 0, by_number, _NEVER))


def _follow_waits(events: Events, launches: Rows, chosen: Rows) -> Bool:
    """Mark the chosen of all launches that follow a wait for an event that their thread issued after its launch before them."""
    waits = events.rows_named(WAITS_ON_STREAM, Category.RUNTIME)
    result = np.zeros(len(chosen), dtype=np.bool_)
    for thread in np.unique(events.thread[chosen]).tolist() if len(waits) else ():
        on_thread = events.thread[chosen] == thread
        of_thread = launches[events.thread[launches] == thread]
        wait_rows = waits[events.thread[waits] == thread]
        index = np.searchsorted(of_thread, chosen[on_thread])  # rows of events are in order of time
        before = np.where(index > 0, of_thread[np.maximum(index - 1, 0)], -1)
        result[on_thread] = np.searchsorted(wait_rows, chosen[on_thread]) > np.searchsorted(wait_rows, before)
    return result


def synchronising_calls(events: Events, rows: Rows, calls: Rows) -> Rows:
    """The calls that return when device work is over: those that synchronise, and those that copy pageable memory.

    Args:
        rows, calls: device work and the call that launched each, −1 for none.
    """
    copying = calls[_are_pageable(events, rows) & (calls >= 0)]
    return np.union1d(events.rows_named(SYNCHRONISES, Category.RUNTIME), copying).astype(np.intp)


def _await_communication(events: Events, rows: Rows, communicates: Bool, calls: Rows) -> Bool:
    """Mark the calls that returned when communication was over: of the work that ended before they returned, it was the last."""
    result = np.zeros(len(calls), dtype=np.bool_)
    # The stream that each call waited for, where the profiler recorded that.
    synchronised = np.full(len(calls), -1, dtype=np.int64)
    records = np.flatnonzero((events.category == Category.DEVICE_SYNC) & (events.correlation >= 0))
    record = last_like([events.correlation[calls]], [events.correlation[records[::-1]]])
    synchronised[record >= 0] = events.stream[records[::-1][record[record >= 0]]]
    ends, streams = events.ends_of(rows), events.stream[rows]
    for stream in np.unique(synchronised).tolist():
        of_stream = np.flatnonzero(synchronised == stream)
        work = np.flatnonzero(streams == stream) if stream >= 0 else np.arange(len(ends))
        if not len(work):
            continue
        work = work[np.argsort(ends[work], kind="stable")]
        last = np.searchsorted(ends[work], events.ends_of(calls[of_stream]), side="right") - 1
        awaited = work[np.maximum(last, 0)]
        result[of_stream] = (last >= 0) & communicates[awaited] & (ends[awaited] > events.start_ns[calls[of_stream]])
    return result


_FAR_LONGER, _FEW = 30, 3


def _long_calls(events: Events, launches: Rows) -> Rows:
    """Calls of a millisecond or more that last tens of times as long as the launches of their name, or as all launches where
    hardly any is of that name: at first use modules are loaded, memory is allocated.
    """
    rows = np.flatnonzero((events.category == Category.RUNTIME) & (events.dur_ns >= _PAUSE_NS))
    usual = np.full(len(events.names), np.median(events.dur_ns[launches]))
    for name in np.unique(events.name_id[rows]).tolist():
        same = launches[events.name_id[launches] == name]
        usual[name] = np.median(events.dur_ns[same]) if len(same) >= _FEW else usual[name]
    return rows[events.dur_ns[rows] >= _FAR_LONGER * usual[events.name_id[rows]]]


def _synchronisations(
    events: Events, waiting: Rows, long: Rows, launches: Rows, gap_start: Int64, gap_until: Int64, gap_end: Int64
) -> Synchronisations:
    """The calls with the idle time that each caused: the gap in which it returned, if that began during the call. Of those that
    are long, and wait for nothing, those alone that have such, from when they began.
    """
    calls = np.union1d(waiting, long)
    start, end, waits = events.start_ns[calls], events.ends_of(calls), np.isin(calls, waiting)
    index = find_interval(gap_start, gap_end, end, end)
    begin, until = (np.append(times, 0)[index] for times in (gap_start, gap_until))
    begin = np.where(waits, begin, np.maximum(begin, start))
    by_launcher = np.isin(events.thread[calls], np.unique(events.thread[launches]))
    has_gap = (index >= 0) & by_launcher & (begin >= start) & (until > begin)
    having = np.flatnonzero(has_gap)[::-1]
    has_gap[having] = False
    has_gap[having[np.unique(index[having], return_index=True)[1]]] = True  # of nested calls the innermost
    name, names = _call_names(events, calls[kept := waits | has_gap])
    drained = np.where(has_gap, begin, end)[kept], np.where(has_gap, until, end)[kept]
    return Synchronisations(start[kept], end[kept], name, *drained, names)


def _call_names(events: Events, calls: Rows) -> tuple[Int64, tuple[tuple[str, str], ...]]:
    """(for each call the index of its name, the names): (the call, the outermost operator around it)."""
    operator = np.full(len(calls), -1, dtype=np.int64)
    operators = events.rows_named(_OPERATOR, Category.CPU_OP) if len(calls) else calls
    for thread, on_thread in events.rows_by_thread(operators).items():
        chosen = np.flatnonzero(events.thread[calls] == thread)
        times = events.start_ns[calls[chosen]], events.ends_of(calls[chosen])
        around = events.intervals_of(on_thread).outermost(*times)
        operator[chosen] = np.where(around >= 0, events.name_id[on_thread[around]], -1)
    pairs = np.stack((events.name_id[calls].astype(np.int64), operator), axis=1)
    distinct, name = np.unique(pairs, axis=0, return_inverse=True)
    names = tuple((events.names[call], events.names[op] if op >= 0 else "") for call, op in distinct.tolist())
    return name.reshape(-1).astype(np.int64), names
