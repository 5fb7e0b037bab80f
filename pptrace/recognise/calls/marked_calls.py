"""Join ``call`` marks of a watched runtime with the trace's own record of the same calls.

A mark knows the group, the peer, the bytes and when the script waited; the trace knows the kernels, or when the backend's own
thread was done. Calls that no mark covers stay as they are.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.intervals import find_interval
from pptrace.marks import P2P, Collective
from pptrace.model.device import DeviceWork
from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import CALLS, Bool, Int64, make_table, without_categories
from pptrace.recognise.groups.topology import axis_of_description
from pptrace.recognise.ops.label_steps import LaunchIndex
from pptrace.recognise.ops.mark_ranges import MarkedRanges
from pptrace.slices import Slice, are_among, last_like, rows_among

FAILED_KEY = "failed_calls"
"""The key of a rank's metadata that holds kind, group, sequence and peer (-1: none) of the calls that raised an error."""
GROUPS_KEY = "groups"
"""The key of a rank's metadata that holds its process groups by name: ``{"ranks": […], "axis": "dp", "description": "…"}``, and
as ``dimensions`` what meshes call it.
"""
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
    if not len(calls) and not len(marks.calls):
        return calls
    calls = without_categories(calls)
    described = np.unique(np.concatenate([marks.transfers["at"], marks.collectives["at"], marks.links["at"]]))
    described_ns = (marks.start_ns[described], marks.end_ns[described])
    host_ns = calls["host_ns"].to_numpy()
    described_by = find_interval(*described_ns, host_ns, until=host_ns)
    outside = calls[(described_by < 0) & ~_are_late_works(calls, marks, marks.collectives, marks.links)]
    if not len(marks.calls):
        return _with_groups_of_cpp(_as_hooks_describe(outside.reset_index(drop=True), metadata), {}, metadata, marks)
    watched = marks.calls.where(_innermost(marks))
    host_ns = outside["host_ns"].to_numpy()
    mark_of_call = find_interval(marks.start_ns[watched["at"]], marks.end_ns[watched["at"]], host_ns, until=host_ns)
    recorded = np.full(len(watched), -1)
    is_within = np.flatnonzero(mark_of_call >= 0)
    first_of, first = np.unique(mark_of_call[is_within], return_index=True)
    recorded[first_of] = is_within[first]
    # A call that raised an error is no communication, and its end says nothing of when another rank was there.
    listed = metadata.get(FAILED_KEY)
    failed = {tuple(entry) for entry in listed if isinstance(entry, list)} if isinstance(listed, list) else set()
    columns = (watched[name].tolist() for name in ("kind", "group", "sequence", "peer"))
    succeeded = np.ones(len(watched), dtype=np.bool_)
    if failed:
        succeeded[:] = [call not in failed for call in zip(*columns, strict=True)]
    table = _table(watched.where(succeeded), outside, recorded[succeeded], marks, work, metadata)
    is_late = _are_late_works(outside, marks, watched)
    unmarked = _as_hooks_describe(outside[(mark_of_call < 0) & ~is_late], metadata)
    known = table[(table["worker"] >= 0) & (table["group_id"] != "")].groupby("worker")["group_id"]
    sure = known.first()[known.nunique() == 1]  # of worker threads with one group
    only_group = dict(zip(sure.index.tolist(), sure.tolist(), strict=True))
    unmarked = _with_groups_of_cpp(unmarked, only_group, metadata, marks)
    return concat_tables([table, unmarked]).sort_values("host_ns", kind="stable", ignore_index=True)


def _are_late_works(calls: pd.DataFrame, marks: MarkedRanges, *posted: Slice) -> Bool:
    """Mask of the works of ``posted`` collectives that begin on the backend's thread after these were posted.

    A light recording has no record of the posting: a work is a call of its own there, between the posting and the end of the
    wait, or of the trace where that has no wait. Works begin in the order of their postings, so that one may begin within the
    range of the next: each is of the earliest posting that has none yet. Messages have their own records, and so has what posts
    them.
    """
    is_late = np.zeros(len(calls), dtype=np.bool_)
    at, first = np.unique(np.concatenate([one["at"] for one in posted]), return_index=True)
    handle = np.concatenate([one["handle"] for one in posted])[first]
    if not (handle >= 0).any():
        return is_late
    awaited = last_like([handle], [marks.awaits["handle"]])
    never = np.iinfo(np.int64).max
    ends = np.append(marks.end_ns[marks.awaits["at"]], never)[awaited]
    ends = np.where(handle >= 0, ends, marks.end_ns[at])
    host_ns, is_message = calls["host_ns"].to_numpy(), rows_among(calls["kind"], P2P)
    of_messages = find_interval(marks.start_ns[at], marks.end_ns[at], host_ns[is_message], until=host_ns[is_message])
    waits = ~np.isin(np.arange(len(at)), of_messages)
    postings = sorted(zip(marks.start_ns[at][waits].tolist(), ends[waits].tolist(), strict=True), reverse=True)
    is_of_host = (calls["clock"] == "host").to_numpy()
    waiting: deque[int] = deque()
    works = np.flatnonzero(~is_message)
    for work in works[np.argsort(host_ns[works], kind="stable")].tolist():
        begin = host_ns[work]
        while postings and postings[-1][0] <= begin:
            waiting.append(postings.pop()[1])
        while waiting and waiting[0] < begin:
            waiting.popleft()
        if waiting:
            waiting.popleft()
            is_late[work] = is_of_host[work]
    return is_late


