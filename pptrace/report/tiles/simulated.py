"""A simulated step as bars: its ops, its phases, and why its ranks are idle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pptrace.model.tables import COMMS as COMMS_SCHEMA
from pptrace.model.tables import empty_table
from pptrace.report.tiles.bubbles import MEANINGS, OTHER_ORDER
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
from pptrace.simulator import IdleCause, Simulation, idle_parts
from pptrace.slices import slice_of

_STATE_OF: Mapping[IdleCause, str] = {
    IdleCause.FILL: "fill",
    IdleCause.DRAIN: "drain",
    IdleCause.ORDER: OTHER_ORDER,
}
"""States of idle ranks by their cause; in all others a rank waits for a message."""


def bars_of_simulation(simulation: Simulation) -> Bars:
    """The bars of a simulated step, from its start on."""
    ops = simulation.ops()
    ranks = range(simulation.plan.pp)
    position = {rank: rank for rank in ranks}
    parts: list[tuple[int, int, int, Array, Array]] = []
    step, begin, end = (np.array([value]) for value in (int(ops["step"].iloc[0]), 0, simulation.makespan_ns))
    for rank, idle in enumerate(idle_parts(simulation)):
        for code, edges in phases_of(slice_of(ops[ops["rank"] == rank]), step, begin, end).items():
            parts.append((rank, PHASES, code, *edges.T))
        for state in dict.fromkeys(map(_state_of, IdleCause)):
            times = [(part.start_ns, part.end_ns) for part in idle if _state_of(part.cause) == state]
            edges = np.array(times, dtype=np.int64).reshape(-1, 2)
            parts.append((rank, BUBBLES, list(MEANINGS).index(state), *edges.T))
    tables = {
        OPS: ops_table(ops, position, 0),
        COMMS: comms_table(empty_table(COMMS_SCHEMA), position, 0),
        BACK: back_table(parts),
    }
    stages = stages_of_ranks(ops)
    layout = Layout(tuple(RankRow(rank, 0, rank, stages.get(rank, ())) for rank in ranks))
    return Bars(0, layout, Picture(tables), {}, {})


def _state_of(cause: IdleCause) -> str:
    return _STATE_OF.get(cause, "late message")
