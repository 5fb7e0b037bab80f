"""Traces made to order: a plan is run on paper with blocking messages, and what each rank did becomes a ``Trace``.

The machine here is its own: it shares the plan's text and the marks with the package under test, but no timing code.
All times are small integers on top of :data:`START`, so that tests can count single nanoseconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from pptrace.marks import (
    Axis,
    Collective,
    CollectiveMark,
    Mark,
    OpMark,
    P2PMark,
    SpanKind,
    SpanMark,
    Transfer,
    WaitMark,
    format_mark,
)
from pptrace.model.traces import Category, Events, InputFormat, Trace
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.lower import lower
from pptrace.schedule.messages import peer_of
from pptrace.schedule.plan import Plan

START = 1_790_000_000_000_000_000
MAIN_THREAD, AUTOGRAD_THREAD = 100, 200
COMPUTE_STREAM, NCCL_STREAM = 7, 20
BYTES = 4096
LEAD = 60
"""Time by which a device run's host range lies before its kernels, ns."""

Cost = Callable[[Action], int]
Message = tuple[str, int, int | None]
"""(direction, sending stage, microbatch): the same for a send and its receive."""


@dataclass(frozen=True)
class Done:
    """One thing that a rank did: a compute action, or one transfer of a group.

    ``start`` is the posting of a transfer, ``met`` the moment from which both of its sides were there, and ``through`` when its
    data had moved; ``end`` is when this rank saw it complete.
    """

    action: Action
    start: int
    end: int
    group: int
    met: int = 0
    through: int = 0


@dataclass(frozen=True)
class PaperRun:
    """Ops of every pipeline rank in one step, in order, from time 0."""

    plan: Plan
    ranks: tuple[tuple[Done, ...], ...]

    def computes(self, rank: int) -> list[Done]:
        return [done for done in self.ranks[rank] if done.action.kind.is_compute]

    def transfers(self, rank: int) -> list[Done]:
        return [done for done in self.ranks[rank] if done.action.kind.is_p2p]

    def group_end(self, rank: int, group: int) -> int:
        return max(done.end for done in self.ranks[rank] if done.group == group)

    @property
    def window(self) -> tuple[int, int]:
        computes = [done for rank in range(self.plan.pp) for done in self.computes(rank)]
        return min(done.start for done in computes), max(done.end for done in computes)

    @property
    def end(self) -> int:
        return max(done.end for rank in self.ranks for done in rank)


def run_on_paper(
    plan: Plan,
    cost: Cost,
    latency: int | Callable[[Message], int] = 0,
    *,
    one_by_one: bool = False,
    is_buffered: bool = False,
    late_by: Mapping[int, int] | None = None,
    before_calls: Callable[[int, Action], int] | None = None,
) -> PaperRun:
    """Run a plan; neighbouring transfers are posted together and their rank goes on when it has seen all complete.

    Args:
        plan: with or without sends and receives.
        cost: of a compute action.
        latency: of a message, once both sides are there; or a function of the message.
        one_by_one: each transfer is posted when the one before it is complete.
        is_buffered: sends wait for nobody, and what they send is on its way at once.
        late_by: how long after the others some ranks begin.
        before_calls: what a rank does before it posts a group of transfers of which this is the first, ns.
    """
    lowered = lower(plan)
    queues = [list(lowered.instructions(rank)) for rank in range(plan.pp)]
    if one_by_one:
        queues = [[(action,) for group in queue for action in group] for queue in queues]
    free = [(late_by or {}).get(rank, 0) for rank in range(plan.pp)]
    posts: dict[Message, dict[bool, int]] = {}
    ranks: list[list[Done]] = [[] for _ in queues]
    group_numbers = [0] * plan.pp
    called = [-1] * plan.pp
    while any(queues):
        progressed = False
        for rank, queue in enumerate(queues):
            if not queue:
                continue
            head = queue[0]
            if before_calls is not None and head[0].kind.is_p2p and called[rank] < group_numbers[rank]:
                free[rank] += before_calls(rank, head[0])
            called[rank], now = group_numbers[rank], free[rank]
            for action in head:
                if action.kind.is_p2p:
                    sides = posts.setdefault(message_of(action), {})
                    progressed |= action.kind.is_send not in sides
                    sides.setdefault(action.kind.is_send, now)
            if any(
                _is_awaited(action, posts[message_of(action)], is_buffered) for action in head if action.kind.is_p2p
            ):
                continue
            seen = now
            for action in head:
                if action.kind.is_p2p:
                    sides = posts[message_of(action)]
                    met = sides[True] if is_buffered else max(sides.values())
                    through = met + (latency if isinstance(latency, int) else latency(message_of(action)))
                    seen = max(seen, now if is_buffered and action.kind.is_send else through)
                    ranks[rank].append(Done(action, now, seen, group_numbers[rank], met, through))
                else:
                    seen = now + cost(action)
                    ranks[rank].append(Done(action, now, seen, group_numbers[rank]))
            free[rank] = seen
            group_numbers[rank] += 1
            queue.pop(0)
            progressed = True
        assert progressed, "the plan deadlocks"
    return PaperRun(plan, tuple(map(tuple, ranks)))


