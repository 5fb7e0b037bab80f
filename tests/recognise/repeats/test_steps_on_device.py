"""Steps whose ranges are the host's: they last as long as the device takes where the host runs ahead of it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pptrace.analysis.report import Report
from pptrace.model.traces import Category
from pptrace.workflow.analyse import analyse
from tests.recognise.kineto_calls import Rank

STEPS, KERNELS = 4, 10
HOST, KERNEL, COPY = 100_000, 25_000, 40_000
"""Times in ns: the range of a step, one of its kernels, the copy of the next step's data."""


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
        for number in range(KERNELS):
            launch = begin + 10 + number * HOST // KERNELS
            free = max(free, launch + 5)
            made.kernel("gemm", launch, free, free + kernel, thread=1, stream=7)
            free += kernel
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
        for number in range(KERNELS):
            launch = begin + 10 + number * 50_000 // KERNELS
            free = max(free, launch + 5)
            made.kernel("gemm", launch, free, free + length, thread=1, stream=7)
            free += length
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
        for number in range(KERNELS):
            launch = begin + 10 + number * HOST // KERNELS
            free = max(free, launch + 5)
            made.kernel("gemm", launch, free, free + KERNEL, thread=1, stream=7)
            free += KERNEL
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
