"""Latency and bandwidth of links: recovered from exact times, and refused where no line describes them."""

from __future__ import annotations

import numpy as np
import pytest

from pptrace.analysis.links.peaks import fast_of_sizes, fit_link


@pytest.mark.parametrize(("latency", "bandwidth"), [(0, 1.0), (5_000, 12.5), (1_000_000, 400.0), (30_000, 0.25)])
def test_latency_and_bandwidth_of_exact_times_are_found(latency: int, bandwidth: float) -> None:
    sizes = np.array([1_000_000, 4_000_000, 64_000_000])
    times = np.rint(latency + sizes / bandwidth).astype(np.int64)
    fit = fit_link(sizes, times, np.array([5, 1, 7]))
    assert fit.latency_ns == pytest.approx(latency, abs=2)
    assert fit.bandwidth_gbps == pytest.approx(bandwidth, rel=1e-4)
    assert fit.reason is None


def test_messages_that_have_a_size_of_their_own_each_are_fitted_by_fast_ones_of_nearly_their_size() -> None:
    """Every second transfer takes three times as long as the line says: 30 µs + bytes / 2."""
    chance = np.random.default_rng(0)
    sizes = np.sort(chance.choice(np.arange(100_000, 1_600_000), 400, replace=False))
    times = ((30_000 + sizes / 2) * np.where(chance.random(400) < 0.5, 3, 1)).astype(np.int64)
    fit = fit_link(*fast_of_sizes(sizes, times, np.ones(400, dtype=np.int64)))
    assert fit_link(sizes, times, np.ones(400, dtype=np.int64)).latency_ns is None
    assert fit.latency_ns == pytest.approx(30_000, rel=0.2)
    assert fit.bandwidth_gbps == pytest.approx(2, rel=0.05)


def test_a_fast_message_of_a_size_has_a_tenth_of_all_below_it() -> None:
    sizes, times, count = np.array([64, 1000, 1001, 1002]), np.array([9, 30, 10, 20]), np.array([3, 50, 5, 5])
    of_sizes = fast_of_sizes(sizes, times, count)
    assert [column.tolist() for column in of_sizes] == [[64, 1002], [9, 20], [3, 60]]
    assert [len(column) for column in fast_of_sizes(*np.zeros((3, 0), dtype=np.int64))] == [0, 0, 0]


def test_errors_of_large_messages_do_not_hide_the_latency() -> None:
    """Large transfers that are 5 % off, up to 0.5 ms, would move a latency of 20 µs far if errors were not parts of the times."""
    sizes = np.array([1_000, 2_000, 10_000, 20_000_000, 40_000_000])
    times = np.array([20_250, 20_500, 22_500, 5_270_000, 9_520_000])
    fit = fit_link(sizes, times, np.full(5, 20))
    assert fit.latency_ns == pytest.approx(20_000, rel=0.02)
    assert fit.bandwidth_gbps == pytest.approx(4, rel=0.06)


def test_each_size_weighs_as_much_as_it_has_messages_up_to_ten() -> None:
    sizes, times, count = np.array([100, 200, 300]), np.array([130, 160, 150]), np.array([1, 2, 50])
    slope, latency = np.polyfit(sizes, times, 1, w=np.sqrt(np.array([1, 2, 10])) / times)
    fit = fit_link(sizes, times, count)
    assert fit.latency_ns == round(latency)
    assert fit.bandwidth_gbps == pytest.approx(1 / slope)


@pytest.mark.parametrize(
    ("sizes", "times", "reason"),
    [
        ([], [], "the trace does not tell how large its messages are"),
        ([-1, 4000], [10, 20], "the trace does not tell how large its messages are"),
        ([1000], [10], "all messages have 1000 bytes"),
        ([1000, 1999], [10, 20], "messages of 1000 to 1999 bytes are too much alike"),
        ([1000, 4000], [0, 20], "some transfers took no time"),
        ([1000, 4000], [20, 10], "larger messages took no longer"),
        ([1000, 4000], [1, 100], "larger messages took longer than in proportion"),
        ([1000, 2000, 4000, 8000], [100, 200, 100, 200], "no line: it misses messages of"),
    ],
)
def test_where_no_line_describes_the_transfers_none_is_fitted(sizes: list[int], times: list[int], reason: str) -> None:
    fit = fit_link(np.array(sizes, dtype=np.int64), np.array(times, dtype=np.int64), np.full(len(sizes), 9))
    assert (fit.latency_ns, fit.bandwidth_gbps) == (None, None)
    assert fit.reason.startswith(reason)


def test_a_single_message_of_one_of_two_sizes_is_no_evidence() -> None:
    fit = fit_link(np.array([1000, 4000]), np.array([10, 20]), np.array([30, 1]))
    assert fit.reason == "of two sizes, one has a single message"


def test_messages_without_bytes_tell_the_latency() -> None:
    fit = fit_link(np.array([0, 1000]), np.array([5, 105]), np.array([2, 2]))
    assert (fit.latency_ns, fit.bandwidth_gbps) == (5, pytest.approx(10))
