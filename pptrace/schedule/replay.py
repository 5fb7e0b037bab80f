"""Replay of a plan: start times of all actions, if each takes a given time and starts as soon as it may.

This is the one engine behind validation (does it end?), lowering (in which order do messages travel?) and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pptrace.schedule.actions import Action, Key, Kind
from pptrace.schedule.needs import NEEDS, OUTPUT_OF, neighbour
from pptrace.schedule.plan import Plan

Duration = Callable[[int, Action], int]
"""(rank, action) → ns (or any other unit)."""

Latency = Callable[[Action, int, int], int]
"""(producing action, its rank, reading rank) → time from the producer's end until the reader may use the data."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with its start and end."""

    action: Action
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that is stuck: its action at ``index`` waits for ``needs``, which never ends."""

    rank: int
    index: int
    needs: Key


@dataclass(frozen=True, slots=True)
class Replay:
    """The timeline of each rank, and the ranks that got stuck (none for a valid plan)."""

    ranks: tuple[tuple[Timed, ...], ...]
    blocked: tuple[Blocked, ...]

    @property
    def makespan(self) -> int:
        return max((row[-1].end for row in self.ranks if row), default=0)


def one_tick(_rank: int, _action: Action) -> int:
    """Every action takes 1."""
    return 1


def no_latency(_action: Action, _source: int, _target: int) -> int:
    """Messages arrive at once."""
    return 0


def replay(plan: Plan, duration: Duration = one_tick, latency: Latency = no_latency) -> Replay:
    """Time every compute action of ``plan``; sends and receives are edges with a latency, not actions.

    Runs in time linear in the number of actions.
    """
    return _Engine(plan, duration, latency).run()


class _Engine:
    """Runs ranks one after the other as far as each can go; a finished action wakes the ranks that wait for it.

    Everything that can be waited for has a slot: (stage · m + microbatch) · 3 + {forward, backward, weight gradient}.
    Plans have millions of actions, so this uses slots and lists where the rest of the package uses types.
    """

    def __init__(self, plan: Plan, duration: Duration, latency: Latency) -> None:
        self.plan = plan
        self.duration = duration
        self.latency = latency
        self.rows: list[Sequence[Action]] = [plan.compute_actions(rank) for rank in range(plan.pp)]
        self.times: list[list[Timed]] = [[] for _ in self.rows]
        num_slots = plan.num_stages * plan.num_microbatches * 3
        self.ended: list[int] = [-1] * num_slots
        self.producer: list[Action | None] = [None] * num_slots
        self.waiters: dict[int, list[int]] = {}
        self.neighbour = {hop: [neighbour(plan, stage, hop) for stage in range(plan.num_stages)] for hop in (-1, 0, 1)}

    def run(self) -> Replay:
        ready = list(range(self.plan.pp))
        blocked: dict[int, int] = {}
        while ready:
            rank = ready.pop()
            slot = self._advance(rank, ready)
            if slot is None:
                blocked.pop(rank, None)
            else:
                blocked[rank] = slot
        stuck = tuple(Blocked(rank, len(self.times[rank]), self._key(slot)) for rank, slot in sorted(blocked.items()))
        return Replay(tuple(map(tuple, self.times)), stuck)

    def _advance(self, rank: int, ready: list[int]) -> int | None:
        """Run a rank's actions until one has to wait; returns the slot it waits for, None when the rank is done."""
        row, timeline, ended = self.rows[rank], self.times[rank], self.ended
        placement, m = self.plan.placement, self.plan.num_microbatches
        free = timeline[-1].end if timeline else 0
        for index in range(len(timeline), len(row)):
            action = row[index]
            start = free
            for half in action.halves:
                for slot in self._needs(half):
                    arrival = ended[slot]
                    if arrival < 0:
                        self.waiters.setdefault(slot, []).append(rank)
                        return slot
                    source = placement[slot // (3 * m)]
                    if source != rank:
                        producer = self.producer[slot]
                        assert producer is not None
                        arrival += self.latency(producer, source, rank)
                    if arrival > start:
                        start = arrival
            free = start + self.duration(rank, action)
            timeline.append(Timed(action, start, free))
            for half in action.halves:
                slot = (half.stage * m + (half.microbatch or 0)) * 3 + OUTPUT_OF[half.kind]
                ended[slot] = free
                self.producer[slot] = half
                if slot in self.waiters:
                    ready.extend(self.waiters.pop(slot))
        return None

    def _needs(self, half: Action) -> list[int]:
        """The slots of :func:`~pptrace.schedule.needs.needs_of`."""
        m, microbatch = self.plan.num_microbatches, half.microbatch or 0
        return [
            (stage * m + microbatch) * 3 + need.output
            for need in NEEDS.get(half.kind, ())
            if (stage := self.neighbour[need.hop][half.stage]) is not None
        ]

    def _key(self, slot: int) -> Key:
        cell, what = divmod(slot, 3)
        stage, microbatch = divmod(cell, self.plan.num_microbatches)
        return ((Kind.F, Kind.B, Kind.W)[what], stage, microbatch)
