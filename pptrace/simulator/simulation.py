"""Simulation of a plan with costs: timelines, bubbles, memory, and the ops table that a measured run would have."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Kind, Phase
from pptrace.schedule.needs import Output
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import Replay, Timed
from pptrace.schedule.replay_table import replay_table
from pptrace.simulator.costs import Costs

if TYPE_CHECKING:
    import pandas as pd
from collections.abc import Mapping


@dataclass(frozen=True)
class SimulatedRank:
    """One pipeline rank. ``peak_inflight_microbatches`` counts activations of one chunk and one microbatch.

    ``inner_bubble_ns`` is the bubble between the rank's first and last action: what remains when steps follow without a barrier.
    """

    rank: int
    compute_ns: int
    bubble_ns: int
    inner_bubble_ns: int
    peak_inflight_microbatches: int
    _replay: Replay = field(repr=False)

    @cached_property
    def timeline(self) -> tuple[Timed, ...]:
        return self._replay.timeline(self.rank)


@dataclass(frozen=True)
class Simulation:
    """A simulated step. Time starts at 0 with the first action. ``costs`` is None where messages had rules of their own."""

    replayed: Replay
    costs: Costs | None = None

    @property
    def plan(self) -> Plan:
        return self.replayed.plan

    @cached_property
    def makespan_ns(self) -> int:
        return self.replayed.makespan

    @cached_property
    def ranks(self) -> tuple[SimulatedRank, ...]:
        peaks = peak_inflight(self.plan)
        return tuple(self._rank(rank, peak) for rank, peak in enumerate(peaks))

    def _rank(self, rank: int, peak_inflight_microbatches: int) -> SimulatedRank:
        rows = slice(*self.plan.table.rank_ptr[rank : rank + 2].tolist())
        start, end = self.replayed.start[rows], self.replayed.end[rows]
        compute = int((end - start).sum())
        inner = int(end[-1] - start[0]) - compute if len(start) else 0
        return SimulatedRank(
            rank, compute, self.makespan_ns - compute, inner, peak_inflight_microbatches, self.replayed
        )

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
        from pptrace.model.tables import OPS, make_table

        table = self.plan.table
        pair = np.full(len(table), "", object)
        for row in np.flatnonzero(table.second_slot >= 0).tolist():
            rank = int(table.rank[row])
            pair[row] = str(self.plan.compute_actions(rank)[int(table.position[row])])
        return make_table(
            OPS,
            {
                "rank": table.rank,
                "step": np.zeros(len(table), np.int64),
                "kind": _texts(Kind)[table.kind],
                "pair": pair,
                "stage": table.stage,
                "chunk": table.chunk,
                "microbatch": table.microbatch,
                "phase": _texts(Phase)[table.phase],
                "start_ns": self.replayed.start,
                "end_ns": self.replayed.end,
                "clock": np.full(len(table), "host", object),
                "source": np.full(len(table), "simulated", object),
            },
        )


def _texts(members: type[StrEnum]) -> npt.NDArray[Any]:
    """The texts of an enum's members, by their codes."""
    return np.array([member.value for member in members], object)


def simulate(plan: Plan, costs: Costs) -> Simulation:
    """Simulate a plan. Each action starts as soon as its rank is free and its inputs have arrived; messages overlap compute.

    Raises:
        ScheduleError: the plan cannot run to the end.
        UsageError: an action has no cost.
    """
    times = replay_table(plan.table, costs.durations(plan), costs.latencies(plan.table))
    replayed = Replay(plan, times.start, times.end)
    if replayed.blocked:
        stuck = replayed.blocked[0]
        raise ScheduleError(f"{plan.name}: rank {stuck.rank} never gets past its action number {stuck.index + 1}")
    return Simulation(replayed, costs)


def peak_inflight(plan: Plan) -> tuple[int, ...]:
    """Peak number of activations that each rank holds: from a forward until its B, or its W where the backward is split."""
    return tuple(int(held.max(initial=0)) for held in held_activations(plan))


def held_activations(plan: Plan) -> tuple[npt.NDArray[np.int64], ...]:
    """Activations that each rank holds after each of its actions, in a pair after its forward half."""
    table = plan.table
    is_forward = (table.kind == Kind.F.code) | (table.kind == Kind.OVERLAP_F_B.code)
    frees = (table.kind == Kind.W.code) | _frees(plan, table.kind, table.slot)
    pair_frees = _frees(plan, table.second_kind, table.second_slot).astype(np.int64)
    change = is_forward - frees.astype(np.int64) - pair_frees
    rows = [slice(*bounds) for bounds in pairwise(table.rank_ptr.tolist())]
    return tuple(np.cumsum(change[of_rank]) + pair_frees[of_rank] for of_rank in rows)


def _frees(plan: Plan, kind: npt.NDArray[Any], slot: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return whether an action is a backward that frees an activation: one that no W follows."""
    frees: npt.NDArray[np.bool_] = kind == Kind.B.code
    weight_grad = slot[frees] - Output.BACKWARD + Output.WEIGHT_GRAD
    frees[frees] = plan.table.slot_to_row[weight_grad] < 0
    return frees


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """One end of a message, under way from ``start_ns`` to ``end_ns``.

    ``kind`` is send or recv, ``direction`` F or B, ``stage`` the one at this end, ``peer`` the pipeline rank at the other end,
    and ``match`` the number of the message, the same at both ends.
    """

    rank: int
    kind: str
    direction: str
    stage: int
    microbatch: int
    peer: int
    start_ns: int
    end_ns: int
    match: int


def messages_of(simulation: Simulation, costs: Costs) -> list[MessageEnd]:
    """Both ends of every message: it leaves when the action that makes it ends, and receives are posted ahead."""
    table = simulation.plan.table
    entries = np.flatnonzero(table.dep_is_message)
    sender, reader = table.dep[entries], table.dep_reader[entries]
    sent = simulation.replayed.end[sender]
    arrived = sent + np.broadcast_to(costs.latencies(table), table.num_messages)[table.dep_message[entries]]
    cell, output = np.divmod(table.dep_slot[entries], len(Output))
    stage, microbatch = np.divmod(cell, table.num_microbatches)
    is_forward = output == Output.FORWARD
    direction = np.where(is_forward, "F", "B")
    ends = []
    for kind, own, other, of_stage in (
        ("send", sender, reader, stage),
        ("recv", reader, sender, stage + np.where(is_forward, 1, -1)),
    ):
        columns = (table.rank[own], direction, of_stage, microbatch, table.rank[other], sent, arrived)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        ends += [
            MessageEnd(rank, kind, way, at, number, peer, start, end, match)
            for match, (rank, way, at, number, peer, start, end) in enumerate(rows)
        ]
    return ends


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
