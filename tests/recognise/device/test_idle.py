"""Causes of a device's idle time: each gap by the launch of the work that ends it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.intervals import Int64, lengths_within, merge
from pptrace.model.device import IdleTime
from pptrace.model.traces import Category
from pptrace.recognise.device.idle import NO_LAUNCHES
from pptrace.recognise.device.work import breakdowns, device_work
from tests.support.synthetic import Event, make_trace

GEMM, NCCL = "ampere_sgemm_128x64_nn", "ncclDevKernel_SendRecv(x)"


@dataclass
class Machine:
    """Host calls and device work, put down one by one."""

    events: list[Event] = field(default_factory=list)
    number: int = 100

    def call(self, name: str, start: int, end: int, thread: int = 1, correlation: int = -1) -> None:
        self.events.append(Event(Category.RUNTIME, name, start, end, thread=thread, correlation=correlation))

    def kernel(
        self,
        call: tuple[int, int] | None,
        start: int,
        end: int,
        name: str = GEMM,
        stream: int = 7,
        thread: int = 1,
        launch: str = "cudaLaunchKernel",
        category: Category = Category.KERNEL,
    ) -> None:
        """Device work and the call that launched it; None where that was not recorded."""
        self.number += 1
        if call is not None:
            self.call(launch, *call, thread, self.number)
        self.events.append(Event(category, name, start, end, 0, stream, correlation=self.number))

    def idle(self) -> IdleTime:
        return device_work(make_trace(self.events).events).idle


def parts(machine: Machine, start: int, end: int) -> tuple[int, int, int, int]:
    """(launch-starved, blocking, dependency, unknown) in a window; they are what is idle in it."""
    idle = machine.idle()
    sets = (idle.launch_starved, idle.blocking, idle.dependency, idle.unknown)
    lengths = tuple(int(lengths_within(intervals, [start], [end])[0]) for intervals in sets)
    (found,) = breakdowns(device_work(make_trace(machine.events).events), [start], [end])
    assert sum(lengths) == found.idle_ns
    return lengths


def test_a_kernel_launched_ahead_waits_for_others() -> None:
    machine = Machine()
    machine.kernel((0, 2), 10, 20)
    machine.kernel((3, 5), 50, 60, stream=9)
    assert parts(machine, 20, 50) == (0, 0, 30, 0)


def test_until_its_launch_has_returned_the_host_holds_up_the_device() -> None:
    """The wait for an event that was issued before the launch may be what held the kernel up afterwards."""
    machine = Machine()
    machine.kernel((0, 2), 10, 20)
    machine.call("cudaStreamWaitEvent", 25, 26)
    machine.kernel((30, 34), 50, 60)
    assert parts(machine, 20, 50) == (14, 0, 16, 0)


def test_a_launch_into_an_idle_device_waits_for_nothing_but_its_delivery() -> None:
    machine = Machine()
    machine.call("cudaStreamWaitEvent", 1, 2)  # for a launch before
    machine.kernel((3, 5), 10, 20)
    machine.kernel((18, 24), 28, 30)
    assert parts(machine, 20, 28) == (8, 0, 0, 0)
    machine.call("cudaStreamWaitEvent", 15, 16, thread=2)  # of a thread that launches something else
    machine.kernel((16, 17), 40, 41, thread=2)
    assert parts(machine, 20, 28) == (8, 0, 0, 0)


def test_a_synchronisation_for_communication_blocks_and_one_for_compute_starves() -> None:
    for name, expected in ((NCCL, (10, 5, 0, 0)), (GEMM, (15, 0, 0, 0))):
        machine = Machine()
        machine.kernel((0, 2), 10, 20, name=name)
        machine.call("cudaStreamSynchronize", 4, 25)
        machine.kernel((30, 33), 35, 40)
        assert parts(machine, 20, 35) == expected
        syncs = machine.idle().synchronisations
        assert syncs.names == (("cudaStreamSynchronize", ""),)
        assert (syncs.drained_start_ns.tolist(), syncs.drained_end_ns.tolist()) == ([20], [35])


@pytest.mark.parametrize(
    ("name", "until", "is_busy"),
    [
        ("cudaLaunchKernel", 2_000_000, False),
        ("cudaMalloc", 2_000_000, False),
        ("cudaMalloc", 90_000, False),
        ("cudaMalloc", 2_000_000, True),
    ],
)
def test_a_call_that_is_far_longer_than_others_is_named_where_the_device_has_nothing_to_do(
    name: str, until: int, is_busy: bool
) -> None:
    machine = Machine()
    for at in (0, 20_000, 40_000):
        machine.kernel((at, at + 5_000), at + 10_000, at + 30_000)
    if name == "cudaMalloc":
        machine.call(name, 60_000, until)
        machine.kernel((until, until + 5), until + 10, until + 20)
    else:
        machine.kernel((60_000, until), until + 10, until + 20)
    if is_busy:
        machine.kernel((50_000, 55_000), 56_000, until + 5_000_000, stream=9)
    syncs = machine.idle().synchronisations
    is_named = until > 1_000_000 and not is_busy
    assert syncs.names == ((name, ""),) * is_named
    assert syncs.drained_start_ns.tolist() == [70_000] * is_named
    assert syncs.drained_end_ns.tolist() == [until + 10] * is_named


def test_a_synchronisation_waits_for_its_own_stream_alone() -> None:
    machine = Machine()
    machine.kernel((0, 2), 10, 18, stream=7)
    machine.kernel((3, 4), 10, 20, name=NCCL, stream=9)
    machine.call("cudaStreamSynchronize", 5, 25, correlation=50)
    machine.kernel((30, 33), 35, 40)
    assert parts(machine, 20, 35) == (10, 5, 0, 0)
    machine.events.append(Event(Category.DEVICE_SYNC, "Stream Sync", 5, 18, 0, 7, correlation=50))
    assert parts(machine, 20, 35) == (15, 0, 0, 0)


def test_threads_that_launch_nothing_hold_up_nothing() -> None:
    machine = Machine()
    machine.kernel((0, 2), 10, 20, name=NCCL)
    machine.call("cudaEventSynchronize", 4, 25, thread=66)
    machine.kernel((30, 33), 35, 40)
    assert parts(machine, 20, 35) == (15, 0, 0, 0)
    syncs = machine.idle().synchronisations
    assert len(syncs) == 1
    assert syncs.drained_start_ns.tolist() == syncs.drained_end_ns.tolist()


def test_a_synchronisation_that_came_after_the_device_ran_dry_is_not_why() -> None:
    machine = Machine()
    machine.kernel((0, 2), 10, 20)
    machine.call("cudaDeviceSynchronize", 22, 24)
    machine.kernel((30, 33), 35, 40)
    syncs = machine.idle().synchronisations
    assert (syncs.drained_end_ns - syncs.drained_start_ns).tolist() == [0]


def test_the_operator_around_a_synchronisation_is_named() -> None:
    machine = Machine()
    machine.kernel((0, 2), 10, 20)
    machine.call("cudaStreamSynchronize", 5, 25)
    for name, start, end in (("ProfilerStep#3", 0, 90), ("aten::item", 3, 27), ("aten::_local_scalar_dense", 4, 26)):
        machine.events.append(Event(Category.CPU_OP, name, start, end, thread=1))
    assert machine.idle().synchronisations.names == (("cudaStreamSynchronize", "aten::item"),)


def test_the_nodes_of_a_graph_were_launched_together() -> None:
    machine = Machine()
    machine.kernel((0, 60), 10, 20, launch="cudaGraphLaunch")
    machine.events.append(Event(Category.KERNEL, GEMM, 30, 40, 0, 7, correlation=machine.number))
    assert parts(machine, 0, 10) == (10, 0, 0, 0)
    assert parts(machine, 20, 30) == (0, 0, 10, 0)


@pytest.mark.parametrize(
    ("call", "copy", "expected"),
    [
        ("cudaMemcpy", "Memcpy DtoH (Device -> Pinned)", (0, 0, 5, 0)),
        ("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)", (0, 0, 5, 0)),
        ("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pinned)", (5, 0, 0, 0)),
    ],
)
def test_a_copy_that_the_host_waits_for_was_asked_for_when_its_call_began(
    call: str, copy: str, expected: tuple[int, int, int, int]
) -> None:
    machine = Machine()
    machine.kernel((0, 2), 10, 20)
    machine.kernel((12, 40), 25, 38, name=copy, launch=call, category=Category.MEMCPY)
    assert parts(machine, 20, 25) == expected
    assert len(machine.idle().synchronisations) == (expected[2] > 0)


def test_work_without_a_recorded_launch_leaves_its_gap_unknown() -> None:
    machine = Machine()
    machine.kernel((0, 2), 10, 20)
    machine.kernel(None, 30, 40)
    machine.kernel((32, 34), 50, 60)
    assert parts(machine, 20, 30) == (0, 0, 0, 10)
    assert parts(machine, 40, 50) == (0, 0, 10, 0)


def test_the_order_of_a_stream_and_of_correlation_ids_tells_of_launches_not_recorded() -> None:
    machine = Machine()
    machine.kernel((0, 2), 10, 20)
    machine.kernel(None, 30, 40, stream=7)
    machine.kernel((3, 5), 50, 60, stream=7)  # launched behind it, and before the gap
    assert parts(machine, 20, 30) == (0, 0, 10, 0)
    machine = Machine()
    machine.kernel(None, 10, 20)  # launched before anything was recorded
    machine.kernel(None, 30, 40, stream=9)
    machine.kernel((35, 36), 50, 60)
    assert parts(machine, 20, 30) == (0, 0, 10, 0)
    assert parts(machine, 0, 10) == (0, 0, 0, 10)  # what ran before the recording is not known


def test_of_work_that_starts_together_the_first_launch_counts() -> None:
    machine = Machine()
    machine.kernel((0, 2), 10, 20)
    machine.kernel((26, 28), 40, 50, stream=7)
    machine.kernel((4, 6), 40, 50, stream=8, thread=2)
    assert parts(machine, 20, 40) == (0, 0, 20, 0)


def test_after_the_last_work_the_host_launches_nothing_unless_work_is_missing() -> None:
    """Also after the recording: a step may end later on other ranks."""
    machine = Machine()
    machine.kernel((0, 2), 10, 20)
    machine.events.append(Event(Category.CPU_OP, "aten::empty", 30, 70, thread=1))
    assert parts(machine, 20, 70) == (50, 0, 0, 0)
    assert parts(machine, 20, 90) == (70, 0, 0, 0)
    machine.call("cudaLaunchHostFunc", 60, 62, correlation=998)
    assert parts(machine, 20, 90) == (70, 0, 0, 0)
    machine.call("cudaLaunchKernel", 60, 62, correlation=999)  # of a kernel that is missing
    assert parts(machine, 20, 90) == (0, 0, 0, 70)


def test_without_any_launch_nothing_is_told_and_a_reason_given() -> None:
    machine = Machine()
    machine.kernel(None, 10, 20)
    machine.kernel(None, 30, 40)
    idle = machine.idle()
    assert idle.reason == NO_LAUNCHES
    assert not len(merge(idle.launch_starved, idle.blocking, idle.dependency, idle.unknown))
    assert Machine().idle().reason == ""


Row = tuple[int, int, int, int, int, bool, int]
placed = st.lists(
    st.tuples(
        st.integers(0, 60),  # start of the work
        st.integers(0, 8),  # its duration
        st.integers(0, 30),  # how long before it its launch begins
        st.integers(0, 12),  # how long that takes
        st.sampled_from([7, 9]),  # stream
        st.booleans(),  # communication
        st.integers(0, 9),  # 0: the launch was not recorded
    ),
    min_size=1,
    max_size=8,
)
synchronised = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=3)


@given(placed, synchronised)
def test_all_time_is_busy_or_idle_for_one_cause_by_the_definition(
    rows: list[Row], syncs: list[tuple[int, int]]
) -> None:
    """Nanosecond by nanosecond: the first work to start from there on, and when it was launched."""
    machine = Machine()
    for start, duration, ahead, took, stream, communicates, recorded in rows:
        call = (start - ahead, min(start - ahead + took, start + 20)) if recorded else None
        machine.kernel(call, start, start + duration, NCCL if communicates else GEMM, stream)
    for start, duration in syncs:
        machine.call("cudaDeviceSynchronize", start, start + duration)
    first, last = min(row[0] for row in rows) - 9, max(row[0] + row[1] for row in rows)
    if not any(row[6] for row in rows):
        assert machine.idle().reason
        return
    assert parts(machine, first, last)[3] == 0 or not all(row[6] for row in rows)
    idle = machine.idle()
    idle_by_cause = list(map(owned, (idle.launch_starved, idle.blocking, idle.dependency, idle.unknown)))
    for time in range(first, last):
        is_busy = any(row[0] <= time < row[0] + row[1] for row in rows)
        assert [time in times for times in idle_by_cause].count(True) == (not is_busy)
        if not is_busy and all(row[6] for row in rows):
            assert time in idle_by_cause[cause_at(time, rows, syncs)]


def owned(intervals: Int64) -> set[int]:
    """The nanoseconds of a set, but for those long before."""
    return {time for start, end in intervals.tolist() for time in range(max(start, -99), min(end, 199))}


def cause_at(time: int, rows: list[Row], syncs: list[tuple[int, int]]) -> int:
    """0: launch-starved, 1: blocking, 2: dependency."""
    gap = max((row[0] + row[1] for row in rows if row[0] + row[1] <= time), default=-(10**6))
    begins = min(row[0] for row in rows if row[0] > time)
    launched = min(min(row[0] - row[2] + row[3], row[0]) for row in rows if row[0] == begins)
    if launched <= gap:
        return 2
    waits = any(start <= time < start + took and awaits(rows, start, start + took) for start, took in syncs)
    return int(time < launched and waits)


def awaits(rows: list[Row], start: int, end: int) -> bool:
    """Return whether the last work to end in a call communicates: of equal ends, the one that started or was listed last."""
    over = [(row[0] + row[1], row[0], index) for index, row in enumerate(rows) if row[0] + row[1] <= end]
    return bool(over) and max(over)[0] > start and rows[max(over)[2]][5]


def test_the_host_holds_up_nothing_inside_a_graph_whatever_ends_the_gap() -> None:
    machine = Machine()
    machine.kernel((0, 2), 10, 20, launch="cudaGraphLaunch")
    machine.events.append(Event(Category.KERNEL, GEMM, 60, 70, 0, 7, correlation=machine.number))
    machine.kernel((30, 34), 40, 45, stream=9)  # an eager kernel while the graph waits for itself
    machine.kernel(None, 50, 52, stream=11)
    assert parts(machine, 20, 60) == (0, 0, 33, 0)
    machine.kernel((80, 84), 90, 95)
    assert parts(machine, 70, 90) == (20, 0, 0, 0)


def test_a_host_that_runs_no_operator_and_calls_nothing_for_a_millisecond_pauses() -> None:
    machine, ms = Machine(), 1_000_000
    machine.events.append(Event(Category.CPU_OP, "aten::mm", 0, 10, thread=1))
    machine.call("cudaDeviceSynchronize", 10, 3 * ms)  # no pause: it waits for the device
    machine.kernel((4 * ms, 4 * ms + 2), 4 * ms + 5, 4 * ms + 9)
    machine.events.append(Event(Category.CPU_OP, "aten::mm", 5 * ms + 1, 6 * ms, thread=2))  # a ns too soon
    machine.events.append(Event(Category.CPU_OP, "aten::mm", 7 * ms, 7 * ms + 5, thread=1))
    between = machine.idle().between_operators
    assert between.tolist() == [[3 * ms, 4 * ms], [6 * ms, 7 * ms]]


def test_without_operators_it_is_not_known_when_a_host_pauses() -> None:
    machine = Machine()
    machine.kernel((0, 2), 10, 20)
    machine.kernel((5_000_000, 5_000_002), 5_000_005, 5_000_009)
    assert machine.idle().between_operators is None
