"""Correction of clocks and its exactness, of traffic so regular that both are known in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from pptrace.clock import Clock, ClockMethod, estimate_clock
from pptrace.model.traces import HOST_NAME
from tests.support.tables import Match as Row
from tests.support.tables import matched_comms

MS = 1_000_000
LATENCY = 1_000
LIKELY = 1e-4
"""Rate by which oscillators may drift apart."""


def clock_of(rows: Sequence[Row], num_ranks: int = 2, names: Sequence[str] = ()) -> Clock:
    return estimate_clock(
        matched_comms(rows), range(num_ranks), {rank: {HOST_NAME: name} for rank, name in enumerate(names)}
    )


def message(match: int, source: int, target: int, sent: int, latency: int = LATENCY) -> list[Row]:
    return [(source, "send", match, sent, sent + 1), (target, "recv", match, sent, sent + latency)]


def alternating(
    num: int, period: int = 20 * MS, latency: int = LATENCY, links: Sequence[tuple[int, int]] = ((0, 1),)
) -> list[Row]:
    """Messages one after the other, each link in turn, there and back."""
    rows: list[Row] = []
    for match in range(num):
        link = links[match // 2 % len(links)]
        source, target = link if match % 2 == 0 else link[::-1]
        rows += message(match, source, target, match * period, latency)
    return rows


def later(rows: Sequence[Row], by: Callable[[int, int], int]) -> list[Row]:
    """The same, by a time that depends on the rank and on the match."""
    return [(rank, kind, match, *(time + by(rank, match) for time in times)) for rank, kind, match, *times in rows]


def running_fast(rows: Sequence[Row], rate: float, ranks: Sequence[int] = (1,)) -> list[Row]:
    return [
        (rank, kind, match, *(time + round(rate * time) if rank in ranks else time for time in (start, end)))
        for rank, kind, match, start, end in rows
    ]


@pytest.mark.parametrize(("num_ranks", "needed"), [(2, 32), (3, 64), (4, 96)])
def test_drift_is_fitted_from_sixteen_messages_for_each_link_in_two_stretches_on(num_ranks: int, needed: int) -> None:
    links = [(rank, rank + 1) for rank in range(num_ranks - 1)]
    for num in (needed - 1, needed):
        rows = running_fast(alternating(num, links=links), 1e-4, range(1, num_ranks))
        clock = clock_of(rows, num_ranks)
        drift = 1e-4 * (num - 1) * 20 * MS
        assert set(clock.rates) == (set(range(1, num_ranks)) if num == needed else set())
        assert all(rate == pytest.approx(-1e-4, rel=1e-3) for rate in clock.rates.values())
        assert (clock.uncertainty_ns < 0.1 * drift) == (num == needed)


def of_another_host(rows: Sequence[Row], behind: int = 7_000 * MS) -> list[Row]:
    """Rank 1's clock so far behind that nothing is taken from where it stands."""
    return later(rows, lambda rank, _: -behind * rank)


@pytest.mark.parametrize(("rate", "is_corrected"), [(0.99e-3, True), (1.01e-3, False)])
def test_no_clock_drifts_by_more_than_a_thousandth(rate: float, is_corrected: bool) -> None:
    clock = clock_of(running_fast(alternating(64), rate))
    (warning,) = clock.warnings
    assert bool(clock.rates) == is_corrected
    assert ("its clock drifts against rank 0's" in warning) == is_corrected
    assert ("which drift does not explain" in warning) != is_corrected
    assert (clock.uncertainty_ns >= rate * 63 * 20 * MS / 2 - 2 * LATENCY) != is_corrected, "half of what they drift"


