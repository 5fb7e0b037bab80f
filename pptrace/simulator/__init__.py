"""Plan and costs in, timeline out; or many durations of one plan in, many timelines out."""

from pptrace.schedule.replay_table import Replays, makespans, rank_ends, rank_ends_of_mixtures, replay_table
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
    "Replays",
    "SimulatedRank",
    "Simulation",
    "idle_by_cause",
    "idle_parts",
    "makespans",
    "messages_of",
    "peak_inflight",
    "phase_lengths",
    "rank_ends",
    "rank_ends_of_mixtures",
    "replay_table",
    "simulate",
    "uniform",
]
