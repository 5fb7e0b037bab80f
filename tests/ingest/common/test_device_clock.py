"""A device whose clock is not its host's is found by the calls that waited for it, and its work is shifted back or left out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.ingest.common.device_times import with_host_clock
from pptrace.ingest.formats import read_file
from pptrace.model.damage import Damage
from pptrace.model.traces import Category, InputFormat, Trace
from tests.support.programs import SAMPLES
from tests.support.synthetic import Event, make_trace

US = 1_000
WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
ALL, SOME = "cudaDeviceSynchronize", "cudaEventSynchronize"
PER_STEP, RETURN_US = 20, 15


def trace_of(
    waits: Sequence[str],
    off_us: Callable[[int], int] = lambda _: 0,
    queued_us: int = 10,
    late_us: Sequence[int] = (),
    kernel_us: int = 1_000,
    more: Sequence[Event] = (),
) -> Trace:
    """A host that launches 20 kernels for each of its waits, ``queued_us`` before the first of them begins, and waits; µs.

    Args:
        off_us: the error of the device's clock at a time on the host's.
        late_us: how much later than usual each wait returns.
        more: other events.
    """
    events, now = list(more), 1_000
    for step, (name, late) in enumerate(zip(waits, late_us or [0] * len(waits), strict=True)):
        begin = now + queued_us
        for index in range(PER_STEP):
            number, start = PER_STEP * step + index, begin + kernel_us * index
            launch = now + 5 * index
            events.append(Event(Category.RUNTIME, "cudaLaunchKernel", launch, launch + 4, thread=1, correlation=number))
            start += off_us(start)
            events.append(Event(Category.KERNEL, "gemm", start, start + kernel_us, 0, 7, correlation=number))
        end = begin + kernel_us * PER_STEP + RETURN_US + late
        events.append(Event(Category.RUNTIME, name, now + 5 * PER_STEP, end, thread=1))
        now = end + 100
    return make_trace([dataclasses.replace(event, start=event.start * US, end=event.end * US) for event in events])


def starts_of(trace: Trace) -> list[int]:
    chosen = trace.events.is_of(*WORK)
    order = np.argsort(trace.events.correlation[chosen], kind="stable")
    return (trace.events.start_ns[chosen][order] // US).tolist()


def kinds_of(trace: Trace) -> set[Damage]:
    return {kind for kind in Damage if trace.damage.has(kind)}


def error_us(found: Trace, whole: Trace) -> int:
    return max(abs(one - other) for one, other in zip(starts_of(found), starts_of(whole), strict=True))


@pytest.mark.parametrize("off_us", [-10_000, -2_000, -500, 500, 2_000, 10_000])
@pytest.mark.parametrize("waits", [[ALL] * 3, [SOME] * 3])
@pytest.mark.parametrize("queued_us", [10, 5_000])
def test_a_shift_that_three_waits_agree_on_is_taken_back(off_us: int, waits: list[str], queued_us: int) -> None:
    found = with_host_clock(trace_of(waits, lambda _: off_us, queued_us))
    if waits[0] == SOME and queued_us > 10 and off_us > 0:
        assert not kinds_of(found)  # they may have waited for earlier kernels, and no launch says that they did not
        return
    assert kinds_of(found) == {Damage.KERNELS_BEFORE_LAUNCH if off_us < 0 else Damage.KERNELS_AFTER_WAIT}
    assert len(found.damage) == PER_STEP * 3
    assert error_us(found, trace_of(waits, queued_us=queued_us)) <= 20
    assert f"off the host's by {abs(off_us) / 1e3:,.2f} ms" in found.warnings[-1]
    assert (np.diff(found.events.start_ns) >= 0).all()


@pytest.mark.parametrize("waits", [[], [ALL], [SOME] * 4, [ALL] * 5])
@pytest.mark.parametrize("queued_us", [10, 5_000])
def test_clocks_that_agree_are_left_as_they_are(waits: list[str], queued_us: int) -> None:
    trace = trace_of(waits, queued_us=queued_us)
    assert with_host_clock(trace) is trace


def test_waits_shorter_than_the_shift_count_where_launches_show_it() -> None:
    found = with_host_clock(trace_of([ALL] * 3, lambda _: -2_000, kernel_us=50))
    assert error_us(found, trace_of([ALL] * 3, kernel_us=50)) <= 20
    late = with_host_clock(trace_of([ALL] * 3, lambda _: -2_000, kernel_us=50, late_us=[3_000] * 3))
    assert not starts_of(late), "launches do not tell the same"


def test_waits_for_all_outweigh_those_that_may_be_for_earlier_work() -> None:
    waits, late_us = [ALL] * 3 + [SOME] * 6, [0, 0, 0, -3_000, -4_500, -6_000, -7_000, -9_000, -11_000]
    found = with_host_clock(trace_of(waits, lambda _: -2_000, 5_000, late_us))
    assert error_us(found, trace_of(waits, queued_us=5_000, late_us=late_us)) <= 20


def test_projected_ranges_are_shifted_with_the_work_and_far_work_tells_nothing() -> None:
    projected = Event(Category.DEVICE_ANNOTATION, "forward", 3_000, 4_000, 0, 7)
    far = Event(Category.KERNEL, "gemm", 3_600_000_000, 3_600_000_010, 0, 7, correlation=3)
    found = with_host_clock(trace_of([ALL] * 3, lambda _: -2_000, 5_000, more=[projected, far]))
    (start,) = found.events.start_ns[found.events.is_of(Category.DEVICE_ANNOTATION)]
    assert start == pytest.approx(5_000 * US, abs=20 * US)


def test_a_few_kernels_before_their_launches_are_no_clock() -> None:
    assert not kinds_of(with_host_clock(trace_of([ALL] * 3, lambda now: -2_000 if now < 5_000 else 0)))


@pytest.mark.parametrize(
    ("off_us", "kind"), [(-2_000, Damage.KERNELS_BEFORE_LAUNCH), (20_000, Damage.KERNELS_AFTER_WAIT)]
)
@pytest.mark.parametrize("num_waits", [1, 2])
def test_one_wait_or_two_make_the_times_of_the_device_unknown(num_waits: int, off_us: int, kind: Damage) -> None:
    found = with_host_clock(trace_of([ALL] * num_waits, lambda _: off_us, 5_000))
    assert kinds_of(found) == {kind}
    assert len(found.damage) == PER_STEP * num_waits
    assert not found.events.is_of(*WORK).any()
    assert "How far it is off is not known" in found.warnings[-1]


def test_a_wait_that_returned_late_is_no_shift_where_work_begins_right_after_its_launch() -> None:
    assert not kinds_of(with_host_clock(trace_of([ALL], late_us=[2_000])))
    assert not kinds_of(with_host_clock(trace_of([ALL] * 3, late_us=[2_000] * 3)))


def test_a_host_that_returns_late_now_and_then_is_no_shift() -> None:
    assert not kinds_of(with_host_clock(trace_of([ALL] * 5, queued_us=5_000, late_us=[0, 3_000, 5_000, 700, 0])))
    assert not kinds_of(with_host_clock(trace_of([ALL] * 2, queued_us=5_000, late_us=[0, 3_000])))
    late_us = [2_000, 2_000, 2_000, 0, 500, 900, 4_000]
    assert not kinds_of(with_host_clock(trace_of([ALL] * 7, queued_us=5_000, late_us=late_us)))


def test_waits_while_another_thread_launches_tell_nothing() -> None:
    """Of the device's work until a wait returns, some was launched while the wait had begun."""
    more = []
    for step, end in enumerate([28_015, 55_130, 82_245]):
        launch, number = end - 4_000, 1_000 + step
        more.append(Event(Category.RUNTIME, "cudaLaunchKernel", launch, launch + 4, thread=2, correlation=number))
        more.append(Event(Category.KERNEL, "gemm", end - 2_000, end - 15, 0, 9, correlation=number))
    trace = trace_of([ALL] * 3, queued_us=5_000, late_us=[2_000] * 3, more=more)
    assert with_host_clock(trace) is trace
    ends = trace.events.end_ns[trace.events.rows_named(re.compile(ALL))]
    assert ends.tolist() == [event.end * US + 15 * US for event in more[1::2]]


