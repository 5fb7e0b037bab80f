"""Collect the events of an Ascend profiler's ``trace_view.json`` as columns.

    complete = { "ph": "X", "name", "pid", "tid", "ts": "µs", "dur", ["cat"], "args": {…} }
    flow     = { "ph": "s" | "f", "cat": "HostToDevice", "id", "pid", "tid", "ts" }
    metadata = { "ph": "M", "name": "process_name" | "thread_name", "pid", "tid", "args": {"name"} }

``args`` of a task: ``Task Type``, ``connection_id``; of a collective: ``connection_id``, ``data_type``, ``count``; of an event of
the task queue: ``correlation_id``. What a process is, its name tells, which may follow its events.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from pptrace.ingest.common.codes import Codes
from pptrace.ingest.common.json_texts import Integers, Scalar, nanoseconds
from pptrace.ingest.kineto.event_types import (
    Complete,
    Event,
    FlowEnd,
    FlowStart,
    Metadata,
    text_of,
)
from pptrace.ingest.kineto.salvage import args_of_each
from pptrace.slices import Slice

HOST_TO_DEVICE = "HostToDevice"
_QUEUE = ("enqueue", "dequeue")


class _Args(Struct, frozen=True, gc=False):
    task_type: str | None = msgspec.field(default="", name="Task Type")
    connection: Scalar = msgspec.field(default=-1, name="connection_id")
    correlation: Scalar = msgspec.field(default=-1, name="correlation_id")
    dtype: str | None = msgspec.field(default="", name="data_type")
    count: Scalar = -1


ROWS = (
    *("process", "thread", "category", "name", "start_ns", "dur_ns"),
    *("task_type", "number", "dtype", "count"),
)
"""Columns of complete events. ``process`` are indices of :attr:`Collected.processes`; ``number`` is the connection of a task or
call, or the correlation of an event of the task queue, -1 where there is none.
"""
FLOWS = ("id", "process", "thread", "t_ns")
"""Columns of the ends of arrows from calls of the host to device work: codes of their ids, and where and when they are."""


class Collected(Struct):
    """All events so far. ``processes`` and other :class:`Codes` give texts by code; a process is its pid as text."""

    processes: Codes = field(default_factory=Codes)
    categories: Codes = field(default_factory=Codes)
    names: Codes = field(default_factory=Codes)
    task_types: Codes = field(default_factory=Codes)
    dtypes: Codes = field(default_factory=Codes)
    process_names: dict[int, str] = field(default_factory=dict)
    thread_names: dict[tuple[int, int], str] = field(default_factory=dict)
    num_events: int = 0
    _integers: Integers = field(default_factory=Integers)
    _flow_ids: dict[Scalar, int] = field(default_factory=dict)
    _rows: list[tuple[npt.NDArray[np.generic], ...]] = field(default_factory=list)
    _flows: dict[type, list[tuple[npt.NDArray[np.generic], ...]]] = field(default_factory=dict)

    def add(self, events: Sequence[Event]) -> None:
        self.num_events += len(events)
        if complete := [event for event in events if type(event) is Complete]:
            self._add_complete(complete)
        for kind in (FlowStart, FlowEnd):
            flows = [event for event in events if type(event) is kind and event.cat == HOST_TO_DEVICE]
            if flows:
                ids = [self._flow_ids.setdefault(str(flow.id), len(self._flow_ids)) for flow in flows]
                columns = (
                    np.array(ids, dtype=np.int64),
                    self.processes.of([str(flow.pid) for flow in flows]),
                    self._integers([flow.tid for flow in flows]),
                    nanoseconds([flow.ts for flow in flows]),
                )
                self._flows.setdefault(kind, []).append(columns)
        for event in events:
            if type(event) is not Metadata or event.args is None:
                continue
            process = self.processes[str(event.pid)]
            if event.name == "process_name":
                self.process_names[process] = text_of(event.args.name)
            elif event.name == "thread_name":
                self.thread_names[process, int(self._integers([event.tid])[0])] = text_of(event.args.name)

    def rows(self) -> Slice:
        """The complete events (:data:`ROWS`); they are moved out."""
        columns = zip(*self._rows, strict=True)
        self._rows = []
        return Slice({name: np.concatenate(parts) for name, parts in zip(ROWS, columns, strict=True)})

    def flows(self, kind: type[FlowStart]) -> Slice:
        none = np.zeros(0, dtype=np.int64)
        empty = (none, none.astype(np.int32), none, none)
        columns = zip(empty, *self._flows.get(kind, ()), strict=True)
        return Slice({name: np.concatenate(parts) for name, parts in zip(FLOWS, columns, strict=True)})

    def _add_complete(self, events: Sequence[Complete]) -> None:
        categories = [event.cat for event in events]
        with_args = [
            index for index, category in enumerate(categories) if not category or category in _QUEUE
        ]  # Python's ranges have long ones that are not used
        args = args_of_each(_Args, [events[index].args for index in with_args])
        rows = np.array(with_args, dtype=np.intp)
        number, count = (np.full(len(events), -1, dtype=np.int64) for _ in range(2))
        task_type, dtype = (np.full(len(events), codes[""], dtype=np.int32) for codes in (self.task_types, self.dtypes))
        connection = self._integers([item.connection for item in args])
        number[rows] = np.where(connection >= 0, connection, self._integers([item.correlation for item in args]))
        count[rows] = self._integers([item.count for item in args])
        task_type[rows] = self.task_types.of([item.task_type for item in args])
        dtype[rows] = self.dtypes.of([item.dtype for item in args])
        self._rows.append(
            (
                self.processes.of([str(event.pid) for event in events]),
                self._integers([event.tid for event in events]),
                self.categories.of(categories),
                self.names.of([event.name or "" for event in events]),
                nanoseconds([event.ts for event in events]),
                nanoseconds([event.dur for event in events]),
                task_type,
                number,
                dtype,
                count,
            )
        )