def _as_hooks_describe(calls: pd.DataFrame, metadata: Mapping[str, Any]) -> pd.DataFrame:
    """The calls of groups that hooks know with what these say of them: one group is described in one way, whoever calls.

    DDP's buckets name the default group, as the profiler describes it; what else is called in that group is described by hooks.
    """
    changed = {}
    for name, column in _columns_of_groups(calls["group_id"].to_numpy(dtype=object), metadata).items():
        is_known = (column != "") & (calls["group_id"] != "").to_numpy()
        if is_known.any():
            changed[name] = np.where(is_known, column, calls[name].to_numpy())
    return calls.assign(**changed).astype({name: calls[name].dtype for name in changed}) if changed else calls


def _with_groups_of_cpp(
    calls: pd.DataFrame, workers: Mapping[int, str], metadata: Mapping[str, Any], marks: MarkedRanges
) -> pd.DataFrame:
    """Collectives that name no group, with the one that they are of for sure: that of their worker thread; of what autograd
    calls, the only one whose gradients C++ reduces (DDP's buckets on gloo); else the only one that there is. Light recordings
    do not tell what autograd calls: sums are buckets there if all other groups are pipelines.
    """
    groups = _known_groups(metadata)
    known_groups = {name: facts for name, facts in groups.items() if len(describe_group(facts)["ranks"]) != 1}
    unnamed = (calls["group_id"] == "") & (calls["group_ranks"] == "") & ~rows_among(calls["kind"], P2P)
    if not known_groups or not unnamed.any():
        return calls
    name_of = calls["worker"].map(workers).where(unnamed)
    reducing = [name for name, facts in known_groups.items() if facts.get(REDUCER_KEY)]
    reducing = reducing or [name for name, facts in known_groups.items() if facts.get("axis") == "dp"]
    if len(reducing) == 1:
        others = [describe_group(facts)["pg_desc"] for facts in known_groups.values() if not facts.get(REDUCER_KEY)]
        is_only = len(others) < len(known_groups) and all(axis_of_description(text) == "pp" for text in others)
        is_bucket = (calls["backward"] < 0) & (calls["kind"] == "all_reduce") & is_only
        is_bucket &= unnamed
        calls = calls.assign(end_ns=calls["end_ns"].mask(is_bucket, _ends_in_ops(calls, marks)))
        of_reducer = unnamed & ((calls["backward"] == 1) | is_bucket) & (calls["functional"] == 0)
        name_of = name_of.mask(of_reducer & name_of.isna(), reducing[0])
    if len(known_groups) == 1:
        name_of = name_of.mask(unnamed & name_of.isna(), next(iter(known_groups)))
    filled = calls.copy()
    for name in name_of.dropna().unique():
        for column, value in _group_columns(name, known_groups.get(name, {})).items():
            filled.loc[name_of == name, column] = value
    return filled


def _ends_in_ops(calls: pd.DataFrame, marks: MarkedRanges) -> Int64:
    """Ends of calls, ns, at the latest those of the ops in which they begin: their threads get a core again only later."""
    start, end = calls["start_ns"].to_numpy(), calls["end_ns"].to_numpy()
    of_ops = marks.end_ns[marks.ops["at"]]
    op = find_interval(marks.start_ns[marks.ops["at"]], of_ops, start, until=start)
    return np.where(op >= 0, np.minimum(end, np.append(of_ops, 0)[op]), end)


