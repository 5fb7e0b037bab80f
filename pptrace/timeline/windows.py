"""Step windows: from when to when one pipeline worked on one step."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from pptrace.recognise.mesh import MeshInfo
from pptrace.recognise.schedule import COMPUTE_KINDS


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
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    windows = []
    for pipeline in mesh.pipelines:
        mine = compute[compute["rank"].isin(pipeline)]
        for step in sorted(mine["step"].unique()):
            rows = mine[mine["step"] == step]
            present = set(rows["rank"])
            ranks = tuple(rank for rank in pipeline if rank in present)
            windows.append(StepWindow(int(step), ranks, int(rows["start_ns"].min()), int(rows["end_ns"].max())))
    return tuple(sorted(windows, key=lambda window: (window.step, window.ranks)))
