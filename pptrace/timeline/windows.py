"""Step windows: the time from the start to the end of one pipeline's work on one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS


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
    for rank, step, start, end in _spans(ops).itertuples(index=False):
        of_rank.setdefault(rank, {})[step] = (start, end)
    windows = []
    for pipeline in mesh.pipelines:
        for step in sorted({step for rank in pipeline for step in of_rank.get(rank, {})}):
            present = {rank: of_rank[rank][step] for rank in pipeline if step in of_rank.get(rank, {})}
            first, last = min(start for start, _ in present.values()), max(end for _, end in present.values())
            windows.append(StepWindow(step, tuple(present), first, last))
    return tuple(sorted(windows, key=lambda window: (window.step, window.ranks)))


def _spans(ops: pd.DataFrame) -> pd.DataFrame:
    """Start and end of the compute ops of each rank and step.

    Rows of a rank and step that follow one another, which are all of them where the table is in that order, become one first.
    """
    rank, step = ops["rank"].to_numpy(), ops["step"].to_numpy()
    first = np.flatnonzero(np.r_[len(ops) > 0, (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])])
    is_compute = ops["kind"].isin(COMPUTE_KINDS).to_numpy()
    starts = np.where(is_compute, ops["start_ns"].to_numpy(), _LATEST)
    start = np.minimum.reduceat(starts, first) if len(first) else starts
    del starts  # as long as the table
    ends = np.where(is_compute, ops["end_ns"].to_numpy(), -_LATEST)
    end = np.maximum.reduceat(ends, first) if len(first) else ends
    runs = pd.DataFrame({"rank": rank[first], "step": step[first], "start": start, "end": end})
    runs = runs[runs["start"] != _LATEST]
    return runs.groupby(["rank", "step"], as_index=False).agg({"start": "min", "end": "max"})


_LATEST = np.iinfo(np.int64).max