def test_a_launch_of_another_thread_that_ends_within_a_wait_tells_nothing() -> None:
    more = []
    for step in range(3):
        begin, number = 1_000 + step * 25_115, 1_000 + step
        launch = (begin + 90, begin + 200)
        more.append(Event(Category.RUNTIME, "cudaLaunchKernel", *launch, thread=2, correlation=number))
        more.append(Event(Category.KERNEL, "gemm", begin + 24_000, begin + 27_000, 0, 9, correlation=number))
    trace = trace_of([ALL] * 3, queued_us=5_000, more=more)
    waits = trace.events.rows_named(re.compile(ALL))
    assert trace.events.start_ns[waits].tolist() == [event.start * US + 10 * US for event in more[::2]]
    assert with_host_clock(trace) is trace


@pytest.mark.parametrize("queued_us", [10, 5_000])
@pytest.mark.parametrize("percent", [-4, 4])
def test_the_times_of_a_clock_that_drifts_are_unknown(percent: int, queued_us: int) -> None:
    found = with_host_clock(trace_of([ALL] * 6, lambda now: now * percent // 100, queued_us))
    assert kinds_of(found) == {Damage.KERNELS_BEFORE_LAUNCH if percent < 0 else Damage.KERNELS_AFTER_WAIT}
    assert not starts_of(found)


@pytest.mark.parametrize("off_us", [-2_000, 2_000])
@pytest.mark.parametrize("waits", [[ALL] * 5, [SOME] * 5])
def test_a_clock_that_jumps_is_not_taken_for_one_that_is_off_all_along(off_us: int, waits: list[str]) -> None:
    found = with_host_clock(trace_of(waits, lambda now: off_us if now > 40_000 else 0, 1_000))
    assert not starts_of(found) or not kinds_of(found)


def test_a_jump_between_two_errors_makes_times_unknown() -> None:
    found = with_host_clock(trace_of([ALL] * 5, lambda now: -2_000 if now < 50_000 else -4_000, 6_000))
    assert kinds_of(found) == {Damage.KERNELS_BEFORE_LAUNCH}
    assert not starts_of(found)


@pytest.mark.parametrize("queued_us", [10, 5_000])
def test_waits_for_earlier_events_tell_nothing(queued_us: int) -> None:
    trace = trace_of([SOME] * 5, queued_us=queued_us)
    is_wait = np.array([name == SOME for name in trace.events.names])[trace.events.name_id]
    sooner = replace(trace.events, dur_ns=trace.events.dur_ns - np.where(is_wait, 4_000 * US, 0))
    assert not kinds_of(with_host_clock(replace(trace, events=sooner)))


def test_waits_behind_work_that_was_not_recorded_tell_nothing() -> None:
    trace = trace_of([ALL] * 3, queued_us=5_000, late_us=[2_000] * 3)
    lost = np.isin(trace.events.correlation, PER_STEP * np.arange(1, 4) - 1) & trace.events.is_of(*WORK)
    assert not kinds_of(with_host_clock(replace(trace, events=trace.events.take(np.flatnonzero(~lost)))))
    assert kinds_of(with_host_clock(trace)) == {Damage.KERNELS_BEFORE_LAUNCH}


def test_traces_without_all_calls_or_with_several_devices_are_left_as_they_are() -> None:
    trace = trace_of([ALL] * 3, lambda _: -2_000, 5_000)
    device = np.where(trace.events.correlation == 3, 1, trace.events.device).astype(np.int32)
    for other in (
        replace(trace, format=InputFormat.NSYS_SQLITE),
        replace(trace, events=replace(trace.events, device=device)),
        make_trace([]),
    ):
        assert with_host_clock(other) is other


def test_no_sample_has_a_clock_that_is_off() -> None:
    paths = sorted(SAMPLES.glob("gpu_*/rank*.json.gz"))
    assert len(paths) > 20
    for path in paths:
        (trace,) = read_file(path, InputFormat.KINETO)
        assert not kinds_of(trace) & {Damage.KERNELS_BEFORE_LAUNCH, Damage.KERNELS_AFTER_WAIT}