def test_a_clock_that_drifts_is_exact_in_the_middle_of_the_trace_and_everywhere_else() -> None:
    rows = running_fast(alternating(64), 2e-4)
    clock = clock_of(rows)
    times = [row[3] for row in rows]
    assert clock.middle_ns == pytest.approx((min(times) + max(times)) // 2, abs=2e-4 * max(times))
    assert clock.rates[1] == pytest.approx(-2e-4, rel=1e-3)
    assert clock.offsets_ns == {0: 0, 1: pytest.approx(-2e-4 * clock.middle_ns, abs=LATENCY)}
    for time in (0, 600 * MS, 1_260 * MS):
        (aligned,) = clock.to_common_clock(1, np.array([time + round(2e-4 * time)]))
        assert abs(aligned - time) <= 300
    (warning,) = clock.warnings
    assert warning.startswith("rank 1: its clock drifts against rank 0's, by 25")
    assert " µs over the trace" in warning


def half_drift(span: int) -> int:
    return round(LIKELY * span) // 2


@pytest.mark.parametrize(("span", "drifts"), [(50 * MS - 1, False), (50 * MS, True), (900 * MS, True)])
def test_without_traffic_enough_clocks_may_drift_as_oscillators_do_unless_the_trace_is_short(
    span: int, drifts: bool
) -> None:
    """Two messages, there and back: the offset is known to a latency, of two moments ``span`` apart at most."""
    rows = [*message(0, 0, 1, 5_000), *message(1, 1, 0, 5_000 + span - LATENCY)]
    clock = clock_of(rows)
    assert clock == Clock(ClockMethod.BOUNDS, {0: 0, 1: 0}, LATENCY + half_drift(span) * drifts)


@pytest.mark.parametrize("early", [60 * MS, 400 * MS])
def test_before_the_ranks_first_met_their_clocks_may_have_drifted_as_well(early: int) -> None:
    """Rank 1 waits so long for the first message; or the last one moves that long."""
    sent = message(1, 1, 0, early + 4 * LATENCY)
    waited: list[Row] = [(0, "send", 0, early, early + 1), (1, "recv", 0, 0, early + LATENCY), *sent]
    span = early + 5 * LATENCY
    assert clock_of(waited).uncertainty_ns == LATENCY + half_drift(span) + round(LIKELY * early)
    there, back = message(0, 0, 1, 0), message(1, 1, 0, 4 * LATENCY)
    moved: list[Row] = [*there, *back, *message(2, 0, 1, 5 * LATENCY, early)]
    span = early + 5 * LATENCY
    assert clock_of(moved).uncertainty_ns == LATENCY + half_drift(span) + round(LIKELY * early)


def test_of_a_chain_every_link_may_have_drifted_and_of_direct_messages_one() -> None:
    span = 300 * MS + LATENCY
    chain = [
        *message(0, 0, 1, 0),
        *message(1, 1, 0, 100 * MS),
        *message(2, 1, 2, 200 * MS),
        *message(3, 2, 1, 300 * MS),
    ]
    assert clock_of(chain, 3).uncertainty_ns == 2 * (LATENCY + half_drift(span))
    direct = [*chain, *message(4, 0, 2, 100 * MS), *message(5, 2, 0, 200 * MS)]
    assert clock_of(direct, 3).uncertainty_ns == LATENCY + half_drift(span)
    loose = [*chain, *message(4, 0, 2, 100 * MS, 90_000), *message(5, 2, 0, 200 * MS, 90_000)]
    assert clock_of(loose, 3).uncertainty_ns == 2 * (LATENCY + half_drift(span)), "tighter than the direct messages"


def test_ranks_on_the_clock_of_the_first_do_not_drift_from_it() -> None:
    """Ranks 0 and 1 are on one host; 2 is on another."""
    rows = [*message(0, 1, 2, 0), *message(1, 2, 1, 300 * MS - LATENCY), *message(2, 0, 1, MS)]
    clock = clock_of(rows, 3, ("a", "a", "b"))
    assert clock.offsets_ns == {0: 0, 1: 0, 2: 0}
    assert clock.uncertainty_ns == 50_000 + LATENCY + 2 * half_drift(300 * MS), "two links: to rank 1 and on from it"


def test_with_traffic_enough_clocks_that_agree_throughout_are_known_to_a_latency() -> None:
    for num, more in ((32, 0), (31, half_drift(30 * 20 * MS + LATENCY))):
        assert clock_of(alternating(num)) == Clock(
            ClockMethod.BOUNDS, {0: 0, 1: 0}, LATENCY + more, middle_ns=310 * MS if num == 32 else 0
        )


def test_a_drift_within_the_latency_is_not_corrected_and_counts_by_the_stretch_of_an_eighth() -> None:
    """There and back in 200 µs, while the clocks drift apart by 60: no message contradicts another."""
    latency, num, rate = 100_000, 256, 60_000 / (255 * 20 * MS)
    rows = of_another_host(running_fast(alternating(num, latency=latency), rate))
    clock = clock_of(rows)
    assert (clock.rates, clock.warnings) == ({}, ())
    ends = {(kind, match): (rank, start, end) for rank, kind, match, start, end in rows}
    bounds = {}  # of what is added to rank 1: no message arrives before it was sent
    for match in range(num):
        (source, sent, _), (_, _, received) = ends["send", match], ends["recv", match]
        bounds[match] = sent - received if source == 0 else received - sent

    def allowed(matches: Sequence[int]) -> tuple[int, int]:
        return max(bounds[m] for m in matches if m % 2 == 0), min(bounds[m] for m in matches if m % 2)

    lower, upper = allowed(range(num))
    offset = clock.offsets_ns[1]
    assert offset == (lower + upper) // 2
    eighths = [allowed(range(begin, begin + num // 8)) for begin in range(0, num, num // 8)]
    error = max(max(offset - low, high - offset) for low, high in [(lower, upper), *eighths])
    assert clock.uncertainty_ns == pytest.approx(error + 60_000 // 16, abs=60)


@pytest.mark.parametrize(
    ("rate", "latency", "drift_rate"),
    [(2e-4, 1_000_000, 2e-4), (0.5e-4, 1_000_000, 1e-4), (2e-3, 6_000_000, 1e-4)],
    ids=["drifting", "slower than oscillators", "faster than clocks"],
)
def test_where_no_message_contradicts_a_drift_it_counts_if_it_is_possible(
    rate: float, latency: int, drift_rate: float
) -> None:
    """Messages allow a latency on either side less half the drift; half of what is likely is added to that."""
    span = 255 * 20 * MS
    clock = clock_of(of_another_host(running_fast(alternating(256, latency=latency), rate)))
    assert (clock.rates, clock.warnings) == ({}, ())
    expected = latency - rate * span / 2 + drift_rate * span / 2
    assert clock.uncertainty_ns == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("contradiction", "is_warned"), [(50_000, False), (50_002, True)])
@pytest.mark.parametrize("offset", [0, 7 * MS])
def test_messages_that_seem_to_arrive_before_they_are_sent_are_warned_about_beyond_a_reading_error(
    contradiction: int, is_warned: bool, offset: int
) -> None:
    """By half of the contradiction either way, all the time; clocks of nearly one time are taken for one."""
    clock = clock_of(later(alternating(64, latency=-contradiction // 2), lambda rank, _: offset * rank))
    assert clock.offsets_ns == {0: 0, 1: -offset}
    assert clock.rates == {}
    assert [f"{contradiction / 1000:,.1f} µs" in line for line in clock.warnings] == [True] * is_warned
    assert clock.uncertainty_ns == contradiction // 2


def test_a_contradiction_between_halves_that_bound_one_side_each_is_covered_as_well() -> None:
    """Messages there in the first half, and back in the second, before which rank 1 jumps ahead by 3 ms."""
    rows: list[Row] = []
    for match in range(64):
        rows += message(match, match // 32, 1 - match // 32, match * 20 * MS)
    jumped = later(rows, lambda rank, match: 3 * MS * (rank and match >= 32))
    clock = clock_of(jumped)
    assert clock.offsets_ns == {0: 0, 1: -3 * MS // 2}
    assert clock.uncertainty_ns == 3 * MS // 2 - LATENCY
    assert "by 2,998.0 µs about its clock" in clock.warnings[0]
    for behind, error_ns in ((1 * MS, 2 * MS), (2 * MS, 2 * MS)):
        clock = clock_of(of_another_host(jumped, behind))
        assert (clock.offsets_ns, clock.uncertainty_ns) == ({0: 0, 1: 0}, error_ns - LATENCY), "one time may be right"


def test_a_contradiction_that_drift_does_not_explain_is_covered_from_end_to_end() -> None:
    """Rank 1 jumps back by 2 ms after half of the time: its offset is 0 or 2 ms, and no line through them is right."""
    rows = later(alternating(64), lambda rank, match: -2 * MS * (rank and match >= 32))
    for jump in (0, 5 * MS):
        clock = clock_of(of_another_host(rows, -jump))
        (warning,) = clock.warnings
        assert "rank 1: messages contradict each other by 1,998.0 µs about its clock against rank 0's" in warning
        lowest, highest = LATENCY - jump, 2 * MS - LATENCY - jump
        chosen = clock.offsets_ns[1]
        assert chosen == (0 if lowest <= 0 <= highest else (lowest + highest) // 2)
        assert clock.uncertainty_ns == max(2 * MS + LATENCY - jump - chosen, chosen + jump + LATENCY), "of either half"
