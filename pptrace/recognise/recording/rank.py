"""The recording of one rank: the cost of recording one host event, judged from the trace alone, and the graph of its events.

From the begin of an operator to the begin of the first one inside it a program does little but dispatch: of these gaps the 25th
percentile is mostly the recorder's own work, and follows the speed of the machine and what is recorded of each event. The whole
cost of an event (both its boundaries, memory that is touched for the first time, callbacks of CUPTI inside of launches) is about
the same multiple of it on all hosts and with all settings that were tried. Where no operators are recorded, the 25th percentile
of how long launches take follows the cost in their place. Both were measured as the difference between steps with and without
the profiler, by number of events: docs/recording.md has the runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct, field

from pptrace.model.damage import RankDamage
from pptrace.model.traces import Category, Events, InputFormat, Trace
from pptrace.recognise.device.work import device_rows, kernel_launches
from pptrace.recognise.recording.boundaries import LONG_NS, Boundaries
from pptrace.recognise.recording.graph import RankGraph, graph_of

SETTINGS = "recording"
"""Fact: what the recorder of a trace was told to record."""
STEP_TIMES = "step_times"
"""Fact: when each step of a rank began and ended, recorded or not."""
_LEAST_GAPS, _LEAST_LAUNCHES = 200, 100
_MICROSECOND = 1_000
_PERCENTILE = 25
_MULTIPLE = 3.25
"""Cost of an event over the percentile of gaps."""
_MULTIPLE_OF_LAUNCH = 1.6
"""Cost of a call of the runtime over the percentile of launches, where no operators are recorded."""
_LOW, _HIGH = 0.7, 1.4
"""The 90 % interval of the cost, as a multiple of it."""
_MOST_OF_HOST = 0.65
"""Part of a busy host's time that recording takes at most."""


class EventCost(Struct, frozen=True):
    """The cost of recording one host event, ns, with its 90 % interval; 0 where it is not known."""

    value_ns: float = 0.0
    low_ns: float = 0.0
    high_ns: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.value_ns > 0


_COST_OF_FEW = EventCost(3_000.0, 1_000.0, 6_000.0)
"""The cost of an event where ranges alone were recorded, or hosts do little but replay graphs: of few, hardly any, and not known
better.
"""
_FEW_EVENTS = 0.2
"""Boundaries of host events for each piece of device work, where they are few."""


def cost_from_trace(events: Events, boundaries: Boundaries, num_instants: int = 0) -> EventCost:
    """The cost per event of one rank's recording, unknown where too few of its events show it.

    Args:
        num_instants: events without a length, such as allocations: each costs as much as an event, and they are everywhere.
    """
    total, weight = 0.0, 0
    for low, high in zip(boundaries.first[:-1].tolist(), boundaries.first[1:].tolist(), strict=True):
        begins = ~boundaries.is_end[low:high] & (boundaries.category[low:high] != Category.RUNTIME)
        enters = low + 1 + np.flatnonzero(begins[:-1] & begins[1:])
        of_thread = boundaries.time_ns[enters] - boundaries.time_ns[enters - 1]
        if len(of_thread) >= _LEAST_GAPS and (of_thread % _MICROSECOND).any():  # whole microseconds are too coarse
            total += float(np.percentile(of_thread, _PERCENTILE)) * (high - low)
            weight += high - low
    num_events = len(boundaries) / 2
    if (events.category == Category.CPU_OP).any():
        value = _MULTIPLE * total / max(weight, 1) * (1 + num_instants / num_events)
    else:
        lengths = events.dur_ns[kernel_launches(events, device_rows(events))[0]]
        is_known = len(lengths) >= _LEAST_LAUNCHES and bool((lengths % _MICROSECOND).any())
        value = _MULTIPLE_OF_LAUNCH * float(np.percentile(lengths, _PERCENTILE)) if is_known else 0.0
    if not value:
        return EventCost()
    busy_ns = sum(int(gaps[gaps < LONG_NS].sum()) for gaps in map(boundaries.gaps_ns, boundaries.blocks()))
    most = float(_MOST_OF_HOST * busy_ns / num_events)
    if value > most:  # something else makes all gaps long
        return EventCost(most, most / 3, most)
    return EventCost(value, value * _LOW, value * _HIGH)


class RankRecording(Struct, frozen=True):
    """The graph of a rank's events and what recording one of them cost; empty where nothing tells that.

    ``file`` and ``file_rank`` are where the events are: the file, and the rank that it says they are of. ``damage`` is what of
    them is damaged.
    """

    graph: RankGraph = field(default_factory=RankGraph)
    cost: EventCost = field(default_factory=EventCost)
    settings: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""
    file_rank: int | None = None
    damage: RankDamage = field(default_factory=RankDamage)


def recording_of(trace: Trace, tables: Sequence[pd.DataFrame]) -> RankRecording:
    """The recording of a trace; empty for formats whose cost is not known.

    Args:
        tables: what was recognised in it: where their rows begin and end, the graph has nodes.
    """
    found = trace.metadata.get(SETTINGS)
    settings = dict(found) if isinstance(found, Mapping) else {}
    if trace.format is not InputFormat.KINETO or not len(trace.events):
        return RankRecording(settings=settings)
    boundaries = Boundaries.of(trace.events)
    cost = cost_from_trace(trace.events, boundaries, len(trace.memory))
    has_few = len(boundaries) < _FEW_EVENTS * len(device_rows(trace.events))
    if not cost.is_known and (has_few or settings.get("level") == "light"):
        cost = _COST_OF_FEW
    if not cost.is_known:
        return RankRecording(settings=settings)
    times = [table[name].to_numpy() for table in tables for name in table.columns if name.endswith("_ns")]
    graph = graph_of(trace.events, boundaries, np.unique(np.concatenate(times)), cost.value_ns)
    return RankRecording(graph, cost, settings, trace.path, trace.rank)
