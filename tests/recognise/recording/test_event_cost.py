"""The cost of recording an event, judged from a trace alone."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.model.traces import Category, Events
from pptrace.recognise.recording.boundaries import Boundaries
from pptrace.recognise.recording.graph import graph_of
from pptrace.recognise.recording.rank import cost_from_trace
from tests.support.recorded_program import Launch, Op, Python, run_programs
from tests.support.synthetic import Event, make_trace


def nested(num: int, cost: int, dispatch: int = 300) -> Events:
    """Operators that do little but call another one."""
    program = [
        part for _ in range(num) for part in (Python(40_000), Op(dispatch, 200, (Op(800, 200), Launch(7, 2_000))))
    ]
    (events, *_), _ = run_programs([program], cost)
    return events


def test_a_recorder_that_costs_more_is_found_to_cost_more_in_proportion() -> None:
    costs = [
        cost_from_trace(events, Boundaries.of(events)).value_ns for events in (nested(400, 2_000), nested(400, 4_000))
    ]
    # The gap holds half of the cost beside 300 ns of dispatch.
    assert costs[1] / costs[0] == pytest.approx((300 + 2_000) / (300 + 1_000))


def test_the_interval_holds_the_estimate() -> None:
    events = nested(400, 2_000)
    cost = cost_from_trace(events, Boundaries.of(events))
    assert cost.low_ns < cost.value_ns < cost.high_ns


def test_few_events_and_whole_microseconds_tell_nothing() -> None:
    events = nested(150, 2_000)
    assert not cost_from_trace(events, Boundaries.of(events)).is_known
    coarse = nested(400, 2_000)
    coarse = replace(coarse, start_ns=coarse.start_ns // 1_000 * 1_000, dur_ns=coarse.dur_ns // 1_000 * 1_000)
    assert not cost_from_trace(coarse, Boundaries.of(coarse)).is_known


def test_without_operators_launches_tell_the_cost_of_a_call() -> None:
    """The call itself takes 3 µs and half of the cost of recording it: 1.6 times that is what it is taken to cost."""
    program = [part for _ in range(300) for part in (Python(21_003), Launch(7, 2_000))]
    (events, *_), _ = run_programs([program], 8_004)
    boundaries = Boundaries.of(events)
    assert cost_from_trace(events, boundaries).value_ns == pytest.approx(1.6 * (3_000 + 4_002))
    few = events.take(np.arange(len(events) // 4))
    assert not cost_from_trace(few, Boundaries.of(few)).is_known
    with_operators = [part for _ in range(300) for part in (Python(21_003), Op(501, 500, (Launch(7, 2_000),)))]
    (events, *_), _ = run_programs([with_operators], 8_004)
    assert not cost_from_trace(events, Boundaries.of(events)).is_known, "no operator begins inside another one"


def test_recorded_allocations_cost_as_events_do() -> None:
    events = nested(400, 2_000)
    boundaries = Boundaries.of(events)
    plain, with_memory = (cost_from_trace(events, boundaries, num) for num in (0, len(boundaries) // 2))
    assert with_memory.value_ns == pytest.approx(2 * plain.value_ns)


def test_a_slow_host_is_not_taken_for_a_costly_recorder() -> None:
    events = nested(400, 0, dispatch=20_300)
    boundaries = Boundaries.of(events)
    cost = cost_from_trace(events, boundaries)
    host_ns = np.diff(boundaries.time_ns[[0, -1]])[0] / (len(boundaries) / 2)
    assert cost.value_ns < 0.7 * host_ns
    assert cost.low_ns < 0.5 * cost.value_ns


def test_overhead_of_the_profiler_lies_in_the_gap_in_which_it_happened() -> None:
    operators = [Event(Category.CPU_OP, "aten::mm", at, at + 1_000, thread=100) for at in (0, 4_000)]
    overhead = Event(Category.OVERHEAD, "Activity Buffer Request", 1_500, 3_000, thread=100)
    boundaries = Boundaries.of(make_trace([*operators, overhead]).events)
    overhead_ns = boundaries.overhead_ns(slice(0, len(boundaries)))
    (index,) = np.flatnonzero(overhead_ns)
    assert (overhead_ns[index], boundaries.time_ns[index - 1]) == (1_500, 1_000)


def test_nothing_lies_before_the_first_boundary_of_a_thread() -> None:
    """Two threads, of which the second ends before the first; of each there is an operator inside another one."""
    operators = [
        Event(Category.CPU_OP, "aten::linear", begin + index, end - index, thread=thread)
        for thread, begin, end in ((1, 50_000, 90_000), (2, 0, 40_000))
        for index in (0, 1_000)
    ]
    boundaries = Boundaries.of(make_trace(operators).events)
    every = np.arange(len(boundaries))
    gaps = [0, 1_000, 38_000, 1_000] * 2
    assert (boundaries.gaps_at(every) - boundaries.gaps_at(every[:1])).tolist() == gaps
    assert boundaries.gaps_ns(slice(0, len(boundaries))).tolist() == gaps
    assert boundaries.gaps_ns(slice(3, 6)).tolist() == gaps[3:6]


def test_a_node_counts_the_events_that_began_since_the_one_before_it() -> None:
    operators = [
        Event(Category.CPU_OP, "aten::linear", begin, end, thread=1)
        for begin, end in ((0, 90), (10, 20), (30, 40), (50, 60))
    ]
    events = make_trace(operators).events
    at = events.start_ns[2]
    host = graph_of(events, Boundaries.of(events), np.array([at])).host
    assert (host["time_ns"] - events.start_ns[0]).tolist() == [0, 30, 90]
    assert host["events"].tolist() == [0, 2, 1]
    assert host["lag_ns"].tolist() == [0, 30, 60]
