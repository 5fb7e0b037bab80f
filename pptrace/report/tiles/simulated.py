"""A simulated step as bars: its ops, its phases, and why its ranks are idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from pptrace.intervals import Int64, clip, subtract, union
from pptrace.model.tables import COMMS as COMMS_SCHEMA
from pptrace.model.tables import empty_table
from pptrace.report.tiles.bubbles import IDLE, MEANINGS, OTHER_ORDER
from pptrace.report.tiles.kept import Bars
from pptrace.report.tiles.layout import Layout, RankRow
from pptrace.report.tiles.measured import (
    BACK,
    BUBBLES,
    COMMS,
    OPS,
    PHASES,
    Picture,
    back_table,
    comms_table,
    ops_table,
    phases_of,
)
from pptrace.report.tiles.timeline import stages_of_ranks
from pptrace.report.tiles.tracks import Array
from pptrace.simulator import IdleCause, IdlePart, Simulation, idle_parts
from pptrace.slices import slice_of

_STATE_OF: Mapping[IdleCause, str] = {
    IdleCause.FILL: "fill",
    IdleCause.DRAIN: "drain",
    IdleCause.ORDER: OTHER_ORDER,
    IdleCause.MESSAGE: "late message",
}
"""States of idle ranks by their cause; in all others they wait as the schedule has it."""


def bars_of_simulation(simulation: Simulation) -> Bars:
    """The bars of a simulated step, from its start on."""
    ops = simulation.ops()
    ranks = range(simulation.plan.pp)
    position = {rank: rank for rank in ranks}
    step, begin, end = (np.array([value]) for value in (int(ops["step"].iloc[0]), 0, simulation.makespan_ns))
    parts: list[tuple[int, int, int, Array, Array]] = []
    for rank, idle in enumerate(_idle(simulation, ops)):
        phases = phases_of(slice_of(ops[ops["rank"] == rank]), step, begin, end)
        parts += [(rank, PHASES, code, *edges.T) for code, edges in phases.items()]
        parts += [(rank, BUBBLES, list(MEANINGS).index(state), *edges.T) for state, edges in idle.items()]
    tables = {
        OPS: ops_table(ops, position, 0),
        COMMS: comms_table(empty_table(COMMS_SCHEMA), position, 0),
        BACK: back_table(parts),
    }
    stages = stages_of_ranks(ops)
    layout = Layout(tuple(RankRow(rank, 0, rank, stages.get(rank, ())) for rank in ranks))
    return Bars(0, layout, Picture(tables), {}, {})


def _idle(simulation: Simulation, ops: pd.DataFrame) -> list[dict[str, Int64]]:
    """The idle time of each rank by state; of messages with rules of their own nothing tells why a rank waits for one."""
    if simulation.costs is not None:
        return [_by_state(parts) for parts in idle_parts(simulation)]
    of_ranks = []
    for rank in range(simulation.plan.pp):
        own = ops[ops["rank"] == rank]
        idle = subtract(union([0], [simulation.makespan_ns]), union(own["start_ns"], own["end_ns"]))
        first, last = int(own["start_ns"].min()), int(own["end_ns"].max())
        edges = {"fill": (0, first), IDLE: (first, last), "drain": (last, simulation.makespan_ns)}
        of_ranks.append({state: clip(idle, low, high) for state, (low, high) in edges.items()})
    return of_ranks


def _by_state(parts: Sequence[IdlePart]) -> dict[str, Int64]:
    times: dict[str, list[tuple[int, int]]] = {}
    for part in parts:
        times.setdefault(_STATE_OF.get(part.cause, IDLE), []).append((part.start_ns, part.end_ns))
    return {state: np.array(of_state, dtype=np.int64) for state, of_state in times.items()}
