"""Parts of a step outside its pipeline: from the last op to the first one of the next step.

A step is as long as the time from its first op to the next one's, its period: that counts for throughput. What of it is after the
pipeline is walked back along what was waited for, from the first op of the next step, on its rank. At each moment the walk is on
one rank, and what that rank did is the part: a range (optimizer, loading of data, evaluation, …), a transfer of a collective, or
nothing that a trace names. Where the rank waited in a collective for the member that came last, the walk goes on at that member
when it came: a slow loader of rank 3 before a barrier is rank 3's. Where members have no trace, or the call has no match, what it
takes beyond its transfer is waiting for ranks that are not recorded, or for one that is not known; the transfer takes no longer
than the shortest call of its like, a barrier has none. What runs in the pipeline's own time lengthens nothing, and is
in no part.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.aligned import AlignedRun, RankRows
from pptrace.analysis.result import StepReport
from pptrace.analysis.whole_run import OutsidePart
from pptrace.intervals import Int64, lengths_within, union
from pptrace.marks import Collective
from pptrace.model.tables import COMPUTE_KINDS, MESSAGES, Bool
from pptrace.slices import Slice, distinct_of, reduce_groups
from pptrace.timeline.lanes import Lane
from pptrace.timeline.windows import StepBounds, StepWindow, step_bounds

OTHER, HOST, COMPUTE = "other", "host", "compute"
UNRECORDED, UNKNOWN_RANK = "unrecorded_ranks", "unknown_rank"
"""Waiting in collectives, or in receives of the pipeline, for ranks that have no trace; in collectives for a member that is not
known, as the call has no match.
"""
OVERLAP = "overlap"
"""Negative: the next step's pipeline begins before this one's has ended."""
OF_SPANS = {
    "OPTIMIZER": "optimizer",
    "DATA": "data",
    "EVAL": "evaluation",
    "CHECKPOINT": "checkpoint",
    "LOGGING": "logging",
    "GRAD_SYNC": "gradient_sync",
    "GC": "garbage_collection",
}
DATA_PARALLEL = re.compile(r"dp|fsdp|data|hsdp")
_REDUCTIONS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)
_FIRST = ("GC", "DATA", "CHECKPOINT", "LOGGING", "OPTIMIZER", "GRAD_SYNC", "EVAL", *COMPUTE_KINDS, COMPUTE)
"""Kinds of ranges in their order: of those around one moment the first one is the part."""
_MOST_HOPS = 10_000


def with_periods(
    steps: Sequence[StepReport], windows: Sequence[StepWindow], data: AlignedRun, num_ranks: int = 0
) -> tuple[StepReport, ...]:
    """The steps with their periods, and with the parts of these outside the pipeline.

    Args:
        windows: those of all pipelines, of steps that are not reported too, where a step before ends; () without any.
        data: everything measured.
        num_ranks: ranks of the run; where it is more than there are traces, some are not recorded.
    """
    if not windows:
        bounds = step_bounds(data.ops, data.work, data.clock)
        return tuple(replace(step, period_ns=_marked_period(step, bounds, data)) for step in steps)
    inside = union([window.start_ns for window in windows], [window.end_ns for window in windows])
    lacks_ranks = num_ranks > len(data.work)
    outside = {
        rank: outside_rows(data.rows.of_rank(rank), data.lanes.get(rank), inside, lacks_ranks) for rank in data.work
    }
    of_step: dict[int, list[StepWindow]] = {}
    for window in windows:
        of_step.setdefault(window.step, []).append(window)
    bounds = step_bounds(data.ops, {}, data.clock)
    timelines = _Timelines(data, outside, lacks_ranks)
    lost = frozenset().union(*data.lost_steps.values())  # when these begin is not known
    return tuple(
        _with_period(step, of_step, bounds, timelines)
        if step.span_ns is not None and step.step in of_step and step.step + 1 not in lost
        else step
        for step in steps
    )


def _marked_period(step: StepReport, bounds: StepBounds, data: AlignedRun) -> int | None:
    """The period of a step that ranges mark; where nothing relates its ranks' clocks, the longest of each rank by itself."""
    ranks = tuple(rank.rank for rank in step.ranks)
    # Clocks have to be known to half the length of a rank's own range: the bounds of the step may be those of different clocks.
    if data.shares_clock(StepWindow(step.step, ranks, 0, step.span_ns or 0)):
        begin = bounds.begin_ns.get(step.step)
        end = bounds.begin_ns.get(step.step + 1, bounds.last_end_ns(step.step))
        return None if begin is None or end is None or end <= begin else end - begin
    marked = {rank: bounds.ranges_ns[step.step, rank] for rank in ranks if (step.step, rank) in bounds.ranges_ns}
    followed = [rank for rank in marked if (step.step + 1, rank) in bounds.ranges_ns]
    periods = [bounds.ranges_ns[step.step + 1, rank][0] - marked[rank][0] for rank in followed]
    return max(periods or [end - begin for begin, end in marked.values()], default=0) or None


