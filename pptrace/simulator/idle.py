"""Reasons why the ranks of a simulated step are idle: every bubble cut into parts, each with one cause.

A rank is idle from its last action's end, or the step's start, until its next action begins. Of that time

- *order* is what another action of the rank, later in its list, could have used: its inputs were there, it would have ended
  before the next one began, and the rank would not have held more activations than it does at its peak anyway;
- *message*: the input that the next action waited for was on its way;
- *fill*: the rank has run nothing yet, and what its first action reads was not computed yet;
- *warmup*, *cooldown*, *steady*: the same later on, until the rank's first backward, after its last forward, and in between;
- *drain*: the rank has nothing left to run, and others have.

The parts of a rank sum to its bubble.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.replay_table import Times
from pptrace.simulator.simulation import Simulation, held_activations


class IdleCause(StrEnum):
    """Cause of idle time of a rank on paper."""

    FILL = "fill"
    WARMUP = "warmup"
    STEADY = "steady"
    COOLDOWN = "cooldown"
    DRAIN = "drain"
    MESSAGE = "message"
    ORDER = "order"


class IdlePart(Struct, frozen=True):
    """Idle time of a rank with one cause.

    ``before`` is the action that the rank runs next, None at the end; ``other`` the action for whose output that waited, of
    ``order`` the one that could have run instead; ``other_rank`` is where it runs.
    """

    rank: int
    start_ns: int
    end_ns: int
    cause: IdleCause
    before: Action | None = None
    other: Action | None = None
    other_rank: int | None = None

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


def idle_parts(simulation: Simulation) -> tuple[tuple[IdlePart, ...], ...]:
    """Parts of each rank's bubble, in order of time."""
    inputs = _last_inputs(simulation)
    held = held_activations(simulation.plan)
    return tuple(tuple(_RankIdle(simulation, inputs, rank, of_rank).parts()) for rank, of_rank in enumerate(held))


def _last_inputs(simulation: Simulation) -> tuple[Times, Times, Times]:
    """The last input of each row: (when it had been computed, when it was there, the row that made it; −1: it needs none)."""
    assert simulation.costs is not None, "idle time has causes where messages have costs alone"
    table, end = simulation.plan.table, simulation.replayed.end
    message = np.where(table.dep_is_message, table.dep_message, 0)
    latency = np.broadcast_to(simulation.costs.latencies(table), (max(1, table.num_messages),))[message]
    arrival = end[table.dep] + np.where(table.dep_is_message, latency, 0)
    ordered = np.lexsort((arrival, table.dep_reader))
    last = ordered[np.flatnonzero(np.diff(table.dep_reader[ordered], append=-1))]
    reader, size = table.dep_reader[last], len(table)
    computed, ready = (np.zeros(size, np.int64) for _ in range(2))
    producer = np.full(size, -1)
    computed[reader], ready[reader], producer[reader] = end[table.dep[last]], arrival[last], table.dep[last]
    return computed, ready, producer


def idle_by_cause(simulation: Simulation) -> tuple[Mapping[IdleCause, int], ...]:
    """Idle time of each rank by cause, ns; the sum is its bubble."""
    sums = []
    for parts in idle_parts(simulation):
        of_rank = dict.fromkeys(IdleCause, 0)
        for part in parts:
            of_rank[part.cause] += part.duration_ns
        sums.append(of_rank)
    return tuple(sums)


