"""Programs of a host and its device on paper, run with and without a recorder that costs time at every host event.

Written for itself, step by step as a machine would, and without any code of the package but the types of its tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from pptrace.model.tables import COMM_ARGS, COMMS, empty_table, make_table
from pptrace.model.traces import Category, Events

LATENCY, GAP, LAUNCH, RETURN = 6_000, 1_000, 3_000, 2_000
NODE_COST, NODE_NS = 0.7, 250
"""Cost of recording a node of a graph at its launch, as a part of the cost of an event, and on the device, ns."""
MAIN, AUTOGRAD = 100, 200


@dataclass(frozen=True)
class Op:
    """A host event with what happens inside it; ``before`` and ``after`` is host time around its content, ns."""

    before: int
    after: int
    inside: tuple[object, ...] = ()
    name: str = "aten::op"
    category: Category = Category.CPU_OP


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
class Branches:
    """A graph with nodes on several streams, launched into that of its first node: it runs when all work so far on that has
    ended, and what is launched into it behind the graph waits for all of its nodes.
    """

    nodes: tuple[Launch, ...]


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


@dataclass(frozen=True)
class _Work:
    """Work of a device by its name, which no other has, and its end."""

    name: str
    end: int


@dataclass
class _Machine:
    """One rank while it runs. ``last`` is what the next work of each stream waits for, ``needs`` the work (before, behind)."""

    cost: int
    ready: dict[int, int]
    now: int = 1_000_000
    thread: int = MAIN
    rows: list[tuple[Category, str, int, int, int, int, int]] = field(default_factory=list)
    last: dict[int, tuple[_Work, ...]] = field(default_factory=dict)
    needs: list[tuple[str, str]] = field(default_factory=list)
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
                case Branches(nodes):
                    self._branches(nodes)
                case Synchronise():
                    ends = [work.end for of_stream in self.last.values() for work in of_stream]
                    self._runtime("cudaDeviceSynchronize", max(ends, default=0) + RETURN)
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
        self._end(row, op.category, op.name, start)
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
        if work.after is not None:
            self._runtime("cudaStreamWaitEvent")
        launched = self._runtime("cudaLaunchKernel")
        before = self.last.get(work.stream, ()) + self.last.get(-1 if work.after is None else work.after, ())
        self.last[work.stream] = (self._start(work, launched, before),)

    def _replay(self, graph: Graph) -> None:
        launched = self._launch_graph(len(graph.kernels_ns))
        for index, ns in enumerate(graph.kernels_ns):
            before, gap = self.last.get(graph.stream, ()), 0 if index else GAP
            self.last[graph.stream] = (self._start_node(Launch(graph.stream, ns), launched, before, gap),)

    def _branches(self, nodes: tuple[Launch, ...]) -> None:
        launched, into = self._launch_graph(len(nodes)), nodes[0].stream
        inside: dict[int, tuple[_Work, ...]] = {}
        for node in nodes:
            before = inside.get(node.stream, ()) + inside.get(-1 if node.after is None else node.after, ())
            inside[node.stream] = (self._start_node(node, launched, before or self.last.get(into, ())),)
        self.last[into] = tuple(work for of_stream in inside.values() for work in of_stream)

    def _launch_graph(self, num_nodes: int) -> int:
        recording = round(NODE_COST * self.cost) * (num_nodes - 1)
        return self._runtime("cudaGraphLaunch", recording=recording) + recording

    def _start_node(self, node: Launch, launched: int, before: tuple[_Work, ...], gap: int = GAP) -> _Work:
        return self._start(replace(node, ns=node.ns + (NODE_NS if self.cost else 0)), launched, before, gap, "node")

    def _start(
        self, work: Launch, launched: int, before: tuple[_Work, ...], gap: int = GAP, kind: str = "kernel"
    ) -> _Work:
        """Run work that was launched then, behind other work."""
        start = max([launched + LATENCY, *(done.end + gap for done in before)])
        end = start + work.ns
        if work.group is not None:
            self.came[work.group] = start
            end = max(self.ready.get(work.group, start), start) + work.ns
            self.comms.append((work.group, start, end, "device"))
        name = f"{kind if work.group is None else 'ncclDevKernel_AllReduce'}#{len(self.rows)}"
        self.rows.append((Category.KERNEL, name, start, end - start, work.stream, -1, self.correlation))
        self.needs += [(done.name, name) for done in before]
        return _Work(name, end)

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


def needs_of(program: Sequence[object]) -> list[tuple[str, str]]:
    """(a kernel, one that waits for it) of a program of one rank."""
    machine = _Machine(0, {})
    machine.run(program)
    return machine.needs


def _events(machine: _Machine) -> Events:
    rows = sorted(machine.rows, key=lambda row: (row[2], -row[3]))
    category, names, start, duration, stream, thread, correlation = zip(*rows, strict=True)
    number = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return Events(
        np.array(category, dtype=np.int8),
        np.array([number[name] for name in names], dtype=np.int32),
        np.array(start, dtype=np.int64),
        np.array(duration, dtype=np.int64),
        np.where(np.array(stream) >= 0, 0, -1).astype(np.int32),
        np.array(stream, dtype=np.int64),
        np.array(thread, dtype=np.int64),
        np.array(correlation, dtype=np.int64),
        tuple(number),
        empty_table(COMM_ARGS),
    )


def _comms(machines: Sequence[_Machine]) -> pd.DataFrame:
    rows = [(rank, *comm) for rank, machine in enumerate(machines) for comm in machine.comms]
    size = len(rows)
    columns = {name: np.full(size, "" if dtype == "str" else -1) for name, dtype in COMMS.items()}
    rank, group, start, end, clock = zip(*rows, strict=True) if rows else ((),) * 5
    times = {"start_ns": start, "posted_ns": start, "asked_ns": start, "end_ns": end}
    return make_table(COMMS, {**columns, **times, "rank": rank, "match": group, "clock": clock})
