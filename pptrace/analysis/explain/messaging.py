"""The way in which a run sends and receives: by which replay its steps are as long as they were.

Replays take over what ranks were measured to wait for messages, beyond the ops that these need. That is right as long as nobody
else is late: where a send blocks until its reader has posted the receive, or a receive begins when its rank comes to it, such
waits change with what ranks are busy with. Where some of the steps are clearly closer to a replay in which messages hold up ranks
in one of these ways, all of them are explained along its graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.explain.binding import bindings_of
from pptrace.analysis.explain.explain import Steps, times_of_ranks
from pptrace.analysis.explain.inner_waits import no_inner_waits
from pptrace.analysis.explain.measured import along_graph, costs_of_windows
from pptrace.analysis.explain.step_times import UNKNOWN, before_ops, step_times
from pptrace.analysis.matrix.step_matrix import StepMatrix, longest_of_steps
from pptrace.errors import ScheduleError
from pptrace.schedule.message_graph import Graph, Messaging, make_graph
from pptrace.schedule.plan import Plan

_MOST_CELLS = 40_000
"""Steps × ops that are looked at: the way is the same in all steps."""
_CLEARLY = 0.005
"""Share of a step by which another way has to come closer to the measured steps."""
_MOST_REPLAYED = 400_000
"""Ops in the replays of each way that is tried."""
_WAYS = (
    (Messaging.BLOCKING_RECEIVES, 0),
    (Messaging.BLOCKING_RECEIVES, 1),
    (Messaging.RENDEZVOUS, 0),
    (Messaging.ONE_CALL_AT_A_TIME, 0),
)
"""Ways other than the measured waits, with how many ops ahead receives are posted."""


def graph_of_run(plan: Plan, steps: Steps, data: AlignedRun) -> Graph | None:
    """Find the graph of a run; None where its steps are as long as with receives that were posted ahead."""
    num = min(len(steps), max(1, _MOST_CELLS // (len(plan.table) * max(map(len, steps)))))
    first = (len(steps) - num) // 2
    steps = steps[first : first + num]  # from the middle of the run
    ranks = list(times_of_ranks(plan.table, steps, data))
    times = step_times(plan.table, [window for windows in steps for window in windows], ranks)
    is_whole = times.is_whole
    if plan.table.num_messages == 0 or not is_whole.any() or (times.arrival[is_whole] == UNKNOWN).all():
        return None
    sizes = list(map(len, steps))
    step, times = np.repeat(np.arange(len(steps)), sizes)[is_whole], times.whole()
    complete = np.flatnonzero((np.bincount(step, minlength=len(steps)) == sizes)[step])
    if not len(complete):
        return None
    bindings = bindings_of(
        times, lambda ready: before_ops(((rank.ops, rank.exposed) for rank in ranks), ready, is_whole)
    )
    nothing, outside = np.zeros_like(times.start), ranks[0].outside.where(slice(0))  # neither changes the way
    every = costs_of_windows(times, bindings, no_inner_waits(), outside, nothing)
    calls = [rank.calls for rank in ranks]

    def costs_along(graph: Graph) -> StepMatrix:
        return along_graph(every, graph, times, bindings, calls, is_whole, nothing).of_windows(complete)

    return closest_graph(plan, every.of_windows(complete), costs_along)


def closest_graph(plan: Plan, costs: StepMatrix, along: Callable[[Graph], StepMatrix]) -> Graph | None:
    """The graph of the way that comes closest to the measured steps; None where none is clearly closer than measured waits.

    ``along`` returns the costs for replays along a graph.
    """
    stride = -(-costs.durations.size // _MOST_REPLAYED)
    error = _error_of(costs.every(stride))
    if error <= _CLEARLY:
        return None
    errors: list[tuple[float, Graph | None]] = [(error - _CLEARLY, None)]
    for messaging, prefetch in _WAYS:
        with suppress(ScheduleError):
            graph = make_graph(plan, messaging, prefetch)
            errors.append((_error_of(along(graph).every(stride)), graph))
    return min(errors, key=lambda entry: entry[0])[1]


def _error_of(costs: StepMatrix) -> float:
    """Distance of replayed steps from the measured ones, as a part of them: the median of the steps."""
    measured = longest_of_steps(costs.step, costs.spans)
    return float(np.median(np.abs(costs.lengths - measured) / np.maximum(measured, 1)))
