"""Bubbles of a rank by what is seen of their cause, and the gaps inside its ops, as sets of intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dashboards.tiles.tracks import Array
from pptrace.analysis.aligned import RankRows
from pptrace.intervals import EMPTY, Int64, intersect, merge, subtract, union
from pptrace.model.tables import MESSAGES
from pptrace.slices import Slice
from pptrace.timeline.lanes import Lane

CAUSES: Mapping[str, str] = {
    "host": "the host had not launched the next work",
    "fill": "before the rank's first op of the step: the pipeline fills",
    "drain": "after the rank's last op of the step: the pipeline drains",
    "late message": "the message that came next had not been sent, or was under way",
    "late collective": "a collective or exchange waited for a member",
    "other": "neither an op nor anything that it waits for was recorded",
}
"""Causes of bubbles, the first that applies, and what they say."""
GAPS_IN_OPS: Mapping[str, str] = {
    "not launched": "inside an op, and the host had not launched the next work",
    "no compute": "inside an op, and no kernel ran",
}


@dataclass(frozen=True)
class SendTimes:
    """Times at which matched messages were ready to be sent; ``match`` is sorted."""

    match: Int64
    start_ns: Int64

    @classmethod
    def of(cls, comms: pd.DataFrame) -> SendTimes:
        is_send = ((comms["kind"] == "send") & (comms["match"] >= 0)).to_numpy()
        match, start = comms["match"].to_numpy()[is_send], comms["start_ns"].to_numpy()[is_send]
        order = np.argsort(match, kind="stable")
        return cls(match[order], start[order])

    def of_matches(self, match: Int64) -> Int64:
        """The times of some messages; 0 of one that nobody sent."""
        if not len(self.match):
            return np.zeros(len(match), dtype=np.int64)
        at = np.minimum(np.searchsorted(self.match, match), len(self.match) - 1)
        return np.where(self.match[at] == match, self.start_ns[at], 0)


def bubbles_by_cause(
    rows: RankRows, lane: Lane | None, starts: Array, ends: Array, steps: Array, sent: SendTimes
) -> dict[str, Int64]:
    """The time of a rank without op and exposed communication in the windows of its steps, parted exactly by cause."""
    ops = rows.ops
    left = subtract(union(starts, ends), union(ops["start_ns"], ops["end_ns"]))
    if lane is not None:
        left = subtract(left, lane.exposed)
    first, last = _edges(ops, starts, ends, steps)
    candidates = {
        "host": EMPTY if lane is None or lane.idle is None else lane.idle.launch_starved,
        "fill": union(starts, first),
        "drain": union(last, ends),
        "late message": merge(_waits(rows.comms, of_messages=True), _before_sent(rows, sent)),
        "late collective": _waits(rows.comms, of_messages=False),
    }
    parts = {}
    for cause, intervals in candidates.items():
        parts[cause] = intersect(left, intervals)
        left = subtract(left, intervals)
    return parts | {"other": left}


def gaps_in_ops(rows: RankRows, lane: Lane | None) -> dict[str, Int64]:
    """The time in ops in which the rank's device neither computed nor communicated; empty without a device."""
    if lane is None or not lane.on_device:
        return dict.fromkeys(GAPS_IN_OPS, EMPTY)
    inside = subtract(union(rows.ops["start_ns"], rows.ops["end_ns"]), merge(lane.compute, lane.exposed))
    starved = EMPTY if lane.idle is None else intersect(inside, lane.idle.launch_starved)
    return dict(zip(GAPS_IN_OPS, (starved, subtract(inside, starved)), strict=True))


def _edges(ops: Slice, starts: Array, ends: Array, steps: Array) -> tuple[Array, Array]:
    """(start of the first, end of the last) op of each step; those of the window where the rank has none."""
    first, last = starts.copy(), ends.copy()
    if not len(ops):
        return ends.copy(), last
    low, high = (np.searchsorted(ops["step"], steps, side=side) for side in ("left", "right"))
    latest = np.maximum.accumulate(ops["end_ns"])
    has_ops = high > low
    first[has_ops], last[has_ops] = ops["start_ns"][low[has_ops]], latest[high[has_ops] - 1]
    return np.maximum(first, starts), np.minimum(last, ends)


def _waits(comms: Slice, *, of_messages: bool) -> Int64:
    is_message = (comms["axis"] == "pp") & comms.among("kind", MESSAGES)
    chosen = comms.where(is_message if of_messages else ~is_message)
    return union(chosen["start_ns"], chosen["end_ns"])


def _before_sent(rows: RankRows, sent: SendTimes) -> Int64:
    """The time from the end of the op before each receive until its message was ready to be sent."""
    comms, ops = rows.comms, rows.ops
    receives = comms.where((comms["axis"] == "pp") & (comms["kind"] == "recv") & (comms["match"] >= 0))
    if not len(receives) or not len(ops):
        return EMPTY
    ends = np.sort(ops["end_ns"])
    before = np.searchsorted(ends, receives["start_ns"], side="right") - 1
    known = before >= 0
    return union(ends[before[known]], sent.of_matches(receives["match"][known]))
