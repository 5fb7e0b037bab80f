"""Peak memory of one rank's steps, from what its recorder measured and from its trace's memory events."""

from __future__ import annotations

import numpy as np

from pptrace.analysis.aligned import AlignedRun, RankRows
from pptrace.model.step_memory import MemoryKind, PeakMemory, kind_of_events
from pptrace.model.tables import Int64
from pptrace.slices import Slice


def peaks_of_steps(
    rows: RankRows, rank: int, steps: Int64, start_ns: Int64, end_ns: Int64, data: AlignedRun
) -> list[PeakMemory | None]:
    """The peak of each step; None where nothing tells.

    The allocator's own statistic of a device comes first, then memory events, then the resident memory of the process.

    Args:
        rows: of the rank.
        steps, start_ns, end_ns: the steps and their windows, in which events are looked for where the rank has no STEP range.
    """
    recorded = data.recorded_memory.get(rank)
    events = data.memory_events(rank)
    if recorded is None and events is None:
        return [None] * len(steps)
    by_event: list[PeakMemory | None] = [None] * len(steps)
    if events is not None:
        by_event = _by_events(events, *_ranges(rows, steps, start_ns, end_ns))
    if recorded is None:
        return by_event
    return [
        recorded.device_of(step) or seen or recorded.process_of(step)
        for step, seen in zip(steps.tolist(), by_event, strict=True)
    ]


def _ranges(rows: RankRows, steps: Int64, start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
    """The STEP range of each step, else its window, ns."""
    spans = rows.spans.where(rows.spans["kind"] == "STEP")
    starts, ends = start_ns.copy(), end_ns.copy()
    for index, step in enumerate(steps.tolist()):
        first, last = np.searchsorted(spans["step"], (step, step + 1))
        if first < last:
            starts[index], ends[index] = spans["start_ns"][first:last].min(), spans["end_ns"][first:last].max()
    return starts, ends


def _by_events(events: Slice, start_ns: Int64, end_ns: Int64) -> list[PeakMemory | None]:
    """The highest level in each range, both ends included; None without an event in it.

    A level holds until the next event, so that of the last event before a range counts.
    """
    time, allocated, reserved = events["t_ns"], events["allocated_bytes"], events["reserved_bytes"]
    kind = kind_of_events(allocated, reserved)
    first = np.searchsorted(time, start_ns)
    before, last = np.searchsorted(time, start_ns, side="right") - 1, np.searchsorted(time, end_ns, side="right")
    peaks: list[PeakMemory | None] = []
    for inside, begin, end in zip(first.tolist(), before.tolist(), last.tolist(), strict=True):
        if inside == end:
            peaks.append(None)
            continue
        start = int(allocated[begin]) if begin >= 0 else None
        levels = slice(max(begin, 0), end)
        most_reserved = int(reserved[levels].max()) if kind is MemoryKind.DEVICE_ALLOCATED else None
        peaks.append(PeakMemory(kind, int(allocated[levels].max()), start, most_reserved))
    return peaks