def _with_period(
    step: StepReport, of_step: Mapping[int, Sequence[StepWindow]], bounds: StepBounds, timelines: _Timelines
) -> StepReport:
    """A step of pipelines; the last one ends with the range of the rank that began it, and what that rank usually does in such a
    range before its first op is taken for what it did before the first op of the next step, which was not recorded.
    """
    previous, windows, following = (of_step.get(step.step + offset, ()) for offset in (-1, 0, 1))
    longest = max(windows, key=lambda window: window.span_ns)
    lead_ns = lead_end = 0
    if following:
        next_one = min(following, key=_begins)
        rank, end = timelines.first_rank(next_one), next_one.start_ns
    else:
        first = min(windows, key=_begins)
        rank = timelines.first_rank(first)
        marked, end = bounds.ranges_ns.get((step.step, rank), (0, 0))
        before_ns = max((window.end_ns for window in previous), default=marked)
        if not end or (step.has_devices and (marked < before_ns or end < longest.end_ns)):  # its host runs ahead
            return step
        if not step.has_devices or previous:  # a first step on devices begins while recorders start
            lead_ns, lead_end = timelines.usual_lead(rank, bounds)
    parts = timelines.walk(rank, end, longest.end_ns)
    parts.update(timelines.walk(timelines.first_rank(longest), longest.start_ns, step.start_ns))
    parts.update(timelines.walk(rank, lead_end, lead_end - lead_ns))
    if end < longest.end_ns:
        parts[OVERLAP, ()] += end - longest.end_ns
    outside = [OutsidePart(name, dict(where), ns) for (name, where), ns in parts.items()]
    ordered = sorted(outside, key=lambda part: (-part.ns, part.part))
    return replace(step, period_ns=end + lead_ns - step.start_ns, outside=tuple(ordered))


def _begins(window: StepWindow) -> tuple[int, int]:
    """The start of a window; of those that start together the longest comes first."""
    return window.start_ns, -window.span_ns


Named = tuple[str, tuple[tuple[str, int | str], ...]]
"""A part and its place."""


OutsideRows = tuple[Slice, Int64 | None]
"""Ranges and collectives of a rank outside of pipelines' windows, and when its device waited for launches there, as a set of
intervals; None without a device.

Columns: of the rows around one moment the one with the largest ``weight`` is the ``part`` of it. ``axis`` is that of a
collective, "" of a range. From ``begun_ns`` on a member of a collective is there; it has ``members`` (−1: unknown), and takes
``transfer_ns`` at most to transfer.
"""


