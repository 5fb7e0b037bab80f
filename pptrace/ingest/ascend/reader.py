"""Read traces of Ascend NPUs: the ``trace_view.json`` that torch_npu's profiler makes of what msprof recorded.

    trace_view.json = [ event, … ]        Chrome's trace events with times in µs as text

A collective is one event: the lane of its group has it, and its parts on the planes of its algorithm and on the device's streams
are left out, as are sums that the profiler adds (:mod:`pptrace.ingest.ascend.lanes`).

Files that the Ascend profiler writes next to a ``trace_view.json``: rank, groups, settings, and memory.

    <host>_<pid>_<time>_ascend_pt/profiler_info_<rank>.json       rank_id, config; end_info: clocks read one after the other
    <host>_<pid>_<time>_ascend_pt/profiler_metadata.json          distributed_args, parallel_group_info
    <host>_<pid>_<time>_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json
    <host>_<pid>_<time>_ascend_pt/ASCEND_PROFILER_OUTPUT/memory_record.csv

    memory_record.csv = Component, Timestamp(us), Total Allocated(MB), Total Reserved(MB), …, Device Type

Component ``PTA`` is torch's allocator; others are of graphs, or of all of the process. A row is what the allocator holds then.

Environment variables, which are there too, are not passed on.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.errors import TraceError
from pptrace.garbage import paused_gc
from pptrace.ingest.ascend.lanes import LEFT_OUT, collectives_table, lanes_of, launches_of
from pptrace.ingest.ascend.trace_rows import Collected
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.json_texts import LIMIT_NS, nanoseconds, object_in
from pptrace.ingest.common.rank_names import rank_of_file_name, rank_of_value
from pptrace.ingest.common.sort_events import EventColumns, sorted_events
from pptrace.ingest.kineto.event_stream import EventStream
from pptrace.ingest.kineto.event_types import WITH_FLOWS, FlowEnd, FlowStart
from pptrace.ingest.sniff import ASCEND_MEMORY, ASCEND_METADATA, ASCEND_TRACE, ascend_infos
from pptrace.model.tables import MEMORY, Int64, empty_table, make_table
from pptrace.model.traces import BOOT_NS, HOST_NAME, Category, InputFormat, Trace
from pptrace.model.wording import counted
from pptrace.regular import open_regular
from pptrace.slices import Slice, first_like

_COMPONENT, _TIME, _DEVICE = "Component", "Timestamp(us)", "Device Type"
_ALLOCATED, _RESERVED = "Total Allocated(MB)", "Total Reserved(MB)"
_ALLOCATOR = "PTA"
_MIB = 2**20
_FOLDER = re.compile(r"(?P<host>.+)_\d+_\d{14,20}_ascend_(?:pt|ms)")
_SETTINGS = ("record_shapes", "with_stack", "profile_memory", "with_modules", "with_flops")


def job_facts(path: Path) -> tuple[int | None, Mapping[str, Any], Mapping[str, Any]]:
    """(rank; ``metadata`` and ``distributed`` of :class:`~pptrace.model.traces.Trace`) next to a trace, as far as readable."""
    folder = path.parent.parent
    described = object_in(folder / ASCEND_METADATA)
    args = described.get("distributed_args")
    args = args if isinstance(args, dict) else {}
    infos = ascend_infos(folder)
    info = object_in(infos[0]) if len(infos) == 1 else {}
    claimed = (info.get("rank_id"), infos[0].stem.rpartition("_")[2] if len(infos) == 1 else None, args.get("rank"))
    ranks = (*map(rank_of_value, claimed), rank_of_file_name(folder.name), rank_of_file_name(path.name))
    rank = next((rank for rank in ranks if rank is not None), None)
    host = _FOLDER.fullmatch(folder.name)
    metadata: dict[str, Any] = {HOST_NAME: host["host"]} if host else {}
    config = info.get("config")
    common = config.get("common_config") if isinstance(config, dict) else None
    if isinstance(common, dict) and (settings := {name: True for name in _SETTINGS if common.get(name) is True}):
        metadata["recording"] = settings
    distributed: dict[str, Any] = {"backend": "hccl"}
    if rank is not None and (world := rank_of_value(args.get("world_size"))) and rank < world:
        distributed |= {"rank": rank, "world_size": world}
    if groups := _groups(described.get("parallel_group_info")):
        distributed["pg_config"] = groups
        # Where members of groups are not known, one clock would make transfers of all that collectives wait.
        metadata |= _boot_of(info.get("end_info"))
    return rank, metadata, distributed


def _boot_of(clocks: object) -> dict[str, int]:
    """Start of the host, from its two clocks as they were read when the profiler stopped; {} where they were not."""
    if not isinstance(clocks, dict):
        return {}
    wall, monotonic = clocks.get("collectionTimeEnd"), clocks.get("MonotonicTimeEnd")
    if isinstance(wall, int) and isinstance(monotonic, int) and 0 < monotonic < wall <= LIMIT_NS:
        return {BOOT_NS: wall - monotonic}
    return {}


def _groups(groups: object) -> list[Mapping[str, Any]]:
    """The process groups with the keys of torch's ``pg_config``."""
    if not isinstance(groups, dict):
        return []
    return [
        {
            "pg_name": name,
            "pg_desc": str(group.get("group_name", "")),
            "pg_size": len(group["global_ranks"]),
            "ranks": group["global_ranks"],
        }
        for name, group in groups.items()
        if isinstance(group, dict) and isinstance(group.get("global_ranks"), list)
    ]


