"""The way in which a run sends and receives: by which replay its steps are as long as they were.

Replays take over what ranks were measured to wait for messages, beyond the ops that these need. That is right as long as nobody
else is late: where a send blocks until its reader has posted the receive, or a receive begins when its rank comes to it, such
waits change with what ranks are busy with. Where the steps are clearly closer to a replay in which messages hold up ranks in one
of these ways, causes and gains are those of that replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from pptrace.analysis.matrix.step_matrix import StepMatrix, longest_of_steps
from pptrace.analysis.message_graph import Graph, Messaging, make_graph
from pptrace.errors import ScheduleError
from pptrace.schedule.plan import Plan

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


def with_messaging(costs: StepMatrix, along: Callable[[Graph], StepMatrix]) -> StepMatrix:
    """The costs with the graph of the way that comes closest; without one where none is clearly closer than measured waits.

    ``along`` returns the costs for replays along a graph.
    """
    if costs.plan is None:
        return costs
    stride = -(-costs.durations.size // _MOST_REPLAYED)
    error = _error_of(costs.every(stride))
    if error <= _CLEARLY:
        return costs
    every = map(along, _graphs(costs.plan))
    errors = [(_error_of(of_graph.every(stride)), of_graph) for of_graph in every]
    least, closest = min(errors, key=lambda entry: entry[0], default=(error, costs))
    return closest if least < error - _CLEARLY else costs


def _graphs(plan: Plan) -> Iterator[Graph]:
    for messaging, prefetch in _WAYS:
        with suppress(ScheduleError):
            yield make_graph(plan, messaging, prefetch)


def _error_of(costs: StepMatrix) -> float:
    """Distance of replayed steps from the measured ones, as a part of them: the median of the steps."""
    measured = longest_of_steps(costs.step, costs.spans)
    return float(np.median(np.abs(costs.lengths - measured) / np.maximum(measured, 1)))
