"""A step as it would be after a change, on the axis of the measured one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from pptrace.model.mesh import MeshInfo
from pptrace.report.tiles.measured import Picture
from pptrace.report.tiles.replayed import picture_of_ops, ranks_of
from pptrace.simulator import Simulation
from pptrace.timeline.windows import StepWindow

CHANGED = "whatif:"
"""Begins the name of a source that is a change; its wishes follow, as in an address."""


def changed_picture(
    simulation: Simulation,
    windows: Sequence[StepWindow],
    position: Mapping[int, int],
    mesh: MeshInfo,
    origin_ns: int,
) -> Picture:
    """The replay of a changed step, each pipeline from the start of its measured window on."""
    ops, parts = simulation.ops(), []
    for window in windows:
        ranks = pd.Series(ranks_of(window, simulation.plan, mesh))
        times = {name: ops[name] + window.start_ns for name in ("start_ns", "end_ns")}
        parts.append(ops.assign(rank=ops["rank"].map(ranks), step=window.step, **times))
    return picture_of_ops(parts, position, origin_ns)
