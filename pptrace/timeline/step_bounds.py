"""Bounds of the steps that ranges mark: what counts for throughput is the time from one's start to the next one's, its period."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from pptrace.clock import Clock
from pptrace.model.device import DeviceWork
from pptrace.model.tables import COMPUTE_KINDS, Int64
from pptrace.slices import rows_among, rows_where


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
    show: a host may run ahead.

    Args:
        ops: on the common clock.
        work: the device work of ranks, each on its own clock.
    """
    marks = rows_where(ops, rows_among(ops["kind"], ("STEP",)))
    of_ranks = marks.groupby(["rank", "step"], as_index=False).agg(begin=("start_ns", "min"), end=("end_ns", "max"))
    ranges = rows_where(ops, ~rows_among(ops["kind"], COMPUTE_KINDS))
    last = ranges.groupby(["rank", "step"])["end_ns"].max()
    of_ranks["end"] = last.reindex(pd.MultiIndex.from_frame(of_ranks[["rank", "step"]])).to_numpy(dtype=np.int64)
    begin_ns: dict[int, int] = {}
    ranges_ns: dict[tuple[int, int], tuple[int, int]] = {}
    for number, of_rank in of_ranks.groupby("rank"):
        rank = int(str(number))
        done = DoneWork.of(work.get(rank), clock, rank)
        for step, begin, end in zip(
            of_rank["step"].tolist(),
            done.not_before(of_rank["begin"].to_numpy()).tolist(),
            done.not_before(of_rank["end"].to_numpy()).tolist(),
            strict=True,
        ):
            begin_ns[step] = min(begin, begin_ns.get(step, begin))
            ranges_ns[step, rank] = begin, end
    return StepBounds(begin_ns, ranges_ns)


@dataclass(frozen=True, slots=True, eq=False)
class DoneWork:
    """Times at which all work was over that a device had to do until a launch, by the time of the launch; on the common clock."""

    launched_ns: Int64
    done_ns: Int64

    @classmethod
    def of(cls, work: DeviceWork | None, clock: Clock, rank: int) -> DoneWork:
        if work is None or not len(work):
            return cls(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        known = np.flatnonzero(work.launch_ns >= 0)
        order = known[np.argsort(work.launch_ns[known], kind="stable")]
        launched, end = (clock.to_common_clock(rank, times[order]) for times in (work.launch_ns, work.end_ns))
        return cls(launched, np.maximum.accumulate(end))

    def not_before(self, times: Int64) -> Int64:
        """Times, or when the work was over that was launched before them, if that is later."""
        if not len(self.launched_ns):
            return times
        index = np.searchsorted(self.launched_ns, times) - 1
        return np.where(index >= 0, np.maximum(times, self.done_ns[np.maximum(index, 0)]), times)
