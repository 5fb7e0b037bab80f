"""Launches lost with their kernels are found by the numbers of a process' calls; programs that launch less have lost none."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pptrace.model.traces import Category
from pptrace.recognise.device.lost_launches import with_lost_calls
from tests.support.synthetic import Event, make_trace

UNRECORDED = 3
"""Calls of torch that are made before each launch and not recorded, as ``cudaGetDevice``."""


def recording(
    launches: list[list[str]],
    lost: set[tuple[int, int]],
    name: str = "forward{0} step={0}",
    category: Category = Category.ANNOTATION,
    calls: int = 0,
    polling: tuple[int, int] = (1, 0),
) -> list[Event]:
    """Ranges that launch these kernels, one range after another, without those that were ``lost`` (range, launch).

    Each makes as many ``calls`` at least. Of those that launch nothing, few are recorded: ``polling`` is (thread, how many).
    """
    rows, time, number = [], 0, 0
    thread, most = polling
    for index, kernels in enumerate(launches):
        time += 10
        begin = time
        for position, kernel in enumerate(kernels):
            time, number = time + 10, number + UNRECORDED + 1
            if (index, position) not in lost:
                call = Event(Category.RUNTIME, "cudaLaunchKernel", time, time + 5, thread=1, correlation=number)
                rows += [call, Event(Category.KERNEL, kernel, time + 5, time + 8, 0, 7, correlation=number)]
        others = max(calls - len(kernels) * (UNRECORDED + 1), 0)
        for poll in range(1, min(others, most) + 1):
            time += 2
            query = Event(Category.RUNTIME, "cudaEventQuery", time, time + 1, thread=thread, correlation=number + poll)
            rows.append(query)
        time, number = time + 10, number + UNRECORDED + others
        rows.append(Event(category, name.format(index), begin, time, thread=1))
        time, number = time + 10, number + 1
        rows.append(Event(Category.RUNTIME, "cudaEventRecord", time, time + 1, thread=1, correlation=number))
    return rows


def missing(events: list[Event]) -> list[tuple[str, int]]:
    """(name, how many launches are missing) of the ranges that lack some."""
    trace = make_trace(events)
    names = [trace.events.names[trace.events.name_id[row]].split()[0] for row in with_lost_calls(trace.events).tolist()]
    return sorted((name, names.count(name)) for name in set(names))


KERNELS = ["gemm", "gelu", "gemm", "norm", "add"]
programs = st.lists(st.integers(0, len(KERNELS)), min_size=6, max_size=10)


@given(st.sets(st.tuples(st.integers(2, 9), st.integers(0, 4)), min_size=3, max_size=20))
def test_every_launch_that_equal_ranges_lack_is_counted(lost: set[tuple[int, int]]) -> None:
    found = missing(recording([KERNELS] * 12, lost))
    counts = {index: sum(of == index for of, _ in lost) for index, _ in lost}
    assert found == sorted((f"forward{index}", number) for index, number in counts.items())


def test_operators_need_what_was_called_around_them_and_several_that_are_whole() -> None:
    lost = {(3, 0), (5, 0), (9, 0)}
    assert missing(recording([["gemm"]] * 14, lost, "aten::mm", Category.CPU_OP)) == [("aten::mm", 3)]
    many = {(number, 0) for number in range(1, 12, 2)}
    assert missing(recording([["gemm"]] * 14, many, "aten::mm", Category.CPU_OP)) == []
    assert missing(recording([["gemm"]] * 12, lost, "aten::cudnn_convolution", Category.CPU_OP)) == []


def test_one_or_two_launches_may_be_missing_by_chance() -> None:
    assert missing(recording([KERNELS] * 12, {(3, 0), (5, 0)})) == []


def test_a_range_that_ran_another_kernel_with_as_many_calls_lost_none() -> None:
    launches = [["gemm", "gelu"]] * 6 + [["norm"]] * 3
    assert missing(recording(launches, set(), calls=8)) == []
    launches = [["gemm", "gelu"]] * 6 + [["gemm"]] * 3
    assert len(missing(recording(launches, set(), calls=8))) == 3


@given(programs)
def test_ranges_that_poll_more_where_they_launch_less_lost_none(numbers: list[int]) -> None:
    launches = [KERNELS[:number] for number in numbers]
    calls = len(KERNELS) * (UNRECORDED + 1)
    assert missing(recording(launches, set(), calls=calls, polling=(1, calls))) == []


@given(programs)
def test_ranges_in_which_a_thread_that_launches_nothing_makes_calls_tell_nothing(numbers: list[int]) -> None:
    """As NCCL's watchdog, of which not all calls are recorded."""
    launches = [KERNELS[:number] for number in numbers]
    calls = len(KERNELS) * (UNRECORDED + 1) + 1
    assert missing(recording(launches, set(), calls=calls, polling=(2, 1))) == []


