"""Read traces of Ascend NPUs: the ``trace_view.json`` that torch_npu's profiler makes of what msprof recorded.

    trace_view.json = [ event, … ]        Chrome's trace events with times in µs as text

A collective is one event: the lane of its group has it, and its parts on the planes of its algorithm and on the device's streams
are left out, as are sums that the profiler adds (:mod:`pptrace.ingest.ascend.lanes`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.errors import TraceError
from pptrace.garbage import paused_gc
from pptrace.ingest.ascend.collectives import collectives_table
from pptrace.ingest.ascend.job_facts import TRACE_NAME, job_facts, read_memory
from pptrace.ingest.ascend.lanes import LEFT_OUT, Lanes, lanes_of
from pptrace.ingest.ascend.launches import launches_of
from pptrace.ingest.ascend.trace_rows import Collected, Rows
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.sort_events import EventColumns, sorted_events
from pptrace.ingest.kineto.event_stream import EventStream
from pptrace.ingest.kineto.event_types import WITH_FLOWS, FlowEnd, FlowStart
from pptrace.model.tables import Int64
from pptrace.model.traces import Category, InputFormat, Trace
from pptrace.model.wording import counted

_REMEDY = "copy it anew, or parse the raw data again (torch_npu.profiler.profiler.analyse)"
_RECORDED = f"the {TRACE_NAME} that torch_npu.profiler writes with ProfilerActivity.NPU"
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
    if is_cut := stream.damage.early_end or bool(source.damage):
        warnings.append(
            f"trace ends early ({source.damage or 'cut inside the list of events'}); kept the "
            f"{counted(collected.num_events, 'event')} before it: the device's events come last, so that they may be missing"
        )
    if num_lost := stream.damage.lost_events:
        warnings.append(f"left out {counted(num_lost, 'event')} that could not be read (damaged JSON)")
    return (_trace(path, collected, warnings, num_lost, is_cut=is_cut),)


def _trace(path: Path, collected: Collected, warnings: list[str], num_lost: int, *, is_cut: bool) -> Trace:
    rows = collected.rows() if len(collected.names) else None
    lanes = lanes_of(collected, rows) if rows is not None else None
    if rows is None or lanes is None or not (lanes.category != LEFT_OUT).any():
        what = (
            f"{counted(collected.num_events, 'event')} and none of host or device"
            if collected.num_events
            else "no event"
        )
        raise TraceError(f"{path}: {what}; {_EXPECTED}")
    rank, metadata, distributed = job_facts(path)
    chosen = np.flatnonzero(lanes.category != LEFT_OUT)
    ordered = sorted_events([_columns(collected, rows, lanes, chosen)], collected.names.texts, 0)
    if not len(ordered.without_comm_args):
        raise TraceError(f"{path}: no event has a usable time; {_EXPECTED}")
    collectives = np.flatnonzero(lanes.is_collective)
    places = np.searchsorted(chosen, collectives)
    comm_args = collectives_table(
        collected, rows.select(collectives), places, ordered, distributed.get("pg_config", ())
    )
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


def _columns(collected: Collected, rows: Rows, lanes: Lanes, chosen: npt.NDArray[np.intp]) -> EventColumns:
    """The chosen rows, and behind them the launches that are no rows."""
    is_device = lanes.category > Category.HOST_LIMIT
    is_work = is_device & (lanes.category != Category.DEVICE_SYNC)
    number, (thread, start_ns, own_number) = launches_of(
        rows, lanes, is_work, collected.flows(FlowStart), collected.flows(FlowEnd)
    )
    # The profiler packs the device into the lowest bits of the process's number.
    pids = [int(text) if text.isdecimal() else 0 for text in collected.processes.texts]
    device = np.array([pid & _DEVICE_BITS for pid in pids], dtype=np.int32)[rows.process]
    lane = rows.thread.copy()
    collectives = np.flatnonzero(lanes.is_collective)
    lane[collectives] = _streams(rows, collectives, device)
    pairs: tuple[tuple[npt.NDArray[Any], int | Int64], ...] = (
        (lanes.category, Category.RUNTIME),
        (rows.name, collected.names[_LAUNCH]),
        (rows.start_ns, start_ns),
        (rows.dur_ns, 0),
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


def _streams(rows: Rows, collectives: npt.NDArray[np.intp], device: npt.NDArray[np.int32]) -> Int64:
    """The stream of each collective: that of the first of its tasks; a number of its own lane where no task of it is recorded.

    Collectives of one lane may run at the same time: those that do lie on further streams.
    """
    stream: Int64 = _FIRST_OWN_STREAM + rows.thread[collectives]
    is_other = ~np.isin(rows.process, np.unique(rows.process[collectives]))
    tasks = np.flatnonzero(is_other & np.isin(rows.number, rows.number[collectives]) & (rows.task_type > 0))
    tasks = tasks[np.argsort(rows.start_ns[tasks], kind="stable")]
    numbers, first = np.unique(rows.number[tasks], return_index=True)
    if len(numbers):
        at = np.minimum(np.searchsorted(numbers, rows.number[collectives]), len(numbers) - 1)
        is_known = (numbers[at] == rows.number[collectives]) & (rows.number[collectives] > 0)
        stream = np.where(is_known, rows.thread[tasks[first[at]]], stream)
    ends: dict[tuple[int, int], int] = {}
    for index in np.argsort(rows.start_ns[collectives], kind="stable").tolist():
        row, lane = collectives[index], int(stream[index])
        start = int(rows.start_ns[row])
        for layer in range(_MOST_AT_ONCE):
            place = (int(device[row]), lane + layer * _FIRST_OWN_STREAM)
            if ends.get(place, start) <= start:
                break
        ends[place] = start + int(rows.dur_ns[row])
        stream[index] = place[1]
    return stream
