"""Steps of a rank whose steps nothing marks, from what tells them best: replays of graphs, optimizers, or repeated operators."""

from __future__ import annotations

import numpy as np

from pptrace.intervals import Int64
from pptrace.model.device import DeviceWork
from pptrace.model.traces import Events
from pptrace.recognise.repeats.calls_to_device import outermost_ranges
from pptrace.recognise.repeats.optimizer_steps import backward_nodes, steps_of_optimizers
from pptrace.recognise.repeats.repeated_calls import RepeatedSteps, repeated_steps


def steps_of_loop(events: Events, captures: Int64, work: DeviceWork, has_captured: bool) -> RepeatedSteps:
    """The steps of a rank; none of a loop that trains nothing.

    Operators that repeat are steps where each of them has one backward and no device runs their work: launches of kernels may be
    those of evaluation, or of the layers of one forward, and several backwards may be steps with an evaluation behind some.

    Args:
        captures: times in which CUDA graphs were captured.
        has_captured: a graph was captured in a step.
    """
    if len(work) or has_captured:
        repeats = repeated_steps(events, captures)
        return repeats if repeats.has_graphs or has_captured else steps_of_optimizers(events, work)
    of_optimizers = steps_of_optimizers(events, work)
    if len(of_optimizers) or of_optimizers.reason:
        return of_optimizers
    repeats = repeated_steps(events, captures)
    backwards = _begins_of_backwards(events)
    in_step = np.searchsorted(backwards, repeats.end_ns) - np.searchsorted(backwards, repeats.start_ns)
    return repeats if len(repeats) and (in_step == 1).all() else RepeatedSteps()


def _begins_of_backwards(events: Events) -> Int64:
    """Start of each backward, ns: of the first of autograd's nodes with no other operator of the loop's thread between."""
    nodes, outermost = backward_nodes(events), outermost_ranges(events)
    outermost = np.setdiff1d(outermost, nodes, assume_unique=True)
    before = np.searchsorted(events.start_ns[outermost], events.start_ns[nodes])
    return events.start_ns[nodes[np.diff(before, prepend=-1) > 0]]