def read_memory(trace: Path, device: int, rank: int) -> tuple[pd.DataFrame, list[str]]:
    """(the memory of a device in time, a warning if the file next to the trace cannot be read)."""
    path = trace.with_name(ASCEND_MEMORY)
    if not path.is_file():
        return empty_table(MEMORY), []
    columns = (_COMPONENT, _TIME, _ALLOCATED, _RESERVED, _DEVICE)
    try:
        with open_regular(path) as file:
            table = pd.read_csv(file, dtype=str, usecols=columns, on_bad_lines="skip", quoting=csv.QUOTE_MINIMAL)
    except (OSError, ValueError, pd.errors.ParserError) as err:
        reason = str(err).split("\n")[0][:80]
        return empty_table(MEMORY), [
            f"{ASCEND_MEMORY} cannot be read ({reason}); expected columns {', '.join(columns)}: memory is not known"
        ]
    rows = table[(table[_COMPONENT] == _ALLOCATOR) & (table[_DEVICE] == f"NPU:{device}")]
    time_ns = nanoseconds([str(text).strip().encode() for text in rows[_TIME]])
    levels = [
        pd.to_numeric(rows[name], errors="coerce").to_numpy(dtype=np.float64) * _MIB for name in (_ALLOCATED, _RESERVED)
    ]
    is_valid = (time_ns >= 0) & (time_ns <= LIMIT_NS)
    for level in levels:
        is_valid &= (level >= 0) & (level < 2.0**53)
    order = np.flatnonzero(is_valid)
    order = order[np.argsort(time_ns[order], kind="stable")]
    allocated, reserved = (np.rint(level[order]).astype(np.int64) for level in levels)
    table_columns = {"t_ns": time_ns[order], "allocated_bytes": allocated, "reserved_bytes": reserved}
    return make_table(MEMORY, {"rank": np.full(len(order), rank, dtype=np.int64), **table_columns}), []


_REMEDY = "copy it anew, or parse the raw data again (torch_npu.profiler.profiler.analyse)"
_RECORDED = f"the {ASCEND_TRACE} that torch_npu.profiler writes with ProfilerActivity.NPU"
_EXPECTED = f"expected {_RECORDED}; {_REMEDY}"
_LAUNCH = "HostToDevice"
_FIRST_OWN_STREAM = 1_000_000
"""Streams of collectives whose stream is not recorded."""
_MOST_AT_ONCE = 64
"""Collectives of one lane that may run at the same time."""
_DEVICE_BITS = 31


def read_ascend(path: Path) -> tuple[Trace, ...]:
    """Read the trace of one rank.

    Raises:
        TraceError: the file cannot be read, is no JSON, or has no event of host or device.
    """
    collected = Collected()
    with paused_gc(), ByteSource(path) as source:
        stream = EventStream(source, decoders=WITH_FLOWS, advice=f"give {_RECORDED}: {_REMEDY}")
        for events in stream.batches():
            collected.add(events)
    warnings = []
    if is_cut := stream.early_end or bool(source.damage):
        warnings.append(
            f"trace ends early ({source.damage or 'cut inside the list of events'}); kept the "
            f"{counted(collected.num_events, 'event')} before it: the device's events come last, so that they may be missing"
        )
    if num_lost := stream.lost_events:
        warnings.append(f"left out {counted(num_lost, 'event')} that could not be read (damaged JSON)")
    return (_trace(path, collected, warnings, num_lost, is_cut=is_cut),)


