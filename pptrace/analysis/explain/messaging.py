"""The graph of the way in which a run sends and receives, found from some of its steps before all are explained along it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.explain.binding import bindings_of
from pptrace.analysis.explain.explain import Steps, times_of_ranks
from pptrace.analysis.explain.inner_waits import no_inner_waits
from pptrace.analysis.explain.measured import costs_of_steps, posted_calls
from pptrace.analysis.explain.step_times import UNKNOWN, RankTimes, before_ops, step_times
from pptrace.analysis.matrix.step_matrix import StepMatrix, joined
from pptrace.analysis.message_graph import Graph
from pptrace.analysis.stragglers.messaging import with_messaging
from pptrace.schedule.plan import Plan
from pptrace.slices import Slice

_MOST_CELLS = 40_000
"""Steps × ops that are looked at: the way is the same in all steps."""


def graph_of_run(plan: Plan, steps: Steps, data: AlignedRun) -> Graph | None:
    """Find the graph of a run; None where its steps are as long as with receives that were posted ahead."""
    if plan.table.num_messages == 0:
        return None
    steps = steps[_sampled(plan, steps)]
    ranks = list(times_of_ranks(plan.table, steps, data))
    return _graph_of(plan, steps, ranks, lambda: [rank.calls for rank in ranks])


def graph_of_ranks(
    plan: Plan, steps: Steps, ranks: Sequence[RankTimes], data: AlignedRun | None = None
) -> Graph | None:
    """The same from what each rank measured in the windows of all steps; where they have no calls, these come from ``data``."""
    if plan.table.num_messages == 0:
        return None
    sampled = _sampled(plan, steps)
    before = np.cumsum([0, *map(len, steps)])[[sampled.start, sampled.stop]].tolist()
    steps, ranks = steps[sampled], [rank.of_windows(*before) for rank in ranks]

    def calls() -> list[Slice]:
        return [rank.calls for rank in (ranks if data is None else times_of_ranks(plan.table, steps, data))]

    return _graph_of(plan, steps, ranks, calls)


def _sampled(plan: Plan, steps: Steps) -> slice:
    """Steps from the middle of the run."""
    num = min(len(steps), max(1, _MOST_CELLS // (len(plan.table) * max(map(len, steps)))))
    first = (len(steps) - num) // 2
    return slice(first, first + num)


def _graph_of(plan: Plan, steps: Steps, ranks: Sequence[RankTimes], calls: Callable[[], list[Slice]]) -> Graph | None:
    """The graph of the steps, of which ``calls`` returns those of all ranks: they are needed where a graph may come closer."""
    times = step_times(plan.table, [window for windows in steps for window in windows], ranks)
    is_whole = times.is_whole
    if not is_whole.any() or (times.arrival[is_whole] == UNKNOWN).all():
        return None
    step, times = np.repeat(np.arange(len(steps)), list(map(len, steps)))[is_whole], times.whole()
    bindings = bindings_of(times, lambda ready: before_ops(ranks, RankTimes.exposed_before, ready, is_whole))
    nothing, outside = np.zeros_like(times.start), ranks[0].outside.where(slice(0))  # neither changes the way
    sizes, of_ranks = list(map(len, steps)), cache(calls)

    def costs_along(graph: Graph | None) -> list[StepMatrix]:
        posted = None if graph is None else posted_calls(graph, times, bindings, of_ranks(), is_whole)
        costs = costs_of_steps(times, bindings, no_inner_waits(), outside, step, sizes, nothing, posted)
        return [replace(same, plan=plan, graph=graph) for same in joined(known for known in costs if known is not None)]

    plain = costs_along(None)
    return with_messaging(plain[0], lambda graph: costs_along(graph)[0]).graph if plain else None
