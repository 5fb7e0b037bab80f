"""Step windows: the time from the start to the end of one pipeline's work on one step."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.slices import rows_where


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
    compute = rows_where(ops[["rank", "step", "start_ns", "end_ns"]], ops["kind"].isin(COMPUTE_KINDS))
    spans = compute.groupby(["rank", "step"]).agg(start=("start_ns", "min"), end=("end_ns", "max"))
    of_rank: dict[int, dict[int, tuple[int, int]]] = {}
    for rank, step, start, end in spans.reset_index().itertuples(index=False):
        of_rank.setdefault(rank, {})[step] = (start, end)
    windows = []
    for pipeline in mesh.pipelines:
        for step in sorted({step for rank in pipeline for step in of_rank.get(rank, {})}):
            present = {rank: of_rank[rank][step] for rank in pipeline if step in of_rank.get(rank, {})}
            first, last = min(start for start, _ in present.values()), max(end for _, end in present.values())
            windows.append(StepWindow(step, tuple(present), first, last))
    return tuple(sorted(windows, key=lambda window: (window.step, window.ranks)))