def _trace(path: Path, collected: Collected, warnings: list[str], num_lost: int, *, is_cut: bool) -> Trace:
    rows = collected.rows() if len(collected.names) else None
    lanes = lanes_of(collected, rows) if rows is not None else None
    if rows is None or lanes is None or not (lanes["category"] != LEFT_OUT).any():
        what = f"{counted(num, 'event')} and none of host or device" if (num := collected.num_events) else "no event"
        raise TraceError(f"{path}: {what}; {_EXPECTED}")
    rank, metadata, distributed = job_facts(path)
    chosen = np.flatnonzero(lanes["category"] != LEFT_OUT)
    ordered = sorted_events([_columns(collected, rows, lanes, chosen)], collected.names.texts, 0)
    if not len(ordered.without_comm_args):
        raise TraceError(f"{path}: no event has a usable time; {_EXPECTED}")
    collectives = np.flatnonzero(lanes["is_collective"])
    places = np.searchsorted(chosen, collectives)
    comm_args = collectives_table(collected, rows.where(collectives), places, ordered, distributed.get("pg_config", ()))
    events = ordered.events(comm_args)
    on_device = events.device[events.device >= 0]
    device = int(on_device[0]) if len(on_device) else 0
    memory, memory_warnings = read_memory(path, device, -1 if rank is None else rank)
    return Trace(
        path=str(path),
        format=InputFormat.ASCEND,
        rank=rank,
        producer="Ascend profiler",
        events=events,
        memory=memory,
        metadata=metadata,
        distributed=distributed,
        warnings=(*warnings, *ordered.warnings, *memory_warnings),
        damage=ordered.damage_with(is_cut=is_cut, num_lost=num_lost),
    )


def _columns(collected: Collected, rows: Slice, lanes: Slice, chosen: npt.NDArray[np.intp]) -> EventColumns:
    """The chosen rows, and behind them the launches that are no rows."""
    is_device = lanes["category"] > Category.HOST_LIMIT
    is_work = is_device & (lanes["category"] != Category.DEVICE_SYNC)
    number, (thread, start_ns, own_number) = launches_of(
        rows, lanes, is_work, collected.flows(FlowStart), collected.flows(FlowEnd)
    )
    # The profiler packs the device into the lowest bits of the process's number.
    pids = [int(text) if text.isdecimal() else 0 for text in collected.processes.texts]
    device = np.array([pid & _DEVICE_BITS for pid in pids], dtype=np.int32)[rows["process"]]
    lane = rows["thread"].copy()
    collectives = np.flatnonzero(lanes["is_collective"])
    lane[collectives] = _streams(rows, collectives, device)
    pairs: tuple[tuple[npt.NDArray[Any], int | Int64], ...] = (
        (lanes["category"], Category.RUNTIME),
        (rows["name"], collected.names[_LAUNCH]),
        (rows["start_ns"], start_ns),
        (rows["dur_ns"], 0),
        (np.where(is_device, device, -1).astype(np.int32), -1),
        (lane, thread),
        (number, own_number),
    )
    more = len(own_number)
    return EventColumns(
        *(
            np.append(column[chosen], np.broadcast_to(np.asarray(added, dtype=column.dtype), more))
            for column, added in pairs
        )
    )


def _streams(rows: Slice, collectives: npt.NDArray[np.intp], device: npt.NDArray[np.int32]) -> Int64:
    """The stream of each collective: that of the first of its tasks; a number of its own lane where no task of it is recorded.

    Collectives of one lane may run at the same time: those that do lie on further streams.
    """
    stream: Int64 = _FIRST_OWN_STREAM + rows["thread"][collectives]
    is_other = ~np.isin(rows["process"], np.unique(rows["process"][collectives]))
    tasks = np.flatnonzero(is_other & np.isin(rows["number"], rows["number"][collectives]) & (rows["task_type"] > 0))
    tasks = tasks[np.argsort(rows["start_ns"][tasks], kind="stable")]
    first = first_like([rows["number"][collectives]], [rows["number"][tasks]])
    is_known = (first >= 0) & (rows["number"][collectives] > 0)
    stream[is_known] = rows["thread"][tasks[first[is_known]]]
    ends: dict[tuple[int, int], int] = {}
    for index in np.argsort(rows["start_ns"][collectives], kind="stable").tolist():
        row, lane = collectives[index], int(stream[index])
        start = int(rows["start_ns"][row])
        for layer in range(_MOST_AT_ONCE):
            place = (int(device[row]), lane + layer * _FIRST_OWN_STREAM)
            if ends.get(place, start) <= start:
                break
        ends[place] = start + int(rows["dur_ns"][row])
        stream[index] = place[1]
    return stream
