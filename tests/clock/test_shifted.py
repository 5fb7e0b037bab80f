"""Ranks of one host whose times are shifted: which ones, and what relates them then."""

from __future__ import annotations

import pytest

from pptrace.clock import Clock, ClockMethod, estimate_clock
from pptrace.model.tables import COMMS, OPS, empty_table
from pptrace.model.traces import HOST, HOST_NAME, ONE_CLOCK, SESSION
from tests.support.tables import matched_comms, table_of

SECOND = 1_000_000_000
START = 1_790_000_000 * SECOND


def read(start_ns: int = START - 1000, stop_ns: int = START + SECOND + 1000) -> dict[str, object]:
    wall = {"start": start_ns, "stop": stop_ns}
    return {"host": "a", "clock": {name: {"time_ns": ns, "monotonic_ns": ns - START} for name, ns in wall.items()}}


def clock_of(facts: list[dict[str, object]], shifts_ns: list[int]) -> Clock:
    """Of ranks that ran ops for a second, each shifted by so much."""
    rows = [
        {"rank": rank, "step": 0, "kind": "F", "start_ns": START + ns, "end_ns": START + ns + SECOND, "clock": "host"}
        for rank, ns in enumerate(shifts_ns)
    ]
    ops = table_of(OPS, rows)
    return estimate_clock(empty_table(COMMS), range(len(facts)), dict(enumerate(facts)), ops, (), ops)


@pytest.mark.parametrize("shift_ns", [-SECOND // 2, SECOND // 2, -3600 * SECOND, 3600 * SECOND])
def test_times_outside_of_what_the_recorder_read_are_shifted(shift_ns: int) -> None:
    clock = clock_of([read(), read()], [0, shift_ns])
    assert clock.shifted == {1}
    assert not clock.relates([0, 1])


def test_a_recorder_that_never_began_or_is_stopping_says_nothing_of_the_times() -> None:
    for other in (read(START + 2 * SECOND, START + 2 * SECOND), read(stop_ns=START + SECOND - 9_000_000)):
        assert clock_of([read(), other], [0, 0]).shifted == frozenset()


def test_times_that_are_on_no_clock_of_the_readings_are_those_of_all() -> None:
    clock = clock_of([read(), read(), read()], [-START, -START, -START + SECOND // 2])
    assert (clock.method, clock.shifted) == (ClockMethod.SAME_HOST, frozenset())


def test_ranks_that_ran_one_after_the_other_are_on_the_clock_that_their_recorders_read() -> None:
    later = read(START + 12 * SECOND - 1000, START + 13 * SECOND + 1000)
    clock = clock_of([read(), read(), later, later], [0, 0, 12 * SECOND, 12 * SECOND])
    assert (clock.method, clock.shifted) == (ClockMethod.SAME_HOST, frozenset())
    assert clock_of([read(), read(), later], [0, 0, 3600 * SECOND]).shifted == {2}


@pytest.mark.parametrize("fact", [{HOST_NAME: "node-7"}, {ONE_CLOCK: f"{HOST}node-7"}], ids=str)
def test_times_that_do_not_overlap_with_those_of_most_on_the_host_are_shifted(fact: dict[str, object]) -> None:
    clock = clock_of([fact] * 3, [0, SECOND // 2, 12 * SECOND])
    assert clock.shifted == {2}
    assert clock.relates([0, 1])
    assert not clock.relates([0, 2])
    assert clock_of([fact] * 2, [0, 12 * SECOND]).shifted == {0, 1}, "which of two is off is not known"
    assert clock_of([fact] * 2, [0, SECOND // 2]).shifted == frozenset()


def test_ranks_without_ops_are_known_by_their_communication() -> None:
    comms = matched_comms(
        [(rank, "send", -1, START + ns, START + ns + SECOND) for rank, ns in enumerate((0, 1, 3600 * SECOND))]
    )
    facts = {rank: {ONE_CLOCK: f"{HOST}7"} for rank in range(3)}
    assert estimate_clock(comms, range(3), facts, empty_table(OPS), (), empty_table(OPS)).shifted == {2}


def test_processes_of_one_recording_or_of_two_hosts_need_not_overlap() -> None:
    for facts in ([{ONE_CLOCK: f"{SESSION}1"}] * 2, [{HOST_NAME: "a"}, {HOST_NAME: "b"}], [{}, {}]):
        assert clock_of(facts, [0, 12 * SECOND]).shifted == frozenset()
