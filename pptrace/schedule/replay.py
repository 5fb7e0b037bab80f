"""Replay of a plan action by action: when each starts, if each takes a given time and starts as soon as it may.

The arithmetic is in :mod:`pptrace.schedule.replay_table`, which is imported with numpy when the first plan is replayed: whoever
only builds plans needs the standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, repeat
from typing import TYPE_CHECKING

from pptrace.schedule.actions import Action, Key, Kind
from pptrace.schedule.needs import Output

if TYPE_CHECKING:
    from pptrace.schedule.plan import Plan
    from pptrace.schedule.replay_table import Times

Duration = Callable[[int, Action], int]
"""(rank, action) → ns (or any other unit)."""


def unit_cost(_rank: int, action: Action) -> int:
    """The cost of an action with F = I = W = 1, hence B = 2."""
    return sum(2 if half.kind is Kind.B else 1 for half in action.halves)


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


@dataclass(frozen=True, eq=False)
class Replay:
    """A replayed plan: ``start`` and ``end`` of the rows of its table, −1 for those that never run."""

    plan: Plan
    start: Times
    end: Times

    @property
    def makespan(self) -> int:
        return int(self.end.max(initial=0))

    @cached_property
    def ranks(self) -> tuple[tuple[Timed, ...], ...]:
        """The timeline of each rank, as far as it gets."""
        return tuple(map(self.timeline, range(self.plan.pp)))

    def timeline(self, rank: int) -> tuple[Timed, ...]:
        """The actions of a rank that run."""
        begin, end = self.plan.table.rank_ptr[rank : rank + 2].tolist()
        num = int((self.plan.table.level[begin:end] >= 0).sum())  # they are its first ones
        times = (column[begin : begin + num].tolist() for column in (self.start, self.end))
        return tuple(map(Timed, self.plan.compute_actions(rank)[:num], *times))

    @cached_property
    def blocked(self) -> tuple[Blocked, ...]:
        """The ranks that get stuck (none of a valid plan)."""
        table, blocked = self.plan.table, []
        for rank, (begin, end) in enumerate(pairwise(table.rank_ptr.tolist())):
            index = int((table.level[begin:end] >= 0).sum())
            if begin + index < end:  # it waits for the first of its needs that never ends
                needed = slice(*table.dep_ptr[begin + index : begin + index + 2].tolist())
                has_ended = (table.dep[needed] >= 0) & (table.level[table.dep[needed]] >= 0)
                cell, output = divmod(int(table.dep_slot[needed][~has_ended][0]), len(Output))
                stage, microbatch = divmod(cell, table.num_microbatches)
                blocked.append(Blocked(rank, index, ((Kind.F, Kind.B, Kind.W)[output], stage, microbatch)))
        return tuple(blocked)


def replay(plan: Plan, duration: Duration | None = None, latency: int = 0) -> Replay:
    """Time every compute action of ``plan``, a tick each without a ``duration``; messages take ``latency``. Runs in time linear
    in their number.
    """
    from pptrace.schedule.replay_table import replay_table

    if duration is None:
        durations = [1] * len(plan.table)
    else:
        durations = [
            cost for rank in range(plan.pp) for cost in map(duration, repeat(rank), plan.compute_actions(rank))
        ]
    times = replay_table(plan.table, durations, latency)
    return Replay(plan, times.start, times.end)
