"""Join ``call`` marks of a watched runtime with the trace's own record of the same calls.

A mark knows the group, the peer, the bytes and when the script waited; the trace knows the kernels, or when the backend's own
thread was done. Calls that no mark covers stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pptrace.marks import AwaitMark, CallMark, CollectiveMark, ExchangeMark, P2PMark
from pptrace.model.device import DeviceWork
from pptrace.model.tables import CALLS, Int64, empty_table, make_table
from pptrace.recognise.ops.mark_ranges import MarkedRange, MarkedRanges
from pptrace.recognise.ops.tables import LaunchIndex

_TIMES = ("start_ns", "posted_ns", "asked_ns", "end_ns")
FAILED_KEY = "failed_calls"
"""The key of a rank's metadata that holds kind, group, sequence and peer (-1: none) of the calls that raised an error."""
GROUPS_KEY = "groups"
"""The key of a rank's metadata that holds its process groups by name: ``{"ranks": […], "axis": "dp", "description": "…"}``."""
REDUCER_KEY = "reducer"
"""The key of a group whose gradients C++ reduces, as DDP's."""


def calls_with_marks(
    calls: pd.DataFrame, marks: MarkedRanges, work: DeviceWork, metadata: Mapping[str, Any]
) -> pd.DataFrame:
    """The calls of a rank (schema CALLS) that no communication mark fully describes, each once.

    Args:
        calls: what the trace shows without marks.
        marks: those of the rank. Calls inside the runtime's own ranges (with axis and microbatch) are left out; calls inside
            a ``call`` range get what it knows.
        metadata: the rank's facts; names the groups' ranks and axes.
    """
    fully_described = [
        entry for entry in marks.ranges if isinstance(entry.mark, P2PMark | CollectiveMark | ExchangeMark)
    ]
    outside = calls[_range_of(calls["host_ns"].to_numpy(), fully_described) < 0]
    watched = _innermost([entry for entry in marks.ranges if isinstance(entry.mark, CallMark)])
    if not watched:
        return _with_groups_of_cpp(outside.reset_index(drop=True), {}, metadata)
    mark_of_call = _range_of(outside["host_ns"].to_numpy(), watched)
    recorded = {int(index): row for row, index in reversed(list(enumerate(mark_of_call.tolist()))) if index >= 0}
    awaits = {e.mark.handle: e for e in marks.ranges if isinstance(e.mark, AwaitMark)}
    launches = LaunchIndex(work)
    groups = metadata.get(GROUPS_KEY)
    known_groups = groups if isinstance(groups, Mapping) else {}
    records = outside.to_dict("list")
    failed = _failed(metadata)
    rows = [
        _row(entry, _record(records, recorded.get(index)), awaits, launches, known_groups)
        for index, entry in enumerate(watched)
        if _identity(entry) not in failed
    ]
    table = make_table(CALLS, {name: [row[name] for row in rows] for name in CALLS})
    unmarked = _with_groups_of_cpp(outside[mark_of_call < 0], _groups_of_workers(table), metadata)
    parts = [part for part in (table, unmarked) if len(part)]
    joined = pd.concat(parts, ignore_index=True) if parts else empty_table(CALLS)
    return joined.sort_values("host_ns", kind="stable", ignore_index=True)


def _failed(metadata: Mapping[str, Any]) -> set[tuple[object, ...]]:
    """The calls that raised: no communication, and their ends say nothing of when another rank was there."""
    listed = metadata.get(FAILED_KEY)
    return {tuple(entry) for entry in listed if isinstance(entry, list)} if isinstance(listed, list) else set()


def _identity(entry: MarkedRange) -> tuple[object, ...]:
    mark = entry.mark
    if not isinstance(mark, CallMark):
        return ()
    return (mark.kind, mark.group, mark.sequence, -1 if mark.peer is None else mark.peer)


def _groups_of_workers(marked: pd.DataFrame) -> dict[int, str]:
    """The process group of each worker thread with only one, according to marked calls."""
    known_groups = marked[(marked["worker"] >= 0) & (marked["group_id"] != "")]
    names = known_groups.groupby("worker")["group_id"].agg(["first", "nunique"])
    sure = names[names["nunique"] == 1]["first"]
    return dict(zip(sure.index.tolist(), sure.tolist(), strict=True))


def _with_groups_of_cpp(calls: pd.DataFrame, workers: Mapping[int, str], metadata: Mapping[str, Any]) -> pd.DataFrame:
    """Collectives that name no group, with the one that they are of for sure: that of their worker thread; of what autograd
    calls, the only one whose gradients C++ reduces (DDP's buckets on gloo); else the only one that there is.
    """
    groups = metadata.get(GROUPS_KEY)
    known_groups = {name: facts for name, facts in groups.items() if isinstance(facts, Mapping)} if groups else {}
    known_groups = {name: facts for name, facts in known_groups.items() if len(describe_group(facts)["ranks"]) != 1}
    unnamed = (calls["group_id"] == "") & (calls["group_ranks"] == "") & ~calls["kind"].isin(("send", "recv"))
    if not known_groups or not unnamed.any():
        return calls
    name_of = calls["worker"].map(workers).where(unnamed)
    reducing = [name for name, facts in known_groups.items() if facts.get(REDUCER_KEY)]
    reducing = reducing or [name for name, facts in known_groups.items() if facts.get("axis") == "dp"]
    if len(reducing) == 1:
        of_reducer = unnamed & (calls["backward"] == 1) & (calls["functional"] == 0)
        name_of = name_of.mask(of_reducer & name_of.isna(), reducing[0])
    if len(known_groups) == 1:
        name_of = name_of.mask(unnamed & name_of.isna(), next(iter(known_groups)))
    filled = calls.copy()
    for name in name_of.dropna().unique():
        for column, value in _group_columns(name, known_groups.get(name, {})).items():
            filled.loc[name_of == name, column] = value
    return filled