def _is_awaited(action: Action, sides: Mapping[bool, int], is_buffered: bool) -> bool:
    """Return whether a transfer waits for its other side, of which ``sides`` tell when they were there."""
    return True not in sides or (False not in sides and not is_buffered)


def message_of(action: Action) -> Message:
    forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
    stage = action.stage if action.kind.is_send else action.stage + (-1 if forward else 1)
    return ("F" if forward else "B", stage, action.microbatch)


@dataclass(frozen=True)
class Event:
    """One event of a trace under construction."""

    category: Category
    name: str
    start: int
    end: int
    device: int = -1
    stream: int = -1
    thread: int = -1
    correlation: int = -1


def marked(mark: Mark, start: int, end: int, thread: int = MAIN_THREAD) -> Event:
    return Event(Category.ANNOTATION, format_mark(mark), start, end, thread=thread)


@dataclass(frozen=True)
class Job:
    """The whole job around the pipelines: ``dp`` replicas, which run the same plan, over ``steps`` steps.

    Replica k's pipeline rank r is global rank k + dp·r, as Megatron-LM numbers ranks.
    """

    plan: Plan
    dp: int = 1
    steps: int = 1

    @property
    def pipelines(self) -> list[list[int]]:
        return [[replica + self.dp * rank for rank in range(self.plan.pp)] for replica in range(self.dp)]

    def metadata(self, rank: int, host: str = "node-a", with_plan: bool = True) -> dict[str, Any]:
        """The facts that pptrace's recorder writes into a trace."""
        rows = [[str(action) for action in self.plan.compute_actions(r)] for r in range(self.plan.pp)]
        reading = {"time_ns": START, "monotonic_ns": 1_000, "perf_counter_ns": 1_000}
        facts: dict[str, Any] = {
            "rank": rank,
            "world_size": self.dp * self.plan.pp,
            "host": host,
            "mesh": {"pp": self.plan.pp, "vpp": self.plan.num_chunks, "tp": 1, "cp": 1, "dp": self.dp, "ep": 1},
            "pp_ranks": self.pipelines[rank % self.dp],
            "clock": {"start": reading, "stop": reading},
        }
        if with_plan:
            facts["plan"] = {"name": self.plan.name, "num_microbatches": self.plan.num_microbatches, "rows": rows}
        return facts


def host_events(run: PaperRun, rank: int, pipeline: Sequence[int], step: int = 0, at: int = START) -> list[Event]:
    """The marked host ranges of a pipeline rank's step that begins at ``at``; nothing is known of any device."""
    events = [marked(OpMark(done.action, step), at + done.start, at + done.end) for done in run.computes(rank)]
    for group in groups_of(run.transfers(rank)):
        transfers = [Transfer(done.action, pipeline[peer_of(run.plan, done.action)], BYTES) for done in group]
        start, end = group[0].start, max(done.end for done in group)
        events.append(marked(P2PMark(tuple(transfers), Axis.PP, step), at + start, at + end))
        seen = start
        for transfer, done in zip(transfers, group, strict=True):
            until = max(seen, done.end)
            events.append(marked(WaitMark(transfer, step), at + seen, at + until))
            seen = until
    return events