def outside_rows(rows: RankRows, lane: Lane | None, inside: Int64, lacks_ranks: bool = False) -> OutsideRows:
    """Rows of a rank outside of pipelines.

    Args:
        rows: of the rank, on the common clock.
        inside: the time in which pipelines run.
        lacks_ranks: whether ranks of the run have no trace: what is received from them is waited for.
    """

    def are_outside(start: Int64, end: Int64) -> Bool:
        """Mark what does not lie wholly inside the pipelines' windows."""
        outside: Bool = lengths_within(inside, start, end) < np.maximum(end - start, 1)
        return outside

    found: list[dict[str, npt.NDArray[Any]]] = []
    is_message = rows.comms.among("kind", MESSAGES)
    collectives = rows.comms.where(~is_message) if (~is_message).any() else rows.comms
    communicates = union(collectives["start_ns"], collectives["end_ns"])
    for ranges in (rows.spans, rows.ops):
        ranges = ranges.where(ranges.among("kind", _FIRST) & are_outside(ranges["start_ns"], ranges["end_ns"]))
        kinds = [str(kind) for kind in ranges["kind"]]
        if len(
            communicates
        ):  # what sums gradients has nothing to sum where there are no replicas: it copies them at most
            sums = lengths_within(communicates, ranges["start_ns"], ranges["end_ns"]) > 0
            kinds = [
                COMPUTE if kind == "GRAD_SYNC" and not of_it else kind for kind, of_it in zip(kinds, sums, strict=True)
            ]
        none = np.full(len(kinds), -1)
        found.append(
            {
                **{name: ranges[name] for name in ("start_ns", "end_ns")},
                "begun_ns": ranges["start_ns"],
                "weight": np.array([len(_FIRST) - _FIRST.index(kind) for kind in kinds], dtype=np.int64),
                "part": np.array([OF_SPANS.get(kind, COMPUTE) for kind in kinds], dtype=object),
                "axis": np.full(len(kinds), "", dtype=object),
                **dict.fromkeys(("match", "members", "transfer_ns"), none),
            }
        )
    asked = np.maximum(rows.comms["start_ns"], rows.comms["asked_ns"])
    of_absent = (
        rows.comms.among("kind", ("recv",)) & (rows.comms["match"] < 0) & are_outside(asked, rows.comms["end_ns"])
    )
    absent = np.flatnonzero(of_absent & lacks_ranks & rows.comms.among("axis", ("pp",)))
    none = np.full(len(absent), -1)
    found.append(
        {
            "start_ns": asked[absent],
            "end_ns": rows.comms["end_ns"][absent],
            "begun_ns": asked[absent],
            "weight": np.zeros(len(absent), dtype=np.int64),  # whatever else the rank does then counts more
            "part": np.full(len(absent), UNRECORDED, dtype=object),
            "axis": np.full(len(absent), "", dtype=object),
            **dict.fromkeys(("match", "members", "transfer_ns"), none),
        }
    )
    is_of_pipeline = rows.comms.among("kind", MESSAGES) & rows.comms.among("axis", ("pp",))
    chosen = np.flatnonzero(~is_of_pipeline & are_outside(asked, rows.comms["end_ns"]))
    comms = rows.comms.where(chosen)
    kinds, axes = [str(kind) for kind in comms["kind"]], [str(axis) or "unknown" for axis in comms["axis"]]
    is_message = comms.among("kind", MESSAGES)  # whom a message waits for has its own columns
    found.append(
        {
            "start_ns": asked[chosen],
            "begun_ns": comms["start_ns"],
            "end_ns": comms["end_ns"],
            "weight": np.full(len(chosen), len(_FIRST) + 1),
            "part": np.array(list(map(_part_of, kinds, axes)), dtype=object),
            "axis": np.array(axes, dtype=object),
            "match": np.where(is_message, -1, comms["match"]),
            "members": np.where(is_message, 1, comms["group_size"]),
            "transfer_ns": _most_transfer(kinds, axes, comms),
        }
    )
    starved = None if lane is None or lane.idle is None else lane.idle.launch_starved
    return (
        Slice({name: np.concatenate([part[name] for part in found]) for name in found[0]}),
        None if starved is None else starved[are_outside(starved[:, 0], starved[:, 1])],
    )


