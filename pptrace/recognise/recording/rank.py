"""The recording of one rank: what it cost, as far as its trace alone tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from pptrace.model.damage import RankDamage
from pptrace.model.traces import InputFormat, Trace
from pptrace.recognise.recording.boundaries import Boundaries
from pptrace.recognise.recording.event_cost import EventCost, cost_from_trace
from pptrace.recognise.recording.graph import RankGraph, graph_of

SETTINGS = "recording"
"""Fact: what the recorder of a trace was told to record."""
STEP_TIMES = "step_times"
"""Fact: when each step of a rank began and ended, recorded or not."""


@dataclass(frozen=True, slots=True)
class RankRecording:
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
    if settings.get("level") == "light":
        cost = EventCost.of_range()
    else:
        cost = cost_from_trace(trace.events, boundaries, len(trace.memory))
    if not cost.is_known:
        return RankRecording(settings=settings)
    times = [table[name].to_numpy() for table in tables for name in table.columns if name.endswith("_ns")]
    graph = graph_of(trace.events, boundaries, np.unique(np.concatenate(times)))
    return RankRecording(graph, cost, settings, trace.path, trace.rank)