def device_events(run: PaperRun, rank: int, pipeline: Sequence[int], step: int = 0, at: int = START) -> list[Event]:
    """The same as a CUDA run: the host runs ahead, and what it launches is the work.

    Host ranges lie :data:`LEAD` before their work. A compute action is two kernels with a gap of 3 ns between them; those of
    a backward are launched from autograd's own thread. A group of transfers is one NCCL kernel. Ops and latencies of less
    than :data:`LEAD` would make the host ranges overlap.
    """
    events: list[Event] = []
    number = rank * 1_000_000 + step * 10_000

    def launch(name: str, begin: int, start: int, end: int, thread: int, stream: int) -> None:
        nonlocal number
        number += 1
        events.append(
            Event(Category.RUNTIME, "cudaLaunchKernel", at + begin, at + begin + 2, thread=thread, correlation=number)
        )
        events.append(Event(Category.KERNEL, name, at + start, at + end, 0, stream, correlation=number))

    for done in run.computes(rank):
        begin, half = done.start - LEAD, (done.start + done.end) // 2
        events.append(marked(OpMark(done.action, step), at + begin, at + begin + 20))
        thread = MAIN_THREAD if done.action.kind is Kind.F else AUTOGRAD_THREAD
        launch("gemm_f16", begin + 3, done.start, half, thread, COMPUTE_STREAM)
        launch("layer_norm", begin + 8, half + 3, done.end, thread, COMPUTE_STREAM)
    for group in groups_of(run.transfers(rank)):
        transfers = [Transfer(done.action, pipeline[peer_of(run.plan, done.action)], BYTES) for done in group]
        start = group[0].start
        end = max(
            start + 1, *(done.end for done in group)
        )  # a kernel takes time, though a buffered send waits for nobody
        events.append(marked(P2PMark(tuple(transfers), Axis.PP, step), at + start - LEAD, at + start - LEAD + 20))
        launch("ncclDevKernel_SendRecv", start - LEAD + 5, start, end, MAIN_THREAD, NCCL_STREAM)
    return events


def groups_of(dones: Sequence[Done]) -> list[list[Done]]:
    groups: dict[int, list[Done]] = {}
    for done in dones:
        groups.setdefault(done.group, []).append(done)
    return list(groups.values())


def make_trace(
    events: Sequence[Event],
    rank: int | None = 0,
    metadata: Mapping[str, Any] | None = None,
    shift_ns: int = 0,
    shuffle: random.Random | None = None,
) -> Trace:
    """A trace of these events, ``shift_ns`` later; ``shuffle`` changes the order of equal starts and of the name table."""
    listed = list(events)
    names = sorted({event.name for event in listed})
    if shuffle is not None:
        shuffle.shuffle(listed)
        shuffle.shuffle(names)
    listed.sort(key=lambda event: event.start)
    number = {name: index for index, name in enumerate(names)}

    def column(values: list[int], dtype: Any = np.int64) -> Any:
        return np.array(values, dtype=dtype)

    return Trace(
        path=f"rank{rank}.json.gz",
        format=InputFormat.KINETO,
        rank=rank,
        producer="synthetic",
        events=Events(
            category=column([event.category for event in listed], np.int8),
            name_id=column([number[event.name] for event in listed], np.int32),
            start_ns=column([event.start + shift_ns for event in listed]),
            dur_ns=column([event.end - event.start for event in listed]),
            device=column([event.device for event in listed], np.int32),
            stream=column([event.stream for event in listed]),
            thread=column([event.thread for event in listed]),
            correlation=column([event.correlation for event in listed]),
            names=tuple(names),
        ),
        metadata=metadata or {},
    )


@dataclass(frozen=True)
class Recording:
    """Recording of a job's traces: ``events`` is :func:`host_events` or :func:`device_events`."""

    job: Job
    run: PaperRun
    events: Callable[..., list[Event]] = host_events
    pause: int = 500

    def begin(self, step: int) -> int:
        """Begin of a step on all ranks, ns."""
        return START + step * (self.run.end + self.pause)

    def events_of(self, rank: int) -> list[Event]:
        """All events of a global rank: every step with its op, transfer, gradient-sync, optimizer and step ranges."""
        pipeline = self.job.pipelines[rank % self.job.dp]
        index = pipeline.index(rank)
        result = []
        for step in range(self.job.steps):
            at = self.begin(step)
            result += self.events(self.run, index, pipeline, step, at)
            done = at + self.run.end
            if self.job.dp > 1:
                sync = CollectiveMark(Collective.ALL_REDUCE, Axis.DP, self.job.dp, 1 << 20, step)
                result.append(marked(SpanMark(SpanKind.GRAD_SYNC, step), done + 10 + rank, done + 90))
                result.append(marked(sync, done + 20 + rank, done + 80))
            result.append(marked(SpanMark(SpanKind.OPTIMIZER, step), done + 100, done + 150))
            result.append(marked(SpanMark(SpanKind.STEP, step), at - LEAD - 5, done + 200))
        return result

    def traces(
        self,
        with_metadata: bool = True,
        with_plan: bool = True,
        shifts_ns: Mapping[int, int] | None = None,
        shuffle: random.Random | None = None,
        one_host: bool = True,
    ) -> list[Trace]:
        """One trace per rank."""
        ranks = list(range(self.job.dp * self.job.plan.pp))
        traces = [
            make_trace(
                self.events_of(rank),
                rank,
                self.job.metadata(rank, "node-a" if one_host else f"node-{rank}", with_plan) if with_metadata else {},
                (shifts_ns or {}).get(rank, 0),
                shuffle,
            )
            for rank in ranks
        ]
        if shuffle is not None:
            shuffle.shuffle(traces)
        return traces


