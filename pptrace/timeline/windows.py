"""Step windows, the time from the start to the end of one pipeline's work on one step, and the bounds of steps that ranges mark:
what counts for throughput is the time from one's start to the next one's, its period.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pptrace.clock import Clock
from pptrace.model.device import DeviceWork
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS, Int64
from pptrace.slices import distinct_of, reduce_groups, rows_among, rows_where, slice_of


@dataclass(frozen=True, slots=True)
class StepWindow:
    """One step of one pipeline replica: from the earliest start to the latest end of any F/B/I/W op over its ranks, ns.

    ``ranks`` are the global ranks of the pipeline that are in the trace, in pipeline order.
    """

    step: int
    ranks: tuple[int, ...]
    start_ns: int
    end_ns: int

    @property
    def span_ns(self) -> int:
        return self.end_ns - self.start_ns


def step_windows(ops: pd.DataFrame, mesh: MeshInfo) -> tuple[StepWindow, ...]:
    """The windows of all steps and pipelines, in time order. ``ops`` must be on one clock."""
    of_rank: dict[int, dict[int, tuple[int, int]]] = {}
    for rank, step, start, end in zip(*(column.tolist() for column in _spans(ops)), strict=True):
        of_rank.setdefault(rank, {})[step] = (start, end)
    windows = []
    for pipeline in mesh.pipelines:
        for step in sorted({step for rank in pipeline for step in of_rank.get(rank, {})}):
            present = {rank: of_rank[rank][step] for rank in pipeline if step in of_rank.get(rank, {})}
            first, last = min(start for start, _ in present.values()), max(end for _, end in present.values())
            windows.append(StepWindow(step, tuple(present), first, last))
    return tuple(sorted(windows, key=lambda window: (window.step, window.ranks)))


def _spans(ops: pd.DataFrame) -> tuple[Int64, Int64, Int64, Int64]:
    """(rank, step, start, end) of the compute ops of each rank and step.

    Rows of a rank and step that follow one another, which are all of them where the table is in that order, become one first.
    """
    rank, step = ops["rank"].to_numpy(), ops["step"].to_numpy()
    first = np.flatnonzero(np.r_[len(ops) > 0, (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])])
    is_compute = rows_among(ops["kind"], COMPUTE_KINDS)
    starts = np.where(is_compute, ops["start_ns"].to_numpy(), _LATEST)
    start = np.minimum.reduceat(starts, first) if len(first) else starts
    del starts  # as long as the table
    ends = np.where(is_compute, ops["end_ns"].to_numpy(), -_LATEST)
    end = np.maximum.reduceat(ends, first) if len(first) else ends
    computes = start != _LATEST
    first, start, end = first[computes], start[computes], end[computes]
    number, at = distinct_of([rank[first], step[first]])
    starts = reduce_groups(np.minimum, start, number, len(at))
    return rank[first[at]], step[first[at]], starts, reduce_groups(np.maximum, end, number, len(at))


_LATEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class StepBounds:
    """The first begin of each step on any rank, by its number, and the bounds of each step's range on each rank, by both."""

    begin_ns: Mapping[int, int]
    ranges_ns: Mapping[tuple[int, int], tuple[int, int]]

    def last_end_ns(self, step: int) -> int | None:
        """The latest end of a step's ranges."""
        ends = [end for (number, _), (_, end) in self.ranges_ns.items() if number == step]
        return max(ends, default=None)


def step_bounds(ops: pd.DataFrame, work: Mapping[int, DeviceWork], clock: Clock) -> StepBounds:
    """The bounds of all steps that STEP ranges mark; they end with the last range that is in them.

    On a device a step neither begins nor ends before the work is over that was launched until then, as an event of CUDA would
    show: a host may run ahead. Ranges in the device's own time stay as they are.

    Args:
        ops: on the common clock.
        work: the device work of ranks, each on its own clock.
    """
    ranges = slice_of(rows_where(ops, ~rows_among(ops["kind"], COMPUTE_KINDS)))
    number, at = distinct_of([ranges["rank"], ranges["step"]]) if len(ranges) else (np.zeros(0, np.int64),) * 2
    marks = np.flatnonzero(ranges["kind"] == "STEP")
    begins = reduce_groups(np.minimum, ranges["start_ns"][marks], number[marks], len(at))
    ends = reduce_groups(np.maximum, ranges["end_ns"], number, len(at))
    on_device = np.zeros(len(at), dtype=np.bool_)
    on_device[number[marks[(ranges["clock"] == "device")[marks]]]] = True
    begin_ns: dict[int, int] = {}
    ranges_ns: dict[tuple[int, int], tuple[int, int]] = {}
    marked = np.flatnonzero(np.bincount(number[marks], minlength=len(at)))
    marked = marked[np.lexsort((ranges["step"][at[marked]], ranges["rank"][at[marked]]))]
    of_marks = ranges["rank"][at[marked]]
    for rank in dict.fromkeys(of_marks.tolist()):
        of_rank = marked[of_marks == rank]
        bounds = [begins[of_rank], ends[of_rank]]
        if rank in work and not on_device[of_rank].any():
            bounds = _after_work(bounds, work[rank], clock, rank)
        steps = ranges["step"][at[of_rank]].tolist()
        for step, begin, end in zip(steps, *(times.tolist() for times in bounds), strict=True):
            begin_ns[step] = min(begin, begin_ns.get(step, begin))
            ranges_ns[step, rank] = begin, end
    return StepBounds(begin_ns, ranges_ns)


def _after_work(bounds: Sequence[Int64], work: DeviceWork, clock: Clock, rank: int) -> list[Int64]:
    """Times, or when all work was over that the device had to do and that was launched before them, if that is later."""
    order = work.launch_order
    launched, end = (clock.to_common_clock(rank, times[order]) for times in (work.launch_ns, work.end_ns))
    done = np.append(np.maximum.accumulate(end), np.iinfo(np.int64).min)
    return [np.maximum(times, done[np.searchsorted(launched, times) - 1]) for times in bounds]