def _known_groups(metadata: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Facts of the groups by name."""
    groups = metadata.get(GROUPS_KEY)
    listed = groups.items() if isinstance(groups, Mapping) else ()
    return {name: facts for name, facts in listed if isinstance(facts, Mapping)}


def _group_columns(name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of CALLS that the metadata gives for a group, ``group_id`` last."""
    entry = describe_group(facts)
    members = entry["ranks"]
    sized = {"group_ranks": json.dumps(members), "group_size": len(members)} if members else {}
    return {"description": entry["pg_desc"], **sized, "group_id": name}


def describe_group(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The ranks and the description of a group in the metadata, in the words of ``pg_config``; an axis is a mesh's dimension.

    Every mesh over all ranks names their default group anew. Of several names the one of the known axis counts first, then the
    last of a single axis, of several axes, and of none, which the known axis comes before.
    """
    ranks, dimensions = facts.get("ranks"), facts.get("dimensions")
    members = [rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else []
    axis = str(facts.get("axis") or "")
    own = str(facts.get("description") or "")
    names = [own, *(f"mesh_{name}" for name in (dimensions if isinstance(dimensions, list) else ()))][::-1]
    axes = {name: axis_of_description(name) for name in names}
    of_axes = [name for name in names if axes[name] not in ("", "world")]
    if of_axes:
        return {"ranks": members, "pg_desc": max(of_axes, key=lambda name: (axes[name] == axis, "-" not in axes[name]))}
    return {"ranks": members, "pg_desc": f"mesh_{axis}" if axis else names[0]}


def _innermost(marks: MarkedRanges) -> Int64:
    """The marked calls in order of their starts, without those around another one of the same thread."""
    at = marks.calls["at"]
    order = np.lexsort((-marks.end_ns[at], marks.start_ns[at]))
    start, end, thread = (times[at[order]] for times in (marks.start_ns, marks.end_ns, marks.thread))
    if not ((thread[:-1] == thread[1:]) & (start[1:] < end[:-1])).any():
        return order
    inner: list[int] = []
    starts, ends, threads = start.tolist(), end.tolist(), thread.tolist()
    for index in range(len(order) - 1, -1, -1):
        last = inner[-1] if inner else -1
        if last < 0 or threads[last] != threads[index] or starts[last] >= ends[index]:
            inner.append(index)
    return order[inner[::-1]]


def _table(
    watched: Slice,
    outside: pd.DataFrame,
    recorded: Int64,
    marks: MarkedRanges,
    work: DeviceWork,
    metadata: Mapping[str, Any],
) -> pd.DataFrame:
    """The marked calls (schema CALLS); ``recorded`` are the rows of ``outside`` that are the same calls, −1 without one."""
    is_recorded = recorded >= 0
    base: dict[str, Any] = {}
    for name, dtype in CALLS.items():
        unknown = np.array([-1] if dtype == "int64" else [""], dtype="int64" if dtype == "int64" else object)
        base[name] = np.append(outside[name].to_numpy(), unknown)[recorded]
    for name, column in _columns_of_groups(watched["group"], metadata).items():
        base[name] = np.where(column == "", base[name], column)
    has_peer = are_among(watched["kind"], (*P2P, Collective.BROADCAST))
    base |= {
        "kind": watched["kind"],
        "peer": np.where(has_peer, watched["peer"], -1),
        "local_peer": np.full(len(watched), -1),
        "bytes": watched["bytes"],
        "host_ns": marks.start_ns[watched["at"]],
        "seq": np.where(base["seq"] < 0, watched["sequence"], base["seq"]),
    }
    on_host = ~is_recorded | (base["clock"] == "host")
    times = _times(watched, np.where(is_recorded, base["end_ns"], -1), ~is_recorded, marks, LaunchIndex(work))
    base |= {name: np.where(on_host, column, base[name]) for name, column in times.items()}
    return make_table(CALLS, base)


def _columns_of_groups(groups: npt.NDArray[np.object_], metadata: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Columns of CALLS that the metadata gives for the group of each call; "" where it gives nothing."""
    codes, names = pd.factorize(groups)
    known_groups, columns = _known_groups(metadata), {}
    rows = [_group_columns(name, known_groups.get(name, {})) for name in names.tolist()]
    for column in ("description", "group_ranks", "group_size", "group_id"):
        values = np.array([row.get(column, "") for row in rows] or [""], dtype=object)
        columns[column] = values[codes]
    return columns


def _times(
    watched: Slice, recorded_end_ns: Int64, is_alone: Bool, marks: MarkedRanges, launches: LaunchIndex
) -> dict[str, npt.NDArray[Any]]:
    """Times of the device where the call launched work there; else of the host, until the backend or the wait says it is over."""
    start, posted = marks.start_ns[watched["at"]], marks.end_ns[watched["at"]]
    awaited = last_like([watched["handle"]], [marks.awaits["handle"]])
    is_awaited, waits = awaited >= 0, np.append(marks.awaits["at"], 0)[awaited]
    wait_end = marks.end_ns[waits]
    end = np.where(recorded_end_ns > posted, recorded_end_ns, -1)
    end = np.where(is_awaited, np.where(end < 0, wait_end, np.minimum(end, wait_end)), end)
    wait_start = np.where(is_awaited, marks.start_ns[waits], np.maximum(posted, end))
    end = np.maximum(end, posted)
    returned = watched["handle"] < 0  # when it was over
    work = launches.spans(start, posted, communication=True)
    on_device = work.launched & is_alone
    return {
        "start_ns": np.where(on_device, work.start_ns, start),
        "posted_ns": np.where(on_device, work.start_ns, np.where(returned, start, posted)),
        "asked_ns": np.where(on_device, work.start_ns, np.where(returned, start, np.minimum(wait_start, end))),
        "end_ns": np.where(on_device, work.end_ns, np.where(returned, posted, end)),
        "stream": np.where(on_device, work.stream, -1),
        "clock": np.array(["host", "device"], dtype=object)[on_device.astype(np.int64)],
    }
