"""Device work that lasts beyond its successors on one stream is cut; all else is as it was recorded."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.ingest.common.device_times import with_sequential_streams
from pptrace.model.traces import Category, Trace
from pptrace.workflow.load import load
from tests.support.extent import ALL
from tests.support.programs import SAMPLES
from tests.support.synthetic import Event, make_trace

US = 1_000
LINE = "last longer than what follows on their stream"
Work = list[tuple[int, int, int]]


def trace_of(work: Work, correlations: list[int] | None = None, category: Category = Category.KERNEL) -> Trace:
    """A trace with pieces of work (stream, start, duration in µs) in order of their starts."""
    pieces = zip(work, correlations or range(len(work)), strict=True)
    return make_trace(
        [
            Event(category, "kernel", start * US, (start + duration) * US, 0, stream, correlation=number)
            for (stream, start, duration), number in pieces
        ]
    )


def durations_of(trace: Trace) -> list[int]:
    return (with_sequential_streams(trace).events.dur_ns // US).tolist()


def test_work_that_outlasts_its_successor_ends_where_that_begins() -> None:
    trace = trace_of([(7, 0, 10), (7, 20, 3000), (8, 25, 30), (7, 40, 10), (7, 60, 10)])
    assert durations_of(trace) == [10, 20, 30, 10, 10]
    (warning,) = with_sequential_streams(trace).warnings
    assert warning.startswith(
        f"1 piece of device work {LINE.replace('last', 'lasts').replace('their', 'its')}, up to 3.00 ms"
    )


def test_it_lasts_no_longer_than_the_longest_of_three_others_of_its_name() -> None:
    assert durations_of(trace_of([(7, 0, 3000), (7, 200, 10), (7, 300, 12), (7, 400, 11)])) == [12, 10, 12, 11]
    assert durations_of(trace_of([(7, 0, 3000), (7, 200, 10), (7, 300, 12)])) == [200, 10, 12]


def test_work_without_correlation_is_each_a_call_of_its_own() -> None:
    assert durations_of(trace_of([(7, 0, 3000), (7, 20, 10), (7, 40, 10)], [-1, -1, -1])) == [20, 10, 10]


def test_several_overruns_in_a_row_are_all_seen() -> None:
    assert durations_of(trace_of([(7, 0, 3000), (7, 20, 3000), (7, 40, 10)])) == [20, 20, 10]


@pytest.mark.parametrize(
    ("work", "correlations", "category"),
    [
        ([(7, 0, 10), (7, 9, 10), (7, 18, 3)], None, Category.KERNEL),  # the next one is launched early
        ([(7, 0, 10), (7, 10, 3000)], None, Category.KERNEL),  # nothing follows
        ([(7, 0, 300), (8, 10, 20)], None, Category.KERNEL),  # of another stream
        ([(7, 0, 300), (7, 10, 20)], [5, 5], Category.KERNEL),  # branches of a graph
        ([(7, 0, 300), (7, 10, 20)], None, Category.DEVICE_ANNOTATION),
        ([(7, 0, 12), (7, 5, 6)], None, Category.KERNEL),  # a device's clock
        ([(-1, 0, 300), (-1, 10, 20)], None, Category.KERNEL),  # of streams that are not known
    ],
)
def test_what_streams_may_do_stays(work: Work, correlations: list[int] | None, category: Category) -> None:
    trace = trace_of(work, correlations, category)
    assert with_sequential_streams(trace) is trace


def test_work_that_nothing_follows_ends_with_the_wait_for_its_device() -> None:
    kernels = [Event(Category.KERNEL, "gemm", at, at + 3_000_000, 0, 7, correlation=at) for at in (50, 60)]
    calls = [Event(Category.RUNTIME, "cudaLaunchKernel", at - 49, at - 48, correlation=at) for at in (50, 60)]
    early, late = (Event(Category.RUNTIME, "cudaDeviceSynchronize", at, at + 90_000) for at in (0, 20))
    assert durations_by_start(make_trace([*kernels, *calls, early, late])) == {50: 10, 60: 190_000 - 40}
    assert durations_by_start(make_trace([*kernels, *calls, early])) == {50: 3_000_000, 60: 3_000_000}
    other = Event(Category.KERNEL, "gemm", 55, 65, 1, 7, correlation=55)
    several = durations_by_start(make_trace([*kernels, *calls, early, late, other]))
    assert several == {50: 3_000_000, 55: 10, 60: 3_000_000}, "which device was waited for is not known"


def durations_by_start(trace: Trace) -> dict[int, int]:
    events = with_sequential_streams(trace).events
    rows = np.flatnonzero(events.category == Category.KERNEL)
    return dict(zip(events.start_ns[rows].tolist(), events.dur_ns[rows].tolist(), strict=True))


def test_the_replay_of_a_graph_ends_where_the_next_one_begins() -> None:
    trace = trace_of([(7, 0, 300), (7, 10, 20), (7, 100, 150), (7, 260, 20)], [5, 5, 6, 6])
    assert durations_of(trace) == [100, 20, 150, 20]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=30))
def test_after_it_work_of_a_stream_ends_in_its_order(gaps: Work) -> None:
    start, work = 0, []
    for stream, gap, duration in gaps:
        start += gap + 1
        work.append((stream, start, duration))
    events = with_sequential_streams(trace_of(work)).events
    for stream in (1, 2, 3):
        ends = events.end_ns[events.stream == stream]
        assert (np.diff(np.minimum.accumulate(ends[::-1])[::-1]) >= 0).all()
        assert (ends[:-1] <= np.minimum.accumulate(ends[::-1])[::-1][1:] + 2 * US).all()


@pytest.mark.parametrize("sample", ["gpu_1f1b_p4", *["gpu_nccl_1f1b_p4"] * ALL])
def test_a_run_with_kernels_of_300_ms_has_the_figures_of_the_run_without(sample: str, tmp_path: Path) -> None:
    """As recorders of ROCm do to single kernels (AMD-AGI/TraceLens issue 669): those that have a successor."""
    for path in SAMPLES.joinpath(sample).glob("rank*.json.gz"):
        content = json.loads(gzip.decompress(path.read_bytes()))
        kernels = [event for event in content["traceEvents"] if event.get("cat") == "kernel"]
        kernels.sort(key=lambda event: float(event["ts"]))
        for event in random.Random(path.name).sample(kernels[: len(kernels) // 2], 3):
            event["dur"] = float(event["dur"]) + 300_000
        (tmp_path / path.name).write_bytes(gzip.compress(json.dumps(content).encode(), 1))
    damaged, recorded = load([tmp_path]).report, load([SAMPLES / sample]).report
    assert [step.span_ns for step in damaged.steps] == pytest.approx(
        [step.span_ns for step in recorded.steps], rel=1e-3
    )
    for one, other in zip(damaged.steps, recorded.steps, strict=True):
        for rank, expected in zip(one.ranks, other.ranks, strict=True):
            assert rank.compute_ns == pytest.approx(expected.compute_ns, abs=0.02 * (one.span_ns or 0))
    assert any(LINE in line for info in damaged.inputs for line in info.warnings)
