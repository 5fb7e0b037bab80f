"""Memory of each rank in time: the most that was allocated in each bucket of a tile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from pptrace.model.tables import Int64
from pptrace.report.tiles.cut import NUM_BUCKETS, Range
from pptrace.report.tiles.tracks import Array
from pptrace.slices import slices

MemoryTracks = Mapping[int, tuple[Int64, Int64]]
"""(ns from the run's origin, allocated bytes from then on) of the ranks with memory events, by their index."""


def memory_tracks(memory: pd.DataFrame, position: Mapping[int, int], origin_ns: int) -> MemoryTracks:
    """The memory events (schema MEMORY) of each rank in time order."""
    ordered = memory.sort_values("t_ns", kind="stable")
    return {
        position[rank]: (rows["t_ns"] - origin_ns, rows["allocated_bytes"])
        for (rank,), rows in slices(ordered, ("rank",)).items()
        if rank in position
    }


def most_bytes(tracks: MemoryTracks) -> int:
    return max((int(allocated.max()) for _, allocated in tracks.values()), default=0)


def samples_of(tracks: MemoryTracks, ranks: Sequence[int], time: Range) -> tuple[Int64, Int64, Int64]:
    """(index in ``ranks``, ns from the run's origin, bytes) of each event in a range of time, and of the last before it."""
    rows, times, held = [], [], []
    for row, rank in enumerate(ranks):
        at, allocated = tracks[rank]
        first, last = np.searchsorted(at, (time.begin, time.end)).tolist()
        first = max(first - 1, 0)
        rows.append(np.full(last - first, row))
        times.append(at[first:last])
        held.append(allocated[first:last])
    none = np.empty(0, dtype=np.int64)
    return np.concatenate((none, *rows)), np.concatenate((none, *times)), np.concatenate((none, *held))


def most_of_buckets(tracks: MemoryTracks, ranks: Sequence[int], time: Range) -> Array:
    """The most bytes allocated in each bucket, shape (ranks, :data:`NUM_BUCKETS`): 0 before a rank's first event."""
    most = np.zeros((len(ranks), NUM_BUCKETS), dtype=np.int64)
    edges = time.begin + (np.arange(NUM_BUCKETS + 1) << time.shift)
    for row, rank in enumerate(ranks):
        at, allocated = tracks[rank]
        first = np.searchsorted(at, edges)
        held = np.where(first[:-1] > 0, allocated[np.maximum(first[:-1] - 1, 0)], 0)  # when the bucket begins
        inside = np.flatnonzero(first[1:] > first[:-1])
        most[row] = held
        if len(inside):
            peaks = np.maximum.reduceat(allocated[: first[-1]], first[inside])
            most[row, inside] = np.maximum(held[inside], peaks)
    return most
