"""A plan compiled to a dependency graph, to be replayed once per step with that step's costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pptrace.schedule.actions import Action, Key
from pptrace.schedule.needs import needs_of
from pptrace.schedule.plan import Plan
from pptrace.simulator.costs import IDEAL
from pptrace.simulator.simulation import simulate


@dataclass(frozen=True, slots=True)
class _Need:
    """A dependency on the node at ``index``, and on the arrival of ``message`` if that is on another rank (None: it is not)."""

    index: int
    message: Key | None


@dataclass(frozen=True, slots=True)
class _ReplayNode:
    rank: int
    key: Key
    needs: tuple[_Need, ...]


@dataclass(frozen=True, slots=True)
class ReplayGraph:
    """A plan's compute actions in topological order."""

    plan: Plan
    nodes: tuple[_ReplayNode, ...]

    def makespan(self, durations: Mapping[Key, int], transfers: Mapping[Key, int]) -> int:
        """The makespan of the plan in ns: equal to that of :func:`~pptrace.simulator.simulation.simulate`.

        ``durations`` has every action; a message whose producing action ``transfers`` lacks takes no time.
        """
        free = [0] * self.plan.pp
        ended: list[int] = []
        for node in self.nodes:
            start = free[node.rank]
            for need in node.needs:
                arrival = ended[need.index]
                if need.message is not None:
                    arrival += transfers.get(need.message, 0)
                start = max(start, arrival)
            free[node.rank] = start + durations[node.key]
            ended.append(free[node.rank])
        return max(free)


def compile_plan(plan: Plan) -> ReplayGraph:
    """Compile a plan.

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
    # Of a key that a measured order has twice, the first run counts.
    index_of: dict[Key, int] = {}
    nodes = []
    for index, (_, _, rank, action) in enumerate(timed):
        nodes.append(_ReplayNode(rank, action.key, tuple(_needs(plan, action, index_of))))
        for half in action.halves:
            index_of.setdefault(half.key, index)
    return ReplayGraph(plan, tuple(nodes))


def _needs(plan: Plan, action: Action, index_of: Mapping[Key, int]) -> Iterator[_Need]:
    for half in action.halves:
        for any_of in needs_of(plan, half):
            key = next(key for key in any_of if key in index_of)
            is_remote = plan.placement[key[1]] != plan.placement[half.stage]
            yield _Need(index_of[key], key if is_remote else None)