def test_launches_are_missed_among_ranges_that_poll_as_often() -> None:
    lost = {(3, 0), (5, 0), (9, 1)}
    found = missing(recording([["gemm", "gelu"]] * 12, lost, calls=11, polling=(1, 3)))
    assert found == [("forward3", 1), ("forward5", 1), ("forward9", 1)]


def test_numbers_that_do_not_ascend_in_time_tell_nothing() -> None:
    rows = recording([KERNELS] * 12, {(2, 0), (3, 1), (3, 2)})
    of_range = len(KERNELS) * (UNRECORDED + 1) + UNRECORDED + 1

    def by_turns(number: int) -> int:
        return number if number < 0 else number + 1_000_000 * ((number - 1) // of_range % 2)

    assert missing(rows) == [("forward2", 1), ("forward3", 2)]
    assert missing([replace(row, correlation=by_turns(row.correlation)) for row in rows]) == []


def test_what_is_missing_is_counted_once_in_the_innermost_range() -> None:
    rows = recording([KERNELS] * 12, {(2, 0), (3, 1), (3, 2)})
    ranges = [row for row in rows if row.category is Category.ANNOTATION]
    steps = [
        Event(Category.ANNOTATION, f"step{at}", ranges[at].start - 2, ranges[at + 1].end + 2, thread=1)
        for at in range(0, 12, 2)
    ]
    assert missing([*rows, *steps]) == [("forward2", 1), ("forward3", 2)]


def test_launches_whose_kernels_are_there_are_not_lost_with_them() -> None:
    rows = recording([KERNELS] * 12, set())
    launches = [row for row in rows if row.name == "cudaLaunchKernel"]
    assert missing([row for row in rows if row not in launches[20:28]]) == []


@given(programs)
def test_ranges_that_launch_fewer_kernels_or_none_and_make_fewer_calls_lost_none(numbers: list[int]) -> None:
    launches = [*([KERNELS] * 6), *(KERNELS[:number] for number in numbers)]
    assert missing(recording(launches, set())) == []


def test_program_ranges_of_which_no_call_was_recorded_lost_what_others_of_their_name_launch() -> None:
    """As of a light recording, without operators, of which a buffer was dropped."""
    rows = recording([KERNELS] * 12, set())
    first, last = (next(row for row in rows if row.name.startswith(f"forward{at} ")) for at in (4, 6))
    inner = Event(Category.ANNOTATION, "part", first.start + 1, first.end - 1, thread=1)
    buffer = [
        row for row in rows if row.category is not Category.ANNOTATION and first.start < row.start < last.end + 15
    ]
    kept = [*(row for row in rows if row not in buffer), inner]
    assert missing(kept) == [("forward4", 5), ("forward5", 5), ("forward6", 5)]
    names = [f"forward{at} " for at in (*range(3), *range(7, 10))]
    few = [row for row in kept if not row.name.startswith(tuple(names)) or row.category is not Category.ANNOTATION]
    assert missing([row for row in few if row.name != "part"]) == []


def test_calls_of_nccl_always_launch_so_two_that_do_not_are_no_chance() -> None:
    def of(name: str, lost: set[tuple[int, int]], kernels: int = 1) -> list[tuple[str, int]]:
        return missing(recording([["ncclDevKernel_SendRecv"] * kernels] * 6, lost, name))

    assert of("nccl:coalesced", {(1, 0), (4, 0)}) == [("nccl:coalesced", 2)]
    assert of("nccl:coalesced", {(1, 0)}) == of("exchange", {(1, 0), (4, 0)}) == []
    assert of("nccl:coalesced", {(4, 0), (4, 1)}, kernels=2) == []
