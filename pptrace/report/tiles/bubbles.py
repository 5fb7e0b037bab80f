"""Time in which a rank computes in no op: between its ops and inside them, as sets of intervals."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.analysis.aligned import RankRows
from pptrace.intervals import EMPTY, Int64, intersect, merge, subtract, union
from pptrace.report.tiles.tracks import Array
from pptrace.slices import Slice
from pptrace.timeline.lanes import Lane, is_message

STATES: Mapping[str, str] = {
    "exposed transfer": "data was transferred, and nothing was computed meanwhile",
    "waiting or transfer": "communication that nothing hides; its other side is not in the traces, so that it may be waiting",
    "other work": "work outside of any op",
    "not launched": "the host had not launched the next work",
    "fill": "before the rank's first op of the step: the pipeline fills",
    "drain": "after the rank's last op of the step: the pipeline drains",
    "late message": "the message that came next had not been sent, or was under way",
    "late collective": "a collective or exchange waited for a member",
    "unexplained": "nothing that was recorded explains it",
}
"""States of a rank that computes in no op, the first that applies, and what they say."""
OTHER_ORDER, IDLE = "other order", "idle"
"""States of simulated ranks alone."""
MEANINGS: Mapping[str, str] = {
    **STATES,
    OTHER_ORDER: "another of its actions could have run, in no more memory",
    IDLE: "waits for a message, or for the rank at its other end",
}
BETWEEN_OPS_ALONE = frozenset({"other work", "fill", "drain", "late message"})


class SendTimes(Struct, frozen=True):
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


def idle_by_state(
    rows: RankRows, lane: Lane | None, starts: Array, ends: Array, steps: Array, sent: SendTimes
) -> dict[str, Int64]:
    """The time of a rank without op, from the first to the last that is known of it, parted exactly by :data:`STATES`.

    Args:
        rows: what was recorded of the rank; of one without ops its compute counts as ops.
        lane: what it did.
        starts: of its steps' windows, ns.
        ends: of the windows.
        steps: their numbers.
        sent: when messages were sent.
    """
    ops, windows = rows.ops, union(starts, ends)
    of_ops = union(ops["start_ns"], ops["end_ns"])
    if lane is not None and not len(ops):
        of_ops = lane.compute
    known = np.concatenate((windows, of_ops, union(rows.comms["start_ns"], rows.comms["end_ns"])))
    left = subtract(union([known[:, 0].min()], [known[:, 1].max()]) if len(known) else EMPTY, of_ops)
    first, last = _edges(ops, starts, ends, steps)
    candidates = {
        "exposed transfer": EMPTY if lane is None else lane.exposed,
        "waiting or transfer": EMPTY if lane is None else lane.unknown,
        "other work": EMPTY if lane is None else lane.compute,
        "not launched": EMPTY if lane is None or lane.idle is None else lane.idle.launch_starved,
        "fill": union(starts, first),
        "drain": union(last, ends),
        "late message": merge(_waits(rows.comms, of_messages=True), _before_sent(rows, sent)),
        "late collective": _waits(rows.comms, of_messages=False),
    }
    parts = _parted(left, candidates)
    ranges = intersect(parts["unexplained"], _other_ranges(rows, lane, windows))
    if not len(ranges):
        return parts
    other, unexplained = merge(parts["other work"], ranges), subtract(parts["unexplained"], ranges)
    return parts | {"other work": other, "unexplained": unexplained}


def gaps_in_ops(rows: RankRows, lane: Lane | None) -> dict[str, Int64]:
    """The time in ops in which a rank did not compute, parted exactly by those of :data:`STATES` that are possible there."""
    if lane is None:
        return {name: EMPTY for name in STATES if name not in BETWEEN_OPS_ALONE}
    inside = subtract(union(rows.ops["start_ns"], rows.ops["end_ns"]), lane.compute)
    candidates = {
        "exposed transfer": lane.exposed,
        "waiting or transfer": lane.unknown,
        "not launched": EMPTY if lane.idle is None else lane.idle.launch_starved,
        "late collective": lane.not_overlapped,
    }
    return _parted(inside, candidates)


def _parted(left: Int64, candidates: Mapping[str, Int64]) -> dict[str, Int64]:
    """Some time by the first candidate that covers it; what is left is unexplained."""
    parts = {}
    for name, intervals in candidates.items():
        parts[name] = intersect(left, intervals) if len(intervals) and len(left) else EMPTY
        left = subtract(left, parts[name]) if len(parts[name]) else left
    return parts | {"unexplained": left}


def _other_ranges(rows: RankRows, lane: Lane | None, windows: Int64) -> Int64:
    """Time between the steps that a rank's other ranges took, where no device was recorded, whose work would tell more."""
    if lane is None or lane.on_device:
        return EMPTY
    spans = rows.spans.where(rows.spans["kind"] != "STEP")
    return subtract(union(spans["start_ns"], spans["end_ns"]), windows)


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
    chosen = comms.where(is_message(comms) == of_messages)
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
