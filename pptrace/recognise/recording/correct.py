"""The events of a trace as they would have been without their recording."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np

from pptrace.intervals import Int64
from pptrace.model.traces import Category, Trace
from pptrace.recognise.device.work import device_rows
from pptrace.recognise.recording.boundaries import Boundaries, Float
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
        return cls(cost_ns, graph.host["thread"], graph.host["time_ns"], host, start, end)


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
    # What is neither an event of a thread's boundaries nor work of a device moves along its thread or stream.
    is_other = np.ones(len(events), dtype=np.bool_)
    is_other[boundaries.event] = is_other[work] = False
    others = np.flatnonzero(is_other)
    on_device = events.category[others] >= Category.HOST_LIMIT
    bounds = zip(boundaries.first[:-1], boundaries.first[1:], strict=True)
    clocks = [(boundaries.time_ns[low:high], comes[low:high]) for low, high in bounds]
    of_thread, main = dict(zip(boundaries.threads.tolist(), clocks, strict=True)), max(clocks, key=lambda c: len(c[0]))
    moves = [(rows, of_thread.get(thread, main)) for thread, rows in events.rows_by_thread(others[~on_device]).items()]
    streams = events.stream[others[on_device]]
    for stream in np.unique(streams).tolist():
        of_stream = work[events.stream[work] == stream]
        recorded = np.append(events.start_ns[of_stream], events.ends_of(of_stream))
        order = np.argsort(recorded, kind="stable")
        clock = (recorded[order], np.append(start[of_stream], end[of_stream])[order])
        moves.append((others[on_device][streams == stream], clock if len(of_stream) else main))
    for rows, clock in moves:
        start[rows], end[rows] = _moved(events.start_ns[rows], *clock), _moved(events.ends_of(rows), *clock)
    duration = np.maximum(end - start, 0)
    order = np.lexsort((-duration, start))  # longer ones first among equals
    memory = trace.memory.assign(t_ns=_moved(trace.memory["t_ns"].to_numpy(), *main))
    moved = replace(events, start_ns=start, dur_ns=duration).take(order)
    return replace(trace, events=moved, memory=memory)


def _boundaries_come(boundaries: Boundaries, correction: Correction) -> Int64:
    """The time of each boundary: between two nodes, recording is taken from where it lies, the rest from all gaps alike."""
    node, num_nodes = np.empty(len(boundaries), dtype=np.intp), len(correction.time_ns)
    for thread, low, high in zip(boundaries.threads, boundaries.first[:-1], boundaries.first[1:], strict=True):
        first, last = np.searchsorted(correction.thread, (thread, thread + 1))
        before = np.searchsorted(correction.time_ns[first:last], boundaries.time_ns[low:high], side="right")
        node[low:high] = first + before - 1  # the last node of its thread that each boundary does not come before
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
