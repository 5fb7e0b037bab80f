"""A plan made ready to be run on paper many times, with other costs each time: as often as a run has steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pptrace.schedule.actions import Action, Key
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import needs_of
from pptrace.simulator.costs import IDEAL
from pptrace.simulator.simulation import simulate


@dataclass(frozen=True, slots=True)
class _Need:
    """The action at ``place`` must have ended, and ``message`` have come if that is on another rank (None: on the same)."""

    place: int
    message: Key | None


@dataclass(frozen=True, slots=True)
class _ReplayNode:
    rank: int
    key: Key
    needs: tuple[_Need, ...]


@dataclass(frozen=True, slots=True)
class ReplayGraph:
    """A plan's compute actions in an order in which each comes after all that it needs."""

    plan: Plan
    stops: tuple[_ReplayNode, ...]

    def makespan(self, durations: Mapping[Key, int], transfers: Mapping[Key, int]) -> int:
        """How long the plan takes, ns: what :func:`~pptrace.simulator.simulation.simulate` finds.

        ``durations`` has every action; a message of which ``transfers`` has not the producing action comes at once.
        """
        free = [0] * self.plan.pp
        ended: list[int] = []
        for stop in self.stops:
            start = free[stop.rank]
            for need in stop.needs:
                arrival = ended[need.place]
                if need.message is not None:
                    arrival += transfers.get(need.message, 0)
                start = max(start, arrival)
            free[stop.rank] = start + durations[stop.key]
            ended.append(free[stop.rank])
        return max(free)


def compile_plan(plan: Plan) -> ReplayGraph:
    """Make a plan ready.

    Raises:
        ScheduleError: the plan cannot run to the end.
    """
    timed = sorted(
        (
            (timed.start, timed.end, rank.rank, timed.action)
            for rank in simulate(plan, IDEAL).ranks
            for timed in rank.timeline
        ),
        key=lambda entry: entry[:3],
    )
    places: dict[
        Key, int
    ] = {}  # of what has run: an action that a measured order has twice counts from its first run on
    stops = []
    for place, (_, _, rank, action) in enumerate(timed):
        stops.append(_ReplayNode(rank, action.key, tuple(_needs(plan, action, places))))
        for half in action.halves:
            places.setdefault(half.key, place)
    return ReplayGraph(plan, tuple(stops))


def _needs(plan: Plan, action: Action, places: Mapping[Key, int]) -> Iterator[_Need]:
    for half in action.halves:
        for any_of in needs_of(plan, half):
            key = next(key for key in any_of if key in places)
            is_away = plan.placement[key[1]] != plan.placement[half.stage]
            yield _Need(places[key], key if is_away else None)
