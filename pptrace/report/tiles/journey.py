"""The journey of a microbatch: every op, send and receive of it over all stages and back, with its deviation from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pptrace.report.tiles.measured import COMMS, OPS, Picture, Table, halves_of
from pptrace.report.tiles.replayed import PLANNED, rows_of_step
from pptrace.report.tiles.timeline import MEASURED, Timeline
from pptrace.report.tiles.tracks import Array
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan

Key = tuple[int, str, int]
"""Index of the rank, kind and stage of an op of one microbatch."""
_RECEIVES, _SENDS = 0, 1
_ORDER = {"send": 0, "recv": 1}


def journey(timeline: Timeline, source: str, step: int, rank: int, microbatch: int) -> list[dict[str, Any]]:
    """The hops of a microbatch of a rank's pipeline in order of time: ops when they begin, receives when they are done.

    ``late_ns`` is how much later a hop begins (a receive: ends) than in the plan at mean costs with free messages, ``longer_ns``
    how much longer an op takes than there; None where there is no plan. Times are ns from the run's origin.
    """
    picture = timeline.picture(source, step)
    if picture is None:
        return []
    ranks = _pipeline(timeline, rank)
    planned = timeline.picture(PLANNED, step)
    plan = timeline.schedule.plan_of(step)
    times = {} if planned is None else _times(planned, ranks, step, microbatch)
    hops = [*_ops(picture[OPS], ranks, step, microbatch, times)]
    if source == MEASURED:
        hops += _messages(picture[COMMS], ranks, step, microbatch, times, plan)
    for hop in hops:
        hop["rank"] = timeline.layout.rows[hop["at"]].rank
    return sorted(
        hops, key=lambda hop: (hop["end_ns"] if hop["what"] == "recv" else hop["start_ns"], _ORDER.get(hop["what"], 2))
    )


def _pipeline(timeline: Timeline, rank: int) -> list[int]:
    """The indices of the ranks of a rank's pipeline; all ranks where it has none."""
    position = timeline.layout.position
    members = [position[member] for member in timeline.mesh.pipeline_of(rank) if member in position]
    return members or list(range(len(position)))


def _of_microbatch(table: Table, rows: Array, microbatch: int) -> Iterator[tuple[int, tuple[tuple[str, int], ...]]]:
    """(row, (kind, stage) of each half) of those rows that compute a microbatch, in a pair perhaps as the second half."""
    columns, kinds, pairs = table.tracks.columns, table.texts["kind"], table.texts["pair"]
    halves = {code: halves_of(text) for code, text in enumerate(pairs) if text}
    for row in rows.tolist():
        parts = halves.get(int(columns["pair"][row]), ())
        own = tuple((kind, stage) for kind, stage, number in parts if number == microbatch)
        if own:
            yield row, own
        elif not parts and int(columns["microbatch"][row]) == microbatch:
            yield row, ((kinds[columns["kind"][row]], int(columns["stage"][row])),)


def _candidates(table: Table, ranks: list[int], step: int, microbatch: int) -> Array:
    columns = table.tracks.columns
    rows = rows_of_step(table.tracks, ranks, step, (0,))
    has_pair = columns["pair"][rows] != (table.texts["pair"].index("") if "" in table.texts["pair"] else -1)
    chosen: Array = rows[has_pair | (columns["microbatch"][rows] == microbatch)]
    return chosen


def _times(planned: Picture, ranks: list[int], step: int, microbatch: int) -> dict[Key, tuple[int, int]]:
    """Start and end of each op of a microbatch in the plan."""
    table = planned[OPS]
    tracks = table.tracks
    times = {}
    for row, parts in _of_microbatch(table, _candidates(table, ranks, step, microbatch), microbatch):
        at = int(tracks.rank[tracks.track_of(row)])
        for kind, stage in parts:
            times[at, kind, stage] = (int(tracks.start[row]), int(tracks.start[row]) + int(tracks.length[row]))
    return times


def _ops(
    table: Table, ranks: list[int], step: int, microbatch: int, times: Mapping[Key, tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    tracks = table.tracks
    for row, parts in _of_microbatch(table, _candidates(table, ranks, step, microbatch), microbatch):
        at = int(tracks.rank[tracks.track_of(row)])
        start, length = int(tracks.start[row]), int(tracks.length[row])
        for kind, stage in parts:
            planned = times.get((at, kind, stage))
            yield {
                "what": kind,
                "at": at,
                "depth": int(tracks.depth[tracks.track_of(row)]),
                "stage": stage,
                "start_ns": start,
                "end_ns": start + length,
                "table": OPS,
                "row": row,
                "late_ns": None if planned is None else start - planned[0],
                "longer_ns": None if planned is None else length - (planned[1] - planned[0]),
            }


def _messages(
    table: Table, ranks: list[int], step: int, microbatch: int, times: Mapping[Key, tuple[int, int]], plan: Plan | None
) -> Iterator[dict[str, Any]]:
    tracks = table.tracks
    columns = tracks.columns
    rows = rows_of_step(tracks, ranks, step, (_RECEIVES, _SENDS))
    for row in rows[columns["microbatch"][rows] == microbatch].tolist():
        track = tracks.track_of(row)
        what = "send" if int(tracks.lane[track]) == _SENDS else "recv"
        direction = table.texts["direction"][columns["direction"][row]]
        stage, start = int(columns["stage"][row]), int(tracks.start[row])
        end = start + int(tracks.length[row])
        sent = _planned_send(times, plan, what, direction, stage)
        before, after = int(columns["before"][row]), int(columns["after"][row])
        yield {
            "what": what,
            "at": int(tracks.rank[track]),
            "depth": int(tracks.depth[track]),
            "stage": stage,
            "direction": direction,
            "peer": int(columns["peer"][row]),
            "start_ns": start,
            "end_ns": end,
            "wait_ns": before + after,
            "before_ns": before,
            "transfer_ns": end - start - before - after,
            "table": COMMS,
            "row": row,
            "late_ns": None if sent is None else (start if what == "send" else end) - sent,
            "longer_ns": None,
        }


def _planned_send(
    times: Mapping[Key, tuple[int, int]], plan: Plan | None, what: str, direction: str, stage: int
) -> int | None:
    """Time at which the plan has the output that a message carries, ns; None where that is not known."""
    if plan is None or stage < 0:
        return None
    is_forward = direction == "F"
    source: int | None = stage
    if what == "recv":
        source = plan.previous_stage(stage) if is_forward else plan.next_stage(stage)
    kinds = (str(Kind.F),) if is_forward else (str(Kind.B), str(Kind.I))
    ends = [end for (_, kind, of_stage), (_, end) in times.items() if of_stage == source and kind in kinds]
    return min(ends, default=None)
