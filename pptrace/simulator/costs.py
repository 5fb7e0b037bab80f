"""Costs of a plan's actions and messages, in ns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from pptrace.errors import UsageError
from pptrace.schedule.actions import Action, Key, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.replay_table import Times


@dataclass(frozen=True, slots=True)
class Costs:
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

    def duration(self, _rank: int, action: Action) -> int:
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
            return sum(self.duration(_rank, part) for part in action.parts)
        raise UsageError(f"no cost for {action}: give one for its kind {action.kind}, its stage or the action itself")

    def durations(self, plan: Plan) -> Times:
        """The cost of each row of the plan's table, ns.

        Raises:
            UsageError: no cost covers one.
        """
        table = plan.table
        actions = [action for rank in range(plan.pp) for action in plan.compute_actions(rank)]
        if self.ops:
            return np.array([self.duration(0, action) for action in actions])
        kinds, stages = len(Kind) + 1, plan.num_stages + 1
        alike = table.kind.astype(np.int64) * kinds + table.second_kind
        if self.stages:
            alike = (alike * stages + table.stage) * stages + table.second_stage
        _, first, group = np.unique(alike, return_index=True, return_inverse=True)
        costs = {row: self.duration(0, actions[row]) for row in sorted(first.tolist())}
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
