"""Simulation of a plan with costs: timelines, bubbles, memory, and the ops table that a measured run would have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from pptrace.errors import ScheduleError
from pptrace.model.tables import OPS, make_table
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import Replay, Timed, replay
from pptrace.simulator.costs import Costs


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """One pipeline rank. ``peak_inflight_microbatches`` counts activations of one chunk and one microbatch."""

    rank: int
    compute_ns: int
    bubble_ns: int
    peak_inflight_microbatches: int
    timeline: tuple[Timed, ...]

    @property
    def inner_bubble_ns(self) -> int:
        """The bubble between the rank's first and last action, ns: what remains when steps follow without a barrier."""
        return self.timeline[-1].end - self.timeline[0].start - self.compute_ns if self.timeline else 0


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated step. Time starts at 0 with the first action."""

    plan: Plan
    makespan_ns: int
    ranks: tuple[SimulatedRank, ...]

    @property
    def bubble_ratio(self) -> float:
        """Bubble over compute, all ranks together (Megatron's t_pb / t_id)."""
        return self._bubble_ns / sum(rank.compute_ns for rank in self.ranks)

    @property
    def bubble_share(self) -> float:
        """Bubble over the whole step, all ranks together."""
        return self._bubble_ns / (self.makespan_ns * len(self.ranks))

    @property
    def _bubble_ns(self) -> int:
        return sum(rank.bubble_ns for rank in self.ranks)

    def ops(self) -> pd.DataFrame:
        """The ops table (schema OPS), ``source`` "simulated"."""
        rows = [(rank.rank, timed) for rank in self.ranks for timed in rank.timeline]
        actions = [timed.action for _, timed in rows]
        return make_table(
            OPS,
            {
                "rank": [rank for rank, _ in rows],
                "step": [0] * len(rows),
                "kind": [action.kind.value for action in actions],
                "pair": [str(action) if action.parts else "" for action in actions],
                "stage": [action.stage for action in actions],
                "chunk": [action.chunk for action in actions],
                "microbatch": [action.microbatch for action in actions],
                "phase": [action.phase.value for action in actions],
                "start_ns": [timed.start for _, timed in rows],
                "end_ns": [timed.end for _, timed in rows],
                "clock": ["host"] * len(rows),
                "source": ["simulated"] * len(rows),
            },
        )


def simulate(plan: Plan, costs: Costs) -> Simulation:
    """Simulate a plan. Each action starts as soon as its rank is free and its inputs have arrived; messages overlap compute.

    Raises:
        ScheduleError: the plan cannot run to the end.
        UsageError: an action has no cost.
    """
    timeline = replay(plan, costs.duration, costs.latency)
    if timeline.blocked:
        stuck = timeline.blocked[0]
        raise ScheduleError(f"{plan.name}: rank {stuck.rank} never gets past its action number {stuck.index + 1}")
    return _summarise(plan, timeline)


def _summarise(plan: Plan, timeline: Replay) -> Simulation:
    makespan = timeline.makespan
    ranks = []
    for rank, row in enumerate(timeline.ranks):
        compute = sum(timed.end - timed.start for timed in row)
        peak = peak_inflight([timed.action for timed in row])
        ranks.append(SimulatedRank(rank, compute, makespan - compute, peak, row))
    return Simulation(plan, makespan, tuple(ranks))


def peak_inflight(actions: Sequence[Action]) -> int:
    """Peak number of activations that one rank holds: from a forward until its B, or its W where the backward is split."""
    inflight = peak = 0
    with_weight = {half.key[1:] for action in actions for half in action.halves if half.kind is Kind.W}
    for action in actions:
        for half in action.halves:
            if half.kind is Kind.F:
                inflight += 1
                peak = max(peak, inflight)
            elif half.kind is Kind.W or (half.kind is Kind.B and half.key[1:] not in with_weight):
                inflight -= 1
    return peak