def _group_columns(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the metadata says of a group, as columns of CALLS, ``group_id`` last."""
    entry = describe_group(facts)
    members = entry["ranks"]
    sized = {"group_ranks": json.dumps(members), "group_size": len(members)} if members else {}
    return {"description": entry["pg_desc"], **sized, "group_id": name}


def describe_group(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The ranks and the description of a group in the metadata, in the words of ``pg_config``; an axis is a mesh's dimension."""
    ranks = facts.get("ranks")
    members = [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
    axis = str(facts.get("axis") or "")
    return {"ranks": members, "pg_desc": f"mesh_{axis}" if axis else str(facts.get("description") or "")}


def _record(columns: Mapping[Any, list[Any]], row: int | None) -> dict[str, Any] | None:
    return None if row is None else {str(name): values[row] for name, values in columns.items()}


def _innermost(ranges: Sequence[MarkedRange]) -> list[MarkedRange]:
    """Ranges in order of their starts, without those around another one of the same thread."""
    ordered = sorted(ranges, key=lambda entry: (entry.start_ns, -entry.end_ns))
    kept: list[MarkedRange] = []
    for entry in reversed(ordered):
        if not any(k.thread == entry.thread and entry.start_ns <= k.start_ns < entry.end_ns for k in kept[-1:]):
            kept.append(entry)
    return kept[::-1]


def _range_of(at_ns: Int64, ranges: Sequence[MarkedRange]) -> Int64:
    """For each time the index of the last range that began before it and has not ended; -1 where there is none."""
    if not ranges:
        return np.full(len(at_ns), -1, dtype=np.int64)
    order = np.argsort([entry.start_ns for entry in ranges], kind="stable")
    starts = np.array([ranges[index].start_ns for index in order], dtype=np.int64)
    ends = np.array([ranges[index].end_ns for index in order], dtype=np.int64)
    index = np.searchsorted(starts, at_ns, side="right") - 1
    inside = (index >= 0) & (at_ns <= ends[np.maximum(index, 0)])
    return np.where(inside, order[np.maximum(index, 0)], -1).astype(np.int64)


def _row(
    entry: MarkedRange,
    recorded: dict[str, Any] | None,
    awaits: Mapping[int, MarkedRange],
    launches: LaunchIndex,
    groups: Mapping[str, Any],
) -> dict[str, Any]:
    mark = entry.mark
    assert isinstance(mark, CallMark)
    group = groups.get(mark.group)
    facts = group if isinstance(group, Mapping) else {}
    row = recorded or {name: -1 if dtype == "int64" else "" for name, dtype in CALLS.items()}
    awaited = None if mark.handle is None else awaits.get(mark.handle)
    row |= {name: value for name, value in _group_columns(mark.group, facts).items() if value != ""}
    row |= {
        "kind": mark.kind,
        "peer": mark.peer if mark.peer is not None and mark.kind in ("send", "recv") else -1,
        "local_peer": -1,
        "bytes": mark.bytes,
        "host_ns": entry.start_ns,
    }
    if row["seq"] < 0:
        row["seq"] = mark.sequence
    if recorded is None or recorded["clock"] == "host":
        row |= _times(entry, recorded, awaited, launches)
    return row


def _times(
    entry: MarkedRange, recorded: Mapping[str, Any] | None, awaited: MarkedRange | None, launches: LaunchIndex
) -> dict[str, Any]:
    """Of the device where the call launched work there; else of the host, until the backend or the wait says it is over."""
    if recorded is None and (span := launches.span(entry.start_ns, entry.end_ns, communication=True)):
        start, end, stream = span
        return dict(zip(_TIMES, (start, start, start, end), strict=True)) | {"stream": stream, "clock": "device"}
    start, posted = entry.start_ns, entry.end_ns
    host = {"stream": -1, "clock": "host"}
    mark = entry.mark
    assert isinstance(mark, CallMark)
    if mark.handle is None:  # the call returned when it was over
        return dict(zip(_TIMES, (start, start, start, posted), strict=True)) | host
    end = int(recorded["end_ns"]) if recorded is not None and recorded["end_ns"] > posted else -1
    if awaited is not None:
        end = awaited.end_ns if end < 0 else min(end, awaited.end_ns)
    wait_start = awaited.start_ns if awaited is not None else max(posted, end)
    end = max(end, posted)
    return dict(zip(_TIMES, (start, posted, min(wait_start, end), end), strict=True)) | host
