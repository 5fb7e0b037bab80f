"""The events of a trace as they would have been without their recording."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from pptrace.intervals import Int64
from pptrace.model.traces import Category, Events, Trace
from pptrace.recognise.device.work import device_rows
from pptrace.recognise.recording.boundaries import Boundaries, Float, Rows
from pptrace.recognise.recording.graph import RankGraph


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """Times of the nodes of a rank's graph without the recording, on the rank's own clock.

    ``cost_ns`` was taken out for each event. Host nodes are a ``thread``, the recorded ``time_ns`` and ``comes_ns``, by thread
    and time; ``start_ns`` and ``end_ns`` are of the device's work, in its order.
    """

    cost_ns: float
    thread: Int64
    time_ns: Int64
    comes_ns: Int64
    start_ns: Int64
    end_ns: Int64

    @classmethod
    def of(cls, graph: RankGraph, comes_ns: Int64, cost_ns: float) -> Correction:
        host, start, end = graph.split(comes_ns)
        return cls(cost_ns, graph.host.thread, graph.host.time_ns, host, start, end)


@dataclass(frozen=True, slots=True)
class Corrections:
    """Corrections by the file and the rank that it names; traces of others stay as they are."""

    by_trace: Mapping[tuple[str, int | None], Correction]

    @property
    def digest(self) -> str:
        """A text that only these corrections have."""
        digest = hashlib.sha256()
        for (_, rank), correction in sorted(self.by_trace.items(), key=str):
            digest.update(f"{rank} {correction.cost_ns}".encode())
            for item in fields(correction)[1:]:
                digest.update(np.ascontiguousarray(getattr(correction, item.name)).tobytes())
        return digest.hexdigest()

    def corrected(self, trace: Trace) -> Trace:
        """The trace as it would have been without its recording."""
        correction = self.by_trace.get((trace.path, trace.rank))
        return trace if correction is None else corrected(trace, correction)


def corrected(trace: Trace, correction: Correction) -> Trace:
    """The trace with all times as they would have been without the recording."""
    events = trace.events
    boundaries = Boundaries.of(events)
    comes = _boundaries_come(boundaries, correction)
    start, end, work = events.start_ns.copy(), events.end_ns, device_rows(events)
    for times, chosen in ((start, ~boundaries.is_end), (end, boundaries.is_end)):
        times[boundaries.event[chosen]] = comes[chosen]
    start[work], end[work] = correction.start_ns, correction.end_ns
    is_other = np.ones(len(events), dtype=np.bool_)
    is_other[boundaries.event] = is_other[work] = False
    others = _Others(events, boundaries, comes, start, end)
    for rows, clock in others.rows_with_clocks(np.flatnonzero(is_other)):
        start[rows], end[rows] = _moved(events.start_ns[rows], *clock), _moved(events.ends_of(rows), *clock)
    memory = trace.memory.assign(t_ns=others.on_main_thread(trace.memory["t_ns"].to_numpy()))
    return replace(trace, events=_with_times(events, start, end), memory=memory)


def _boundaries_come(boundaries: Boundaries, correction: Correction) -> Int64:
    """The time of each boundary: between two nodes, recording is taken from where it lies, the rest from all gaps alike."""
    node, num_nodes = _node_before(boundaries, correction), len(correction.time_ns)
    is_node = boundaries.time_ns == correction.time_ns[node]
    stretch = np.concatenate((node[:1], node[:-1]))  # the node before each gap; the first gap of a thread is empty
    removed = np.append(np.diff(correction.time_ns - correction.comes_ns), 0).astype(np.float64)
    removed = np.maximum(removed, 0.0)
    gaps = boundaries.gaps_ns
    recording = np.minimum(boundaries.units * correction.cost_ns + boundaries.overhead_ns, boundaries.room_ns)
    parts: tuple[Float, Float] = (recording.astype(np.float64), (gaps - recording).astype(np.float64))
    of_stretch = [np.bincount(stretch, part, num_nodes).astype(np.float64) for part in parts]
    from_recording = np.minimum(removed, of_stretch[0])
    shares = [_ratio(from_recording, of_stretch[0]), _ratio(removed - from_recording, of_stretch[1])]
    total = np.cumsum(gaps - parts[0] * shares[0][stretch] - parts[1] * shares[1][stretch])
    last_node = np.maximum.accumulate(np.where(is_node, np.arange(len(boundaries)), 0))
    comes: Int64 = correction.comes_ns[node] + np.rint(total - total[last_node]).astype(np.int64)
    return comes


def _node_before(boundaries: Boundaries, correction: Correction) -> Rows:
    """The last node of its thread that each boundary does not come before."""
    node = np.empty(len(boundaries), dtype=np.intp)
    for thread, low, high in zip(boundaries.threads, boundaries.first[:-1], boundaries.first[1:], strict=True):
        first, last = np.searchsorted(correction.thread, (thread, thread + 1))
        times = correction.time_ns[first:last]
        node[low:high] = first + np.searchsorted(times, boundaries.time_ns[low:high], side="right") - 1
    return node


def _ratio(part: Float, total: Float) -> Float:
    ratio: Float = np.divide(part, total, out=np.zeros_like(part), where=total > 0)
    return ratio


def _moved(times: Int64, recorded: Int64, comes: Int64) -> Int64:
    """Move times as the recorded times around them moved, which are in order; those beyond their ends as the last ones."""
    if not len(recorded):
        return times
    moves = np.interp(
        (times - recorded[0]).astype(np.float64), (recorded - recorded[0]).astype(np.float64), comes - recorded
    )
    moved: Int64 = times + np.rint(moves).astype(np.int64)
    return moved


class _Others:
    """Moves what is neither an event of a thread's boundaries nor work of a device, along its thread or stream."""

    def __init__(self, events: Events, boundaries: Boundaries, comes: Int64, start: Int64, end: Int64) -> None:
        self._threads = {
            thread: (boundaries.time_ns[low:high], comes[low:high])
            for thread, low, high in zip(
                boundaries.threads.tolist(), boundaries.first[:-1], boundaries.first[1:], strict=True
            )
        }
        self._main = max(self._threads.values(), key=lambda pair: len(pair[0]))
        self._events, self._work, self._new = events, device_rows(events), (start, end)

    def on_main_thread(self, times: Int64) -> Int64:
        """Times of events that name no thread."""
        return _moved(times, *self._main)

    def rows_with_clocks(self, rows: Rows) -> Iterator[tuple[Rows, tuple[Int64, Int64]]]:
        """(rows, the recorded and the new times of their thread or stream)."""
        events = self._events
        on_device = events.category[rows] >= Category.HOST_LIMIT
        for thread, of_thread in events.rows_by_thread(rows[~on_device]).items():
            yield of_thread, self._threads.get(thread, self._main)
        streams = events.stream[rows[on_device]]
        for stream in np.unique(streams).tolist():
            yield rows[on_device][streams == stream], self._clock_of(stream)

    def _clock_of(self, stream: int) -> tuple[Int64, Int64]:
        work = self._work[self._events.stream[self._work] == stream]
        if not len(work):
            return self._main
        recorded = np.concatenate((self._events.start_ns[work], self._events.ends_of(work)))
        order = np.argsort(recorded, kind="stable")
        return recorded[order], np.concatenate([times[work] for times in self._new])[order]


def _with_times(events: Events, start: Int64, end: Int64) -> Events:
    """The events at other times, in order of start, longer ones first among equals."""
    duration = np.maximum(end - start, 0)
    order = np.lexsort((-duration, start))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    columns = {
        name: getattr(events, name)[order]
        for name in ("category", "name_id", "device", "stream", "thread", "correlation")
    }
    comm_args = events.comm_args.assign(event=place[events.comm_args["event"].to_numpy()])
    return replace(events, start_ns=start[order], dur_ns=duration[order], comm_args=comm_args, **columns)
