"""What recording one host event costs, judged from the trace alone.

From an event's end to the begin of the next one on its thread, in a chain of operators that call nothing else, a program does
next to nothing: of these gaps the 10th percentile is mostly the profiler's own work, and follows the speed of the machine and
what is recorded of each event. The whole cost of an event (both its boundaries, the memory that is touched for the first time,
callbacks of CUPTI inside of launches) is a multiple of it. The multiples were measured as the difference between steps with and
without the profiler, by number of events: ``tests/tools/observer_table.py``; docs/recording.md has the runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pptrace.model.traces import Category, Events
from pptrace.recognise.recording.boundaries import LONG_NS, Boundaries

_LEAST_GAPS = 200
_MICROSECOND = 1_000
_PERCENTILE = 10
_ON_HOST, _WITH_DEVICE, _WITH_SHAPES = 2.6, 3.1, 3.65
"""Cost of an event over the 10th percentile of gaps: without device events; with them; with them and shapes of inputs."""
_DOUBT = 0.25
"""By how much the cost may be off either way (90 %)."""
_MOST_OF_HOST = 0.65
"""Part of a busy host's time that recording takes at most."""


@dataclass(frozen=True, slots=True)
class EventCost:
    """The cost of recording one host event, ns, with its 90 % interval; 0 where it is not known."""

    value_ns: float = 0.0
    low_ns: float = 0.0
    high_ns: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.value_ns > 0


def cost_from_trace(
    events: Events, boundaries: Boundaries, settings: Mapping[str, Any], by_pptrace: bool = False
) -> EventCost:
    """The cost per event of one rank's recording, unknown where too few of its events show it.

    Args:
        settings: what was recorded of each event, by torch's names of the options.
        by_pptrace: whether ``pptrace run`` recorded it.
    """
    is_operator = events.category[boundaries.event] != Category.RUNTIME
    between = np.zeros(len(boundaries), dtype=np.bool_)
    between[1:] = boundaries.is_end[:-1] & ~boundaries.is_end[1:] & is_operator[:-1] & is_operator[1:]
    between[boundaries.first[:-1]] = False
    gaps = boundaries.gaps_ns
    total, weight = 0.0, 0
    for low, high in zip(boundaries.first[:-1].tolist(), boundaries.first[1:].tolist(), strict=True):
        of_thread = gaps[low:high][between[low:high]]
        if len(of_thread) >= _LEAST_GAPS and (of_thread % _MICROSECOND).any():  # whole microseconds are too coarse
            total += float(np.percentile(of_thread, _PERCENTILE)) * (high - low)
            weight += high - low
    if not weight:
        return EventCost()
    busy = gaps[gaps < LONG_NS].sum() / (len(boundaries) / 2)
    has_device = bool((events.category >= Category.KERNEL).any())
    with_shapes = bool(settings.get("record_shapes")) and not by_pptrace
    multiple = (_WITH_SHAPES if with_shapes else _WITH_DEVICE) if has_device else _ON_HOST
    value, most = multiple * total / weight, float(_MOST_OF_HOST * busy)
    if value > most:  # something else makes all gaps long
        return EventCost(most, most / 3, most)
    return EventCost(value, value * (1 - _DOUBT), value * (1 + _DOUBT))
