"""Programs of a host and its device on paper, run with and without a recorder that costs time at every host event.

Written for itself, step by step as a machine would, and without any code of the package but the types of its tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from pptrace.model.tables import COMM_ARGS, COMMS, empty_table, make_table
from pptrace.model.traces import Category, Events

LATENCY, GAP, LAUNCH, RETURN = 6_000, 1_000, 3_000, 2_000
NODE_COST, NODE_NS = 0.7, 250
"""What recording a node of a graph costs at its launch, as a part of the cost of an event, and on the device, ns."""
MAIN, AUTOGRAD = 100, 200


@dataclass(frozen=True)
class Op:
    """A host event with what happens inside it; ``before`` and ``after`` is host time around its content, ns."""

    before: int
    after: int
    inside: tuple[object, ...] = ()
    name: str = "aten::op"


@dataclass(frozen=True)
class Python:
    """Host time without events, ns."""

    ns: int


@dataclass(frozen=True)
class Launch:
    """Device work of ``ns`` on a stream; ``after`` is a stream whose work so far it waits for; ``group``: a collective."""

    stream: int
    ns: int
    after: int | None = None
    group: int | None = None


@dataclass(frozen=True)
class Graph:
    """A graph of kernels of these lengths on a stream, launched by one call."""

    stream: int
    kernels_ns: tuple[int, ...]


@dataclass(frozen=True)
class Synchronise:
    """A call that returns when the device has done everything."""


@dataclass(frozen=True)
class Meet:
    """A collective on the host, which all ranks leave ``ns`` after the last has come."""

    group: int
    ns: int


@dataclass(frozen=True)
class Backward:
    """Work of autograd's thread while the main thread waits, which goes on ``after`` ns after it."""

    inside: tuple[object, ...]
    after: int = 30_000


@dataclass
class _Machine:
    """One rank while it runs."""

    cost: int
    ready: dict[int, int]
    now: int = 1_000_000
    thread: int = MAIN
    rows: list[tuple[Category, str, int, int, int, int, int]] = field(default_factory=list)
    free: dict[int, int] = field(default_factory=dict)
    came: dict[int, int] = field(default_factory=dict)
    comms: list[tuple[int, int, int, str]] = field(default_factory=list)
    correlation: int = 0

    def run(self, program: Sequence[object]) -> None:
        for step in program:
            match step:
                case Python(ns):
                    self.now += ns
                case Op():
                    self._event(step)
                case Launch():
                    self._launch(step)
                case Graph():
                    self._replay(step)
                case Synchronise():
                    self._runtime("cudaDeviceSynchronize", max(self.free.values(), default=0) + RETURN)
                case Meet(group, ns):
                    self._meet(group, ns)
                case Backward(inside, after):
                    self.now += 20_000
                    self.thread = AUTOGRAD
                    self.run(inside)
                    self.thread = MAIN
                    self.now += after

    def _event(self, op: Op) -> None:
        self.now += self.cost // 2
        start, row = self.now, self._row()
        self.now += op.before
        self.run(op.inside)
        self.now += op.after
        self._end(row, Category.CPU_OP, op.name, start)
        self.now += self.cost // 2

    def _row(self) -> int:
        self.rows.append((Category.OTHER, "", 0, 0, -1, -1, -1))
        return len(self.rows) - 1

    def _end(self, row: int, category: Category, name: str, start: int, correlation: int = -1) -> None:
        self.rows[row] = (category, name, start, self.now - start, -1, self.thread, correlation)

    def _runtime(self, name: str, until: int = 0, recording: int = 0) -> int:
        self.now += self.cost // 4
        start, row = self.now, self._row()
        self.correlation += 1
        self.now += 1_000 if until else LAUNCH
        self.now += self.cost // 2 + recording
        self.now = max(self.now, until)
        self._end(row, Category.RUNTIME, name, start, self.correlation)
        self.now += self.cost // 4
        return start

    def _launch(self, work: Launch) -> None:
        launched = self._runtime("cudaLaunchKernel")
        start = max(launched + LATENCY, self.free.get(work.stream, -GAP) + GAP)
        if work.after is not None and self.free.get(work.after, 0) > start:
            start = self.free[work.after] + GAP
        end = start + work.ns
        if work.group is not None:
            self.came[work.group] = start
            end = max(self.ready.get(work.group, start), start) + work.ns
            self.comms.append((work.group, start, end, "device"))
        self.free[work.stream] = end
        name = "kernel" if work.group is None else "ncclDevKernel_AllReduce"
        self.rows.append((Category.KERNEL, name, start, end - start, work.stream, -1, self.correlation))

    def _replay(self, graph: Graph) -> None:
        recording = round(NODE_COST * self.cost) * (len(graph.kernels_ns) - 1)
        launched = self._runtime("cudaGraphLaunch", recording=recording)
        now = max(launched + LATENCY + recording, self.free.get(graph.stream, -GAP) + GAP)
        for ns in graph.kernels_ns:
            length = ns + (NODE_NS if self.cost else 0)
            self.rows.append((Category.KERNEL, "node", now, length, graph.stream, -1, self.correlation))
            now += length
        self.free[graph.stream] = now

    def _meet(self, group: int, ns: int) -> None:
        self.now += self.cost // 2
        start, row = self.now, self._row()
        self.came[group] = start
        self.now = max(self.ready.get(group, start), start) + ns
        self._end(row, Category.ANNOTATION, "gloo:all_reduce", start)
        self.comms.append((group, start, self.now, "host"))
        self.now += self.cost // 2


def run_programs(programs: Sequence[Sequence[object]], cost: int = 0) -> tuple[list[Events], pd.DataFrame]:
    """The events of each rank, and their matched communication; recording an event costs ``cost`` ns, a multiple of 4."""
    ready: dict[int, int] = {}
    while True:
        machines = [_Machine(cost, ready) for _ in programs]
        for machine, program in zip(machines, programs, strict=True):
            machine.run(program)
        came = {group: max(m.came[group] for m in machines if group in m.came) for m in machines for group in m.came}
        if came == ready:
            return [_events(machine) for machine in machines], _comms(machines)
        ready = came


def _events(machine: _Machine) -> Events:
    rows = sorted(machine.rows, key=lambda row: (row[2], -row[3]))
    category, names, start, duration, stream, thread, correlation = zip(*rows, strict=True)
    distinct = tuple(dict.fromkeys(names))
    return Events(
        np.array(category, dtype=np.int8),
        np.array([distinct.index(name) for name in names], dtype=np.int32),
        np.array(start, dtype=np.int64),
        np.array(duration, dtype=np.int64),
        np.where(np.array(stream) >= 0, 0, -1).astype(np.int32),
        np.array(stream, dtype=np.int64),
        np.array(thread, dtype=np.int64),
        np.array(correlation, dtype=np.int64),
        distinct,
        empty_table(COMM_ARGS),
    )


def _comms(machines: Sequence[_Machine]) -> pd.DataFrame:
    rows = [(rank, *comm) for rank, machine in enumerate(machines) for comm in machine.comms]
    size = len(rows)
    columns = {name: np.full(size, "" if dtype == "str" else -1) for name, dtype in COMMS.items()}
    rank, group, start, end, clock = zip(*rows, strict=True) if rows else ((),) * 5
    times = {"start_ns": start, "posted_ns": start, "asked_ns": start, "end_ns": end}
    return make_table(COMMS, {**columns, **times, "rank": rank, "match": group, "clock": clock})