def record(
    plan: Plan,
    cost: Cost | None = None,
    latency: int | Callable[[Message], int] = 0,
    dp: int = 1,
    steps: int = 1,
    device: bool = False,
    **how: Any,
) -> Recording:
    """A recording of ``plan``, whose ``traces()`` are analysed; without ``cost`` a forward takes 100 ns and a backward 200,
    run as ``how`` says, see :func:`run_on_paper`.
    """
    run = run_on_paper(plan, cost or (lambda action: 100 if action.kind is Kind.F else 200), latency, **how)
    return Recording(Job(plan, dp, steps), run, device_events if device else host_events)


def without(traces: Sequence[Trace], rank: int) -> list[Trace]:
    return [trace for trace in traces if trace.rank != rank]


def renamed(trace: Trace, change: Callable[[str], str]) -> Trace:
    """The trace with every name changed."""
    return replace(trace, events=replace(trace.events, names=tuple(change(name) for name in trace.events.names)))


def run_on_streams(plan: Plan, cost: Cost, latency: int = 0) -> PaperRun:
    """Run a plan whose sends and receives a stream of each rank runs one by one in their order, while ops run.

    Each begins when that of the other rank does, behind the one before it and the op before it; an op waits for what it reads.
    """
    rows = lower(plan).ranks
    begins: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int], int] = {}
    cells = [(rank, at, cell) for rank, row in enumerate(rows) for at, cell in enumerate(row)]
    places = {(message_of(cell), cell.kind.is_send): (rank, at) for rank, at, cell in cells if cell.kind.is_p2p}

    def before(rank: int, at: int) -> list[tuple[int, int]]:
        """Inputs that a thing waits for on its own rank."""
        cell, past = rows[rank][at], [(rank, index) for index in range(at)]
        ops = [place for place in past if not rows[rank][place[1]].kind.is_p2p]
        calls = [place for place in past if rows[rank][place[1]].kind.is_p2p]
        if cell.kind.is_p2p:
            return [*ops[-1:], *calls[-1:]]
        needed = Kind.RECV_F if cell.kind is Kind.F else Kind.RECV_B
        return [
            *ops[-1:],
            *(place for place in calls if rows[rank][place[1]].key == (needed, cell.stage, cell.microbatch)),
        ]

    waiting = [(rank, at) for rank, at, _ in cells]
    while waiting:
        left = []
        for place in waiting:
            cell = rows[place[0]][place[1]]
            both = [place]
            if cell.kind.is_p2p:
                both.append(places[message_of(cell), not cell.kind.is_send])
            needed = [entry for one in both for entry in before(*one)]
            if not all(entry in ends for entry in needed):
                left.append(place)
                continue
            begins[place] = max((ends[entry] for entry in before(*place)), default=0)
            met = max((ends[entry] for entry in needed), default=0)
            ends[place] = met + (latency if cell.kind.is_p2p else cost(cell))
        assert len(left) < len(waiting), "the plan deadlocks"
        waiting = left
    ranks = [
        tuple(
            Done(cell, begins[rank, at], ends[rank, at], at, ends[rank, at] - latency, ends[rank, at])
            for at, cell in enumerate(row)
        )
        for rank, row in enumerate(rows)
    ]
    return PaperRun(plan, tuple(ranks))


def events_launched_ahead(
    run: PaperRun, rank: int, pipeline: Sequence[int], step: int = 0, at: int = START
) -> list[Event]:
    """A CUDA run whose host has launched the whole step before it begins; each send and receive is a kernel of its own."""
    events: list[Event] = []
    begin = at - 10 * len(run.ranks[rank]) - 10
    for index, done in enumerate(run.ranks[rank]):
        host, number = begin + 10 * index, rank * 1_000_000 + step * 10_000 + index
        is_op = done.action.kind.is_compute
        transfer = None if is_op else Transfer(done.action, pipeline[peer_of(run.plan, done.action)], BYTES)
        mark: Mark = OpMark(done.action, step) if transfer is None else P2PMark((transfer,), Axis.PP, step)
        name, stream = ("gemm_f16", COMPUTE_STREAM) if is_op else ("ncclDevKernel_SendRecv", NCCL_STREAM)
        events.append(marked(mark, host, host + 8))
        events.append(
            Event(Category.RUNTIME, "cudaLaunchKernel", host + 2, host + 4, thread=MAIN_THREAD, correlation=number)
        )
        start = at + done.start
        events.append(Event(Category.KERNEL, name, start, at + done.end, 0, stream, correlation=number))
    return events
