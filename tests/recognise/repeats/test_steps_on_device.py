"""Steps whose ranges are the host's: they last as long as the device takes where the host runs ahead of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from pptrace.analysis.report import Report
from pptrace.model.traces import Category
from tests.recognise.kineto_calls import ALL_REDUCE, Rank
from tests.support.analysed import analyse

STEPS, KERNELS = 4, 10
HOST, KERNEL, COPY = 100_000, 25_000, 40_000
"""Times in ns: the range of a step, one of its kernels, the copy of the next step's data."""


def launched(made: Rank, begin: int, free: int, kernel: int = KERNEL, host: int = HOST) -> int:
    """Launch a step's kernels, evenly over ``host``, on a device that is ``free`` from then on; return when it is done."""
    for number in range(KERNELS):
        launch = begin + 10 + number * host // KERNELS
        free = max(free, launch + 5)
        made.kernel("gemm", launch, free, free + kernel, thread=1, stream=7)
        free += kernel
    return free


def report_of(kernel: int, pause: int = 0, with_copies: bool = False, lag: int = 0) -> Report:
    """Steps in which a host launches kernels, one every 10 µs, and waits for ``pause`` at the end of each; the device begins
    ``lag`` later.
    """
    made, free = Rank(0), lag
    for step in range(STEPS):
        begin = step * (HOST + pause)
        made.add(Category.ANNOTATION, f"ProfilerStep#{step + 3}", begin, begin + HOST + pause, thread=1)
        if with_copies:
            made.kernel("copy_of_next_batch", begin + 1, begin + 5, begin + 5 + COPY, thread=1, stream=9)
        free = launched(made, begin, free, kernel)
    return analyse([made.trace()]).report


@pytest.mark.parametrize("with_copies", [False, True])
def test_steps_of_a_host_that_runs_ahead_are_as_long_as_their_work_on_the_device(with_copies: bool) -> None:
    report = report_of(KERNEL, with_copies=with_copies)
    assert [step.step for step in report.steps] == [3, 4, 5, 6]
    for step in report.steps:
        assert step.span_ns == step.length_ns == KERNELS * KERNEL
        assert step.ranks[0].compute_ns == KERNELS * KERNEL


def test_steps_at_whose_ends_the_host_has_waited_for_the_device_are_those_of_the_host() -> None:
    pause = KERNELS * KERNEL
    for step in report_of(KERNEL, pause).steps:
        assert step.span_ns == HOST + pause
        assert step.ranks[0].compute_ns == KERNELS * KERNEL


def test_steps_of_a_device_that_lags_behind_a_part_of_a_step_are_those_of_the_host() -> None:
    first, *others = report_of(kernel=13_000, pause=30_000, lag=50_000).steps
    assert {step.span_ns for step in (first, *others)} == {HOST + 30_000}
    assert first.ranks[0].compute_ns == KERNELS * 13_000 - 50_000
    assert {step.ranks[0].compute_ns for step in others} == {KERNELS * 13_000}


def test_steps_of_a_host_that_is_ahead_now_more_now_less_are_those_of_the_device() -> None:
    """A host that waits for a queue with room: its ranges last from 58 to 90 µs, and the device works 72 µs for each."""
    made, free, length = Rank(0), 12_000, 7_200
    begins = [0, 77_000, 159_000, 232_000, 290_000, 360_000, 450_000, 535_000, 622_000]
    for step, (begin, end) in enumerate(pairwise(begins)):
        made.add(Category.ANNOTATION, f"ProfilerStep#{step}", begin, end, thread=1)
        free = launched(made, begin, free, length, 50_000)
    steps = analyse([made.trace()]).report.steps
    assert len(steps) == len(begins) - 1
    assert {step.ranks[0].compute_ns for step in steps} == {KERNELS * length}


def test_steps_of_a_device_that_waits_for_its_host_are_those_of_the_host() -> None:
    for step in report_of(kernel=2_000).steps:
        assert step.span_ns == HOST
        assert step.ranks[0].compute_ns == KERNELS * 2_000


def test_steps_whose_work_ends_before_their_ranges_now_more_now_less_are_those_of_the_host() -> None:
    """The host goes on for 30 to 90 µs behind the last kernel: a device that has nothing left to do does not lag behind."""
    made, begin = Rank(0), 0
    lengths = [150_000, 90_000, 120_000, 95_000]
    for step, length in enumerate(lengths):
        made.add(Category.ANNOTATION, f"ProfilerStep#{step}", begin, begin + length, thread=1)
        made.kernel("gemm", begin + 10_000, begin + 10_005, begin + 60_000, thread=1, stream=7)
        begin += length
    assert [step.span_ns for step in analyse([made.trace()]).report.steps] == lengths