def _most_transfer(kinds: Sequence[str], axes: Sequence[str], rows: Slice) -> Int64:
    """Longest transfer that collectives of a rank may have, ns: the shortest call of their like; none of a barrier."""
    if not len(kinds):
        return np.empty(0, dtype=np.int64)
    like, _ = distinct_of([np.array(kinds), np.array(axes), rows["bytes"]])
    shortest = reduce_groups(np.minimum, np.maximum(rows["end_ns"] - rows["start_ns"], 0), like, int(like.max()) + 1)
    return np.where(rows.among("kind", (Collective.BARRIER,)), 0, shortest[like])


class _Segment(Struct, frozen=True):
    """Time in which a rank did one thing: ``part`` on an ``axis``; of a collective when all were there, and who came last."""

    start_ns: int
    end_ns: int
    part: str
    axis: str = ""
    ready_ns: int = 0
    last_rank: int = -1


class _Timelines:
    """Timelines of ranks outside of pipelines, each made when the walk first comes to it."""

    def __init__(self, data: AlignedRun, outside: Mapping[int, OutsideRows], lacks_ranks: bool) -> None:
        self._data = data
        self._outside = outside
        self._lacks_ranks = lacks_ranks
        self._of_rank: dict[int, list[_Segment]] = {}

    def first_rank(self, window: StepWindow) -> int:
        """The rank whose op begins the window."""
        starts = {}
        for rank in window.ranks:
            ops = self._data.part(rank, window.step).ops
            starts[rank] = int(ops["start_ns"].min()) if len(ops) else window.end_ns
        return min(starts, key=starts.__getitem__)

    def usual_lead(self, rank: int, bounds: StepBounds) -> tuple[int, int]:
        """Time from a step's range to its first op on a rank, and that op's begin, of the lower median step; ns."""
        leads = []
        ranges = ((step, begin) for (step, number), (begin, _) in bounds.ranges_ns.items() if number == rank)
        for step, begin in sorted(ranges):
            starts = self._data.part(rank, step).ops["start_ns"]
            if len(starts):
                leads.append((max(int(starts.min()) - begin, 0), int(starts.min())))
        later = sorted(leads[1:] or leads)  # the recorder may have started in the first one
        return later[(len(later) - 1) // 2]

    def walk(self, rank: int, at_ns: int, stop_ns: int) -> Counter[Named]:
        """The parts of the time from ``stop_ns`` to ``at_ns``, walked back from ``rank``."""
        parts: Counter[Named] = Counter()
        for _ in range(_MOST_HOPS):
            if at_ns <= stop_ns:
                break
            segment = self._before(rank, at_ns)
            start = max(segment.start_ns, stop_ns)
            waits = segment.last_rank not in (-1, rank) and segment.ready_ns > segment.start_ns
            if waits and segment.ready_ns > stop_ns:
                ready = min(segment.ready_ns, at_ns)
                parts[segment.part, (("axis", segment.axis),)] += at_ns - ready
                rank, at_ns = segment.last_rank, ready
                continue
            if waits:
                start = stop_ns
            self._add(parts, rank, segment, start, at_ns)
            at_ns = start
        parts[OTHER, ()] += max(at_ns - stop_ns, 0)
        return Counter({name: ns for name, ns in parts.items() if ns})

    def _add(self, parts: Counter[Named], rank: int, segment: _Segment, start: int, end: int) -> None:
        if segment.axis:
            parts[segment.part, (("axis", segment.axis),)] += end - start
            return
        idle = self._outside[rank][1] if segment.part == OTHER else None
        starved = 0 if idle is None else int(lengths_within(idle, [start], [end])[0])
        of_rank = (("rank", rank),)
        parts[HOST, of_rank] += starved
        parts[segment.part, of_rank] += end - start - starved

    def _before(self, rank: int, at_ns: int) -> _Segment:
        """The segment in which the moment before ``at_ns`` lies."""
        if rank not in self._of_rank:
            everywhere = 0, _Segment(-(2**62), 2**62, OTHER)
            self._of_rank[rank] = _painted([everywhere, *self._rows_of(self._outside[rank][0])])
        segments = self._of_rank[rank]
        return segments[bisect_left(segments, at_ns, key=lambda segment: segment.start_ns) - 1]

    def _rows_of(self, rows: Slice) -> Iterator[tuple[int, _Segment]]:
        """Rows of a rank as segments, each with how much it counts where several are around a moment."""
        names = ("start_ns", "end_ns", "weight", "part", "axis", "match", "members", "transfer_ns")
        for start, end, weight, part, axis, match, members, transfer in zip(
            *(rows[name].tolist() for name in names), strict=True
        ):
            if not axis:
                yield weight, _Segment(start, end, part)
                continue
            ready, last, there = self._meetings.get(match, (start, -1, 1)) if match >= 0 else (start, -1, 1)
            waiting = self._waiting(match, members, there)
            if waiting is not None:
                until = max(end - transfer, start)
                if until > start:
                    yield weight, _Segment(start, until, waiting, axis, ready, last)
                start = until
            if end > start or waiting is None:
                yield weight, _Segment(start, end, part, axis, ready, last)

    def _waiting(self, match: int, members: int, there: int) -> str | None:
        """The part that is waiting for others in a collective of which so many members are known to be there; None where all are.

        A member whose call lies in a pipeline is not among those that are known: it is recorded, where all ranks are.
        """
        if members == 1 or (match >= 0 and (there >= members or not self._lacks_ranks)):
            return None
        return UNRECORDED if self._lacks_ranks else UNKNOWN_RANK

    @cached_property
    def _meetings(self) -> Mapping[int, tuple[int, int, int]]:
        """Time at which all known members of each matched collective were there, who came last, and how many they are."""
        tables = []
        for rank, (rows, _) in self._outside.items():
            matched = rows.where(rows["match"] >= 0)
            tables.append(pd.DataFrame({"match": matched["match"], "start": matched["begun_ns"], "rank": rank}))
        if not tables:
            return {}
        table = pd.concat(tables).sort_values(["match", "start"], kind="stable")
        there = table.groupby("match")["rank"].nunique()
        table = table.drop_duplicates("match", keep="last")
        columns = (table[name].tolist() for name in ("match", "start", "rank"))
        of_match = zip(*columns, there.loc[table["match"]].tolist(), strict=True)
        return {match: (start, rank, number) for match, start, rank, number in of_match}


def _part_of(kind: str, axis: str) -> str:
    """The part that a collective is."""
    if kind == Collective.BARRIER:
        return "barrier"
    if DATA_PARALLEL.search(axis):
        if kind in _REDUCTIONS:
            return "gradient_sync"
        if kind == Collective.ALL_GATHER:
            return "parameter_gather"
    return "communication"


def _painted(rows: Sequence[tuple[int, _Segment]]) -> list[_Segment]:
    """Segments in order, none over another: of those around one moment the one that counts most is there. One is around all."""
    edges = sorted({edge for _, row in rows for edge in (row.start_ns, row.end_ns)})
    opened = sorted(rows, key=lambda row: row[1].start_ns)
    active: list[tuple[int, _Segment]] = []
    painted: list[_Segment] = []
    following = 0
    for begin, end in pairwise(edges):
        while following < len(opened) and opened[following][1].start_ns <= begin:
            active.append(opened[following])
            following += 1
        active = [row for row in active if row[1].end_ns > begin]
        _, best = max(active, key=lambda row: (row[0], row[1].start_ns))
        longer = replace(best, start_ns=painted[-1].start_ns, end_ns=end) if painted else None
        if longer is not None and painted[-1] == replace(longer, end_ns=begin):
            painted[-1] = longer
        else:
            painted.append(replace(best, start_ns=begin, end_ns=end))
    return painted
