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
    bounds = simulation.plan.table.rank_ptr.tolist()
    return tuple(_of_rank(simulation, slice(*of_rank)) for of_rank in pairwise(bounds))


def _of_rank(simulation: Simulation, rows: slice) -> Mapping[Phase, int]:
    phase = simulation.plan.table.phase[rows]
    start, end = simulation.replayed.start[rows], simulation.replayed.end[rows]
    is_warmup, is_steady = phase == Phase.WARMUP.code, phase == Phase.STEADY.code
    filled = int(end[is_warmup].max(initial=0))
    begin, until = (int(start[is_steady].min()), int(end[is_steady].max())) if is_steady.any() else (filled, filled)
    return {Phase.WARMUP: begin, Phase.STEADY: until - begin, Phase.COOLDOWN: simulation.makespan_ns - until}
