"""Simulation of a plan with costs: timelines, bubbles, memory, and the ops table that a measured run would have.

Costs of actions and messages are in ns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from enum import StrEnum
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from pptrace.errors import ScheduleError, UsageError
from pptrace.schedule.actions import Action, Key, Kind, Phase
from pptrace.schedule.needs import Output
from pptrace.schedule.plan import Plan
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.replay import Replay, Timed
from pptrace.schedule.replay_table import Times, replay_table
from pptrace.schedule.shape import OpCosts

if TYPE_CHECKING:
    import pandas as pd


class Costs(Struct, frozen=True):
    """Nanoseconds per action: ``ops`` (kind, stage, microbatch) wins over ``stages`` (kind, stage), that over ``kinds``.

    A message costs ``p2p_latency_ns``; ``transfers`` gives it per producing action, (F | B | I, stage, microbatch). An
    overlapped pair without a cost costs the sum of its halves.
    """

    kinds: Mapping[Kind, int] = field(default_factory=dict)
    stages: Mapping[tuple[Kind, int], int] = field(default_factory=dict)
    ops: Mapping[Key, int] = field(default_factory=dict)
    p2p_latency_ns: int = 0
    transfers: Mapping[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tables: tuple[Mapping[Any, int], ...] = (self.kinds, self.stages, self.ops, self.transfers)
        for what, value in chain(*(table.items() for table in tables)):
            if value < 0:
                words = " ".join(map(str, what)) if isinstance(what, tuple) else what
                raise UsageError(f"{words} costs {value} ns; expected at least 0")
        if self.p2p_latency_ns < 0:
            raise UsageError(f"a message has a latency of {self.p2p_latency_ns} ns; expected at least 0")

    @property
    def of_search(self) -> OpCosts:
        """The costs of the kinds and of a message, as schedules that are searched take them."""
        return OpCosts(self.kinds[Kind.F], self.kinds[Kind.I], self.kinds[Kind.W], self.p2p_latency_ns)

    def duration(self, action: Action) -> int:
        """The cost of an action, ns.

        Raises:
            UsageError: no cost covers it.
        """
        for cost in (
            self.ops.get(action.key),
            self.stages.get((action.kind, action.stage)),
            self.kinds.get(action.kind),
        ):
            if cost is not None:
                return cost
        if action.parts:
            return sum(map(self.duration, action.parts))
        raise UsageError(f"no cost for {action}: give one for its kind {action.kind}, its stage or the action itself")

    def durations(self, plan: Plan) -> Times:
        """The cost of each row of the plan's table, ns.

        Raises:
            UsageError: no cost covers one.
        """
        table = plan.table
        actions = [action for rank in range(plan.pp) for action in plan.compute_actions(rank)]
        if self.ops:
            return np.array([self.duration(action) for action in actions])
        kinds, stages = len(Kind) + 1, plan.num_stages + 1
        alike = table.kind.astype(np.int64) * kinds + table.second_kind
        if self.stages:
            alike = (alike * stages + table.stage) * stages + table.second_stage
        _, first, group = np.unique(alike, return_index=True, return_inverse=True)
        costs = {row: self.duration(actions[row]) for row in sorted(first.tolist())}
        return np.array([costs[row] for row in first.tolist()])[group]

    def latencies(self, table: PlanTable) -> Times:
        """The time of each message of a plan from the end of its producer until it has arrived, ns; one for all where equal."""
        if not self.transfers:
            return np.array(self.p2p_latency_ns)
        kind, stage, microbatch = zip(*self.transfers, strict=True)
        codes = np.array([member.code for member in kind])
        slots = table.slots_of(codes, stage, [-1 if number is None else number for number in microbatch])
        messages = np.where(table.slot_kind[slots] == codes, table.slot_to_message[slots], -1)
        latencies = np.full(table.num_messages, self.p2p_latency_ns)
        is_sent = (slots >= 0) & (messages >= 0)
        latencies[messages[is_sent]] = np.array(list(self.transfers.values()))[is_sent]
        return latencies


def uniform(forward_ns: int, backward_ns: int, wgrad_ns: int | None = None, p2p_ns: int = 0) -> Costs:
    """Equal costs for every stage; ``wgrad_ns`` (default half of the backward) is W's share of a full B, I has the rest.

    Raises:
        UsageError: a negative cost, W larger than B, or no cost at all.
    """
    wgrad = backward_ns // 2 if wgrad_ns is None else wgrad_ns
    for name, value in (("forward", forward_ns), ("backward", backward_ns), ("wgrad", wgrad), ("p2p", p2p_ns)):
        if value < 0:
            raise UsageError(f"{name} costs {value} ns; expected at least 0")
    if wgrad > backward_ns:
        raise UsageError(f"wgrad ({wgrad} ns) is a part of backward ({backward_ns} ns) and cannot be larger")
    if forward_ns == backward_ns == 0:
        raise UsageError("forward and backward both cost 0 ns; expected at least one of them above 0")
    kinds = {Kind.F: forward_ns, Kind.B: backward_ns, Kind.I: backward_ns - wgrad, Kind.W: wgrad}
    return Costs(kinds=kinds, p2p_latency_ns=p2p_ns)


IDEAL = uniform(forward_ns=1_000_000, backward_ns=2_000_000)
"""F = I = W, free messages: the costs of the ideal bubble of a plan."""


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
    _replay: Replay = dataclass_field(repr=False)

    @cached_property
    def timeline(self) -> tuple[Timed, ...]:
        return self._replay.timeline(self.rank)


class Simulation(Struct, frozen=True, dict=True):
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


class MessageEnd(Struct, frozen=True):
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


def messages_of(simulation: Simulation) -> list[MessageEnd]:
    """Both ends of every message: it leaves when the action that makes it ends, and receives are posted ahead."""
    assert simulation.costs is not None, "messages take what they cost, and have no rules of their own"
    table = simulation.plan.table
    sender, reader, slot = table.messages
    sent = simulation.replayed.end[sender]
    arrived = sent + simulation.costs.latencies(table)
    cell, output = np.divmod(slot, len(Output))
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

    The step is cut as :func:`pptrace.timeline.windows.phase_spans_of_steps` cuts a measured one: at the start of the first steady
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
