"""Plan and costs in, timeline out; or many durations of one plan in, many timelines out."""

from pptrace.simulator.idle import IdleCause, IdlePart, idle_by_cause, idle_parts
from pptrace.simulator.simulation import (
    IDEAL,
    Costs,
    MessageEnd,
    SimulatedRank,
    Simulation,
    messages_of,
    peak_inflight,
    phase_lengths,
    simulate,
    uniform,
)

__all__ = [
    "IDEAL",
    "Costs",
    "IdleCause",
    "IdlePart",
    "MessageEnd",
    "SimulatedRank",
    "Simulation",
    "idle_by_cause",
    "idle_parts",
    "messages_of",
    "peak_inflight",
    "phase_lengths",
    "simulate",
    "uniform",
]
