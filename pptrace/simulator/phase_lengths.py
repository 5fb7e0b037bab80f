"""Lengths of the phases of a simulated step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from pptrace.schedule.actions import Phase
from pptrace.simulator.simulation import Simulation


def phase_lengths(simulation: Simulation) -> tuple[Mapping[Phase, int], ...]:
    """Length of each rank's phases, ns; they sum to the makespan.

    The step is cut as :func:`pptrace.timeline.phases.phase_spans_of_steps` cuts a measured one: at the start of the first steady
    action and at the end of the last one, and without any after the last warmup action.
    """
    table, lengths = simulation.plan.table, []
    for rows in (slice(*of_rank) for of_rank in pairwise(table.rank_ptr.tolist())):
        phase, start, end = table.phase[rows], simulation.replayed.start[rows], simulation.replayed.end[rows]
        is_steady = phase == Phase.STEADY.code
        begin = until = int(end[phase == Phase.WARMUP.code].max(initial=0))
        if is_steady.any():
            begin, until = int(start[is_steady].min()), int(end[is_steady].max())
        lengths.append(
            {Phase.WARMUP: begin, Phase.STEADY: until - begin, Phase.COOLDOWN: simulation.makespan_ns - until}
        )
    return tuple(lengths)
