"""The cost of recording one host event, judged from the trace alone.

From the begin of an operator to the begin of the first one inside it a program does little but dispatch: of these gaps the 25th
percentile is mostly the recorder's own work, and follows the speed of the machine and what is recorded of each event. The whole
cost of an event (both its boundaries, memory that is touched for the first time, callbacks of CUPTI inside of launches) is about
the same multiple of it on all hosts and with all settings that were tried. It was measured as the difference between steps with
and without the profiler, by number of events: docs/recording.md has the runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pptrace.model.traces import Category, Events
from pptrace.recognise.recording.boundaries import LONG_NS, Boundaries

_LEAST_GAPS = 200
_MICROSECOND = 1_000
_PERCENTILE = 25
_MULTIPLE = 3.25
"""Cost of an event over the percentile of gaps."""
_LOW, _HIGH = 0.7, 1.4
"""The 90 % interval of the cost, as a multiple of it."""
_OF_RANGE_NS = (3_000.0, 1_000.0, 6_000.0)
_MOST_OF_HOST = 0.65
"""Part of a busy host's time that recording takes at most."""


@dataclass(frozen=True, slots=True)
class EventCost:
    """The cost of recording one host event, ns, with its 90 % interval; 0 where it is not known."""

    value_ns: float = 0.0
    low_ns: float = 0.0
    high_ns: float = 0.0

    @classmethod
    def of_range(cls) -> EventCost:
        """The cost of a range where nothing else was recorded: of few, hardly any, and not known better."""
        return cls(*_OF_RANGE_NS)

    @property
    def is_known(self) -> bool:
        return self.value_ns > 0


def cost_from_trace(events: Events, boundaries: Boundaries, num_instants: int = 0) -> EventCost:
    """The cost per event of one rank's recording, unknown where too few of its events show it.

    Args:
        num_instants: events without a length, such as allocations: each costs as much as an event, and they are everywhere.
    """
    is_call = events.category[boundaries.event] == Category.RUNTIME
    enters = np.zeros(len(boundaries), dtype=np.bool_)
    enters[1:] = ~boundaries.is_end[:-1] & ~boundaries.is_end[1:] & ~is_call[:-1] & ~is_call[1:]
    enters[boundaries.first[:-1]] = False
    gaps = boundaries.gaps_ns
    total, weight = 0.0, 0
    for low, high in zip(boundaries.first[:-1].tolist(), boundaries.first[1:].tolist(), strict=True):
        of_thread = gaps[low:high][enters[low:high]]
        if len(of_thread) >= _LEAST_GAPS and (of_thread % _MICROSECOND).any():  # whole microseconds are too coarse
            total += float(np.percentile(of_thread, _PERCENTILE)) * (high - low)
            weight += high - low
    if not weight:
        return EventCost()
    num_events = len(boundaries) / 2
    value = _MULTIPLE * total / weight * (1 + num_instants / num_events)
    most = float(_MOST_OF_HOST * gaps[gaps < LONG_NS].sum() / num_events)
    if value > most:  # something else makes all gaps long
        return EventCost(most, most / 3, most)
    return EventCost(value, value * _LOW, value * _HIGH)