class _RankIdle:
    """The idle time of one rank."""

    def __init__(
        self, simulation: Simulation, inputs: tuple[Times, Times, Times], rank: int, held: npt.NDArray[np.int64]
    ) -> None:
        plan = simulation.plan
        self._plan, self._rank, self._makespan = plan, rank, simulation.makespan_ns
        self._rows = slice(*plan.table.rank_ptr[rank : rank + 2].tolist())
        self._actions = plan.compute_actions(rank)
        self._kind = plan.table.kind[self._rows]
        self._start, self._end = (
            times[self._rows].tolist() for times in (simulation.replayed.start, simulation.replayed.end)
        )
        self._computed, self._ready, self._producer = (column[self._rows].tolist() for column in inputs)
        self._held = held
        is_backward = ~np.isin(self._kind, (Kind.F.code, Kind.W.code))
        self._first_backward = int(is_backward.argmax()) if is_backward.any() else len(is_backward)
        self._last_forward = int(
            np.flatnonzero(np.isin(self._kind, (Kind.F.code, Kind.OVERLAP_F_B.code))).max(initial=-1)
        )

    def parts(self) -> Iterator[IdlePart]:
        free = 0
        for index, (start, end) in enumerate(zip(self._start, self._end, strict=True)):
            if start > free:
                yield from self._before(index, free)
            free = end
        if free < self._makespan:
            yield IdlePart(self._rank, free, self._makespan, IdleCause.DRAIN)

    def _before(self, index: int, free: int) -> Iterator[IdlePart]:
        """The idle time before an action, from the moment at which the rank is free."""
        for begin, end, other in self._others(index, free):
            yield from self._waiting(index, free, begin)
            yield IdlePart(
                self._rank, begin, end, IdleCause.ORDER, self._actions[index], self._actions[other], self._rank
            )
            free = end
        yield from self._waiting(index, free, self._start[index])

    def _waiting(self, index: int, begin: int, end: int) -> Iterator[IdlePart]:
        """Time in which no other action could have run: until the input was computed, then until it was there."""
        computed = min(max(self._computed[index], begin), end)
        action = self._actions[index]
        waiting = self._waits_in(index)
        table, row = self._plan.table, self._producer[index]
        other_rank = None if row < 0 else int(table.rank[row])
        other = None if other_rank is None else self._plan.compute_actions(other_rank)[int(table.position[row])]
        for cause, first, last in ((waiting, begin, computed), (IdleCause.MESSAGE, computed, end)):
            if first < last:
                yield IdlePart(self._rank, first, last, cause, action, other, other_rank)

    def _waits_in(self, index: int) -> IdleCause:
        """Tell by what the rank has run and has yet to run, which the order of a plan without phases tells too."""
        if index == 0:
            return IdleCause.FILL
        if index <= self._first_backward:
            return IdleCause.WARMUP
        return IdleCause.COOLDOWN if index > self._last_forward else IdleCause.STEADY

    def _others(self, index: int, free: int) -> list[tuple[int, int, int]]:
        """(begin, end, index) of later actions that fit into the idle time before an action, one after the other."""
        found: list[tuple[int, int, int]] = []
        until, used, held = self._start[index], set[int](), self._held
        while True:
            fitting = [
                (max(free, self._ready[other]), other)
                for other in self._next_of_each(index, used)
                if max(free, self._ready[other]) + self._duration(other) <= until and self._has_room(held, index, other)
            ]
            if not fitting:
                return found
            begin, other = min(fitting)
            free = begin + self._duration(other)
            found.append((begin, free, other))
            used.add(other)
            held = held.copy()
            held[max(index - 1, 0) : other] += self._held[other] - self._held[other - 1]

    def _duration(self, index: int) -> int:
        return int(self._end[index] - self._start[index])

    def _next_of_each(self, index: int, used: set[int]) -> Iterator[int]:
        """The first later action of each kind and stage that is not used yet: those of one kind and stage keep their order."""
        for of_kind in self._indices:
            position = bisect_right(of_kind, index)
            while position < len(of_kind) and of_kind[position] in used:
                position += 1
            if position < len(of_kind):
                yield of_kind[position]

    @cached_property
    def _indices(self) -> list[list[int]]:
        """Positions of the actions of each kind and stage, in order."""
        stage = self._plan.table.stage[self._rows]
        code = self._kind * np.int64(self._plan.num_stages) + stage
        order = np.argsort(code, kind="stable")
        return [of_kind.tolist() for of_kind in np.split(order, np.flatnonzero(np.diff(code[order])) + 1)]

    def _has_room(self, held: npt.NDArray[np.int64], index: int, other: int) -> bool:
        """Return whether an action needs no more memory than the rank's peak if it runs before an earlier one."""
        if self._actions[other].kind not in (Kind.F, Kind.OVERLAP_F_B):
            return True
        return int(held[max(index - 1, 0) : other].max()) < int(self._held.max())