def test_steps_of_a_host_ahead_begin_with_their_compute_where_a_stream_of_communication_is_the_busiest() -> None:
    """Gradients of each step are reduced during the next one's compute, for longer than that: a stream of its own."""
    made, free, reduced = Rank(0), 0, 0
    for step in range(STEPS):
        begin = step * HOST
        made.add(Category.ANNOTATION, f"ProfilerStep#{step}", begin, begin + HOST, thread=1)
        free = launched(made, begin, free)
        reduced = max(reduced, free)
        reduced_until = reduced + KERNELS * KERNEL + 1_000
        launch = begin + HOST - 10
        made.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", launch, reduced, reduced_until, thread=1, stream=9)
        reduced = reduced_until
    for step in analyse([made.trace()]).report.steps:
        assert step.ranks[0].compute_ns == KERNELS * KERNEL


def test_the_range_behind_the_last_iteration_is_no_step() -> None:
    made = Rank(0)
    for step in range(3):
        begin = step * HOST
        made.add(Category.ANNOTATION, f"ProfilerStep#{step}", begin, begin + (HOST if step < 2 else 500), thread=1)
        if step < 2:
            made.kernel("gemm", begin + 10, begin + 20, begin + 60_000, thread=1, stream=7)
    assert [step.step for step in analyse([made.trace()]).report.steps] == [0, 1]


def test_collectives_of_a_host_ahead_are_of_the_steps_in_which_the_device_runs_them() -> None:
    """All are posted while the device is in its first two steps."""
    made, free = Rank(0), 0
    for step in range(STEPS):
        begin = step * HOST
        made.add(Category.ANNOTATION, f"ProfilerStep#{step}", begin, begin + HOST, thread=1)
        free = launched(made, begin, free)
        until = free + 5_000
        made.call(ALL_REDUCE, begin + HOST - 20, (free, until), thread=1, ranks=[0, 1])
        made.kernel("adam", begin + HOST - 5, until, until + KERNEL, thread=1, stream=7)
        free = until + KERNEL
    for step in analyse([made.trace()]).report.steps:
        assert [(comm.kind, comm.count, comm.total_ns) for comm in step.ranks[0].comms] == [("all_reduce", 1, 5_000)]


def alone(before: int, wait: int = 0, unlaunched: int = 0) -> Report:
    """One step, whose host launches kernels once work of before its recording, of this length, is over, and once it waited;
    the launches of so many of them are missing.
    """
    made = Rank(0)
    for begin in range(-1_000, before, 10_000):
        until = min(begin + 10_000, before)
        made.add(Category.KERNEL, "gemm", begin, until, device=0, stream=7)
    free = max(before, 0) + wait
    made.add(Category.RUNTIME, "cudaDeviceSynchronize", 10, free + 5, thread=1)
    made.add(Category.ANNOTATION, "ProfilerStep#6", 0, free + HOST, thread=1)
    for number in range(KERNELS):
        launch = free + 10 + number * HOST // KERNELS
        kernel = made.kernel("gemm", launch, launch + 5, launch + 5_005, thread=1, stream=7)
        if number >= KERNELS - unlaunched:
            made.events[made.events.index(kernel)] = replace(kernel, correlation=-1)
    return analyse([made.trace()]).report


def test_a_step_alone_begins_when_work_of_before_its_recording_is_over() -> None:
    (step,) = alone(before=60_000).steps
    assert step.ranks[0].compute_ns == KERNELS * 5_000
    assert step.span_ns == step.length_ns == HOST - 15  # from the first kernel to the end of the range


def test_where_later_launches_are_missing_too_work_without_one_may_be_the_steps() -> None:
    (step,) = alone(before=60_000, unlaunched=2).steps
    assert step.length_ns == HOST + 60_000
    assert step.ranks[0].compute_ns is None


def test_copies_that_no_recorder_says_the_launch_of_are_the_steps() -> None:
    made = Rank(0)
    made.add(Category.ANNOTATION, "ProfilerStep#6", 0, HOST, thread=1)
    made.add(Category.MEMCPY, "copy", 100, 30_000, device=0, stream=7)
    made.kernel("gemm", 30_000, 30_010, 60_000, thread=1, stream=7)
    (step,) = analyse([made.trace()]).report.steps
    assert step.span_ns == step.length_ns == HOST


def test_a_step_alone_is_that_of_its_host_where_the_device_does_not_lag() -> None:
    (step,) = alone(before=3_000).steps
    assert step.span_ns == HOST + 3_000


def test_a_step_alone_keeps_what_its_host_does_before_it_launches() -> None:
    (step,) = alone(before=60_000, wait=50_000).steps
    assert step.span_ns == HOST + 110_000
    assert step.length_ns == HOST + 50_000, "the period begins when the device is free"


def test_a_step_alone_lasts_until_its_device_is_done() -> None:
    made = Rank(0)
    made.add(Category.ANNOTATION, "ProfilerStep#6", 0, HOST, thread=1)
    launched(made, 0, 0, host=1_000)
    (step,) = analyse([made.trace()]).report.steps
    assert step.span_ns == step.length_ns == step.ranks[0].compute_ns == KERNELS * KERNEL
