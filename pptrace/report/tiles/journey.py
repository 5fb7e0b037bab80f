"""The journey of a microbatch: every op, send and receive of it over all stages and back, with its deviation from the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pptrace.report.tiles.measured import COMMS, COMPUTE_LANE, OPS, Table, halves_of
from pptrace.report.tiles.replayed import PLANNED, rows_of_step
from pptrace.report.tiles.timeline import MEASURED, Timeline
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
    position = timeline.layout.position
    members = [position[member] for member in timeline.mesh.pipeline_of(rank) if member in position]
    ranks = members or list(range(len(position)))  # where it has no pipeline, all
    planned = timeline.picture(PLANNED, step)
    plan = timeline.schedule.plan_of(step)
    in_plan = () if planned is None else _ops(planned[OPS], ranks, step, microbatch, {})
    times = {(hop["at"], hop["what"], hop["stage"]): (hop["start_ns"], hop["end_ns"]) for hop in in_plan}
    hops = [*_ops(picture[OPS], ranks, step, microbatch, times)]
    if source == MEASURED:
        hops += _messages(picture[COMMS], ranks, step, microbatch, times, plan)
    for hop in hops:
        hop["rank"] = timeline.layout.rows[hop["at"]].rank
    return sorted(
        hops, key=lambda hop: (hop["end_ns"] if hop["what"] == "recv" else hop["start_ns"], _ORDER.get(hop["what"], 2))
    )


def _of_microbatch(table: Table, ranks: list[int], step: int, microbatch: int) -> Iterator[tuple[int, str, int]]:
    """(row, kind, stage) of each op of a microbatch; of a pair that half of it which computes the microbatch."""
    columns, kinds = table.tracks.columns, table.texts["kind"]
    halves = {code: halves_of(text) for code, text in enumerate(table.texts["pair"]) if text}
    rows = rows_of_step(table.tracks, ranks, step, (COMPUTE_LANE,))
    is_candidate = np.isin(columns["pair"][rows], list(halves)) | (columns["microbatch"][rows] == microbatch)
    for row in rows[is_candidate].tolist():
        own = (kinds[columns["kind"][row]], int(columns["stage"][row]), int(columns["microbatch"][row]))
        for kind, stage, number in halves.get(int(columns["pair"][row])) or (own,):
            if number == microbatch:
                yield row, kind, stage


def _ops(
    table: Table, ranks: list[int], step: int, microbatch: int, times: Mapping[Key, tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    tracks = table.tracks
    for row, kind, stage in _of_microbatch(table, ranks, step, microbatch):
        track = tracks.track_of(row)
        at, start, length = int(tracks.rank[track]), int(tracks.start[row]), int(tracks.length[row])
        planned = times.get((at, kind, stage))
        yield {
            "what": kind,
            "at": at,
            "depth": int(tracks.depth[track]),
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
