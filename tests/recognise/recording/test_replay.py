"""The run without its recording: replays of programs on paper, recorded at a known cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pptrace.clock import Clock
from pptrace.clock.result import ClockMethod
from pptrace.model.tables import COMMS, empty_table
from pptrace.model.traces import Category, Events, InputFormat, Trace
from pptrace.recognise.recording import boundaries as boundaries_of_threads
from pptrace.recognise.recording.boundaries import Boundaries
from pptrace.recognise.recording.graph import Edges, RankGraph, graph_of
from pptrace.recognise.recording.replay import Correction, corrected, join_graphs
from pptrace.slices import Slice
from tests.support.extent import ALL
from tests.support.recorded_program import (
    Backward,
    Branches,
    Graph,
    Launch,
    Meet,
    Op,
    Python,
    Synchronise,
    needs_of,
    run_programs,
)
from tests.support.synthetic import Event, make_trace

COST = 4_000


@pytest.mark.parametrize("num_host", [3, 435])
def test_a_host_of_more_nodes_than_the_numbers_of_its_edges_hold_launched_nothing(num_host: int) -> None:
    graph = RankGraph(host=Slice({name: np.zeros(num_host, of.dtype) for name, of in RankGraph().host.columns.items()}))
    assert [len(column) for column in replace(graph, edges=Edges.of(np.array([0]), np.array([1]), 5)).launches] == [
        0,
        0,
    ]
    launched = replace(graph, start_ns=np.zeros(2, np.int64), end_ns=np.zeros(2, np.int64))
    launched = replace(launched, edges=Edges.of(np.array([0, 1]), np.array([1, num_host + 1]), 5))
    assert [column.tolist() for column in launched.launches] == [[1], [1]]


def without(programs: Sequence[Sequence[object]], cost: int, removed: float) -> list[Events]:
    """The events of programs recorded at a cost, with another one taken out again."""
    return taken_out(*run_programs(programs, cost), removed)


def taken_out(events: Sequence[Events], comms: pd.DataFrame, removed: float) -> list[Events]:
    """The events of each rank with a cost taken out."""
    graphs = {}
    for rank, of_rank in enumerate(events):
        rows = comms[comms["rank"] == rank]
        times = np.concatenate([rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()])
        graphs[rank] = graph_of(of_rank, Boundaries.of(of_rank), np.unique(times), removed)
    clock = Clock(ClockMethod.SAME_HOST, dict.fromkeys(graphs, 0), 0)
    joined = join_graphs(graphs, dict.fromkeys(graphs, removed), comms, clock)
    comes = joined.replay(1.0)
    return [
        corrected(trace_of(of_rank), Correction.of(graphs[rank], comes[joined.position[rank]], removed)).events
        for rank, of_rank in enumerate(events)
    ]


def trace_of(events: Events) -> Trace:
    return Trace("trace", InputFormat.KINETO, 0, "", events=events)


def times_by_name(events: Events) -> dict[tuple[str, int], np.ndarray]:
    """Start and end of all events, by name without its number and thread, in order."""
    rows: dict[tuple[str, int], list[int]] = {}
    for row, (name, thread) in enumerate(zip(events.name_id.tolist(), events.thread.tolist(), strict=True)):
        rows.setdefault((events.names[name].partition("#")[0], thread), []).append(row)
    times = np.stack((events.start_ns, events.end_ns), axis=1)
    return {key: times[rows[key]] for key in sorted(rows)}


def assert_as_without_recorder(programs: Sequence[Sequence[object]], within_ns: int) -> None:
    """Assert that all times are those of the programs without a recorder, which began half a cost earlier."""
    plain, _ = run_programs(programs)
    assert_same(plain, without(programs, COST, COST), within_ns)


def assert_same(plain: Sequence[Events], found: Sequence[Events], within_ns: int) -> None:
    for expected, of_rank in zip(plain, found, strict=True):
        for key, times in times_by_name(expected).items():
            assert np.abs(times_by_name(of_rank)[key] - COST // 2 - times).max() <= within_ns, key


def layers(num: int, kernel_ns: int, host_ns: int = 8_000) -> tuple[object, ...]:
    """Operators that each launch one kernel."""
    return tuple(
        part
        for index in range(num)
        for part in (
            Python(1_000),
            Op(host_ns // 2, host_ns // 2, (Op(2_000, 1_000, (Launch(7, kernel_ns),)),), f"aten::linear{index}"),
        )
    )


def step(kernel_ns: int, num: int = 40) -> tuple[object, ...]:
    return (
        Python(50_000),
        *layers(num, kernel_ns),
        Backward(layers(2 * num, kernel_ns)),
        Synchronise(),
        Python(20_000),
    )


@pytest.mark.parametrize(
    ("kernel_ns", "within_ns"), [(2_000, 0), (18_000, 8_000), (60_000, 0)], ids=["host limits", "both", "device limits"]
)
def test_a_program_recorded_at_a_known_cost_is_found_as_it_runs_without(kernel_ns: int, within_ns: int) -> None:
    assert_as_without_recorder([step(kernel_ns) * 2], within_ns)


def test_a_thread_that_does_something_in_python_after_the_backward_has_waited_for_it() -> None:
    backward = Backward(layers(10, 2_000) * 80, after=2_500_000)
    assert_as_without_recorder(
        [[Python(50_000), *layers(10, 2_000) * 20, backward, *layers(10, 2_000)] * 2], within_ns=200_000
    )


def test_where_the_device_limits_recording_changes_nothing_but_the_host() -> None:
    recorded, _ = run_programs([step(60_000) * 2], COST)
    plain, _ = run_programs([step(60_000) * 2])
    assert abs(int(recorded[0].end_ns.max()) / int(plain[0].end_ns.max()) - 1) < 0.05
    found = without([step(60_000) * 2], COST, COST)
    assert abs(int(found[0].end_ns.max()) - int(plain[0].end_ns.max())) < 20_000


@pytest.mark.parametrize("kernel_ns", [500, 60_000], ids=["host limits", "device limits"])
def test_graphs_are_launched_and_run_as_fast_as_without_recorder(kernel_ns: int) -> None:
    graphs = (Op(4_000, 2_000, (Graph(7, (kernel_ns,) * 40),)), Op(4_000, 2_000, (Graph(7, (kernel_ns,) * 5),)))
    program = [Python(60_000), *graphs * 6, Synchronise(), Python(20_000)] * 3
    recorded, plain = (run_programs([program], cost)[0][0] for cost in (COST, 0))
    (found,) = without([program], COST, COST)
    assert recorded.end_ns.max() > 1.01 * plain.end_ns.max()
    assert found.end_ns.max() - found.start_ns.min() == pytest.approx(
        plain.end_ns.max() - plain.start_ns.min(), rel=0.01
    )
    of_nodes = [np.array([*events.names])[events.name_id] == "node" for events in (found, plain)]
    assert found.dur_ns[of_nodes[0]].sum() == pytest.approx(plain.dur_ns[of_nodes[1]].sum(), rel=0.01)


def test_a_launch_of_a_graph_that_ends_soon_after_other_work_did_not_wait_for_it() -> None:
    """The call takes 114 µs, nearly all of them for the recording of its nodes, and a kernel ends shortly before it does."""
    part = (Python(150_000), Op(2_000, 2_000, (Launch(20, 95_000), Graph(7, (500,) * 40))))
    recorded, plain = (run_programs([[*part * 8, Synchronise()]], cost)[0][0] for cost in (COST, 0))
    (found,) = without([[*part * 8, Synchronise()]], COST, COST)
    lengths = [int(np.ptp(events.start_ns)) for events in (recorded, plain, found)]
    assert lengths[0] > 1.5 * lengths[1]
    assert lengths[2] == pytest.approx(lengths[1], rel=0.08)


def test_streams_that_wait_for_each_other_still_do() -> None:
    def program(ns: int) -> list[object]:
        pair = (Launch(7, ns), Launch(20, ns // 2, after=7), Launch(7, ns, after=20))
        return [*(Op(5_000, 2_000, pair) for _ in range(30)), Synchronise()]

    assert_as_without_recorder([program(40_000)], within_ns=5_000)


def test_ranks_wait_for_the_last_one_of_a_collective_as_they_would_without_recorder() -> None:
    def of_rank(rank: int, make: object) -> list[object]:
        return [part for group in range(6) for part in (*layers(10 + 15 * ((rank + group) % 3), 3_000), make(group))]

    assert_as_without_recorder([of_rank(rank, lambda group: Meet(group, 50_000)) for rank in range(3)], within_ns=4_000)
    on_device = [
        [*of_rank(rank, lambda group: Launch(20, 50_000, after=7, group=group)), Synchronise()] for rank in range(3)
    ]
    assert_as_without_recorder(on_device, within_ns=10_000)


def test_messages_that_begin_with_one_kernel_and_end_with_another_join_their_ranks() -> None:
    def of_rank(rank: int) -> list[object]:
        return [
            part
            for group in range(6)
            for part in (
                *layers(10 + 30 * ((rank + group) % 2), 3_000),
                Launch(20, 1_000, after=7),
                Launch(20, 50_000, group=group),
                Launch(7, 1_000, after=20),
            )
        ]

    programs = [of_rank(rank) for rank in range(2)]
    plain, _ = run_programs(programs)
    events, comms = run_programs(programs, COST)
    starts = np.concatenate([of_rank.start_ns[of_rank.stream == 20][::2] for of_rank in events])
    assert_same(plain, taken_out(events, comms.assign(start_ns=starts, asked_ns=starts), COST), within_ns=15_000)


streams = st.sampled_from([7, 20])
nodes = st.builds(Launch, st.sampled_from([7, 30, 31]), st.integers(1_000, 80_000), st.sampled_from([7, 30, 31]))
programs = st.recursive(
    st.one_of(
        st.builds(Python, st.integers(0, 300_000)),
        st.builds(Launch, streams, st.integers(1_000, 80_000), st.one_of(st.none(), streams)),
        st.builds(Graph, streams, st.lists(st.integers(1_000, 30_000), min_size=1, max_size=20).map(tuple)),
        st.lists(nodes, min_size=1, max_size=5).map(lambda rest: Branches((Launch(7, 2_000), *rest))),
        st.just(Synchronise()),
    ),
    lambda inner: st.builds(
        Op, st.integers(500, 20_000), st.integers(500, 20_000), st.lists(inner, max_size=5).map(tuple)
    ),
    max_leaves=40,
)


@settings(max_examples=100 if ALL else 30, deadline=None)
@given(st.lists(st.lists(programs, min_size=1, max_size=8), min_size=1, max_size=3), st.integers(0, 2_000))
def test_a_cost_of_zero_changes_nothing(of_ranks: list[list[object]], cost: int) -> None:
    meeting = [[*program, Op(1_000, 1_000), Meet(0, 30_000)] for program in of_ranks]
    recorded, _ = run_programs(meeting, 4 * cost)
    for events, found in zip(recorded, without(meeting, 4 * cost, 0.0), strict=True):
        for name in ("start_ns", "dur_ns", "category", "name_id", "thread", "stream", "correlation"):
            np.testing.assert_array_equal(getattr(events, name), getattr(found, name))


@settings(max_examples=100 if ALL else 30, deadline=None)
@given(st.lists(programs, min_size=1, max_size=8), st.integers(0, 3_000), st.floats(0, 20_000))
def test_whatever_is_taken_out_nothing_ends_before_it_begins_or_runs_before_its_launch(
    program: list[object], cost: int, removed: float
) -> None:
    (recorded, *_), _ = run_programs([[Op(1_000, 1_000), *program]], 4 * cost)
    (found,) = without([[Op(1_000, 1_000), *program]], 4 * cost, removed)
    assert (found.dur_ns >= 0).all()
    assert found.end_ns.max() <= recorded.end_ns.max()
    launched = {
        int(found.correlation[row]): int(found.start_ns[row])
        for row in np.flatnonzero(found.category == Category.RUNTIME)
    }
    kernels = np.flatnonzero(found.category == Category.KERNEL)
    assert all(found.start_ns[row] >= launched[int(found.correlation[row])] for row in kernels.tolist())
    names = np.array([*(name.partition("#")[0] for name in recorded.names), ""])
    lasted = [sorted(events.dur_ns[names[events.name_id] == "kernel"].tolist()) for events in (recorded, found)]
    assert lasted[0] == lasted[1]
    nodes = [sorted(events.dur_ns[names[events.name_id] == "node"].tolist()) for events in (recorded, found)]
    assert all(short <= long for long, short in zip(*nodes, strict=True))


@settings(max_examples=200 if ALL else 50, deadline=None)
@given(st.lists(programs, min_size=1, max_size=12), st.integers(0, 3_000), st.floats(0, 50_000))
def test_whatever_is_taken_out_work_keeps_its_order_on_streams_in_graphs_and_behind_events_and_threads_theirs(
    program: list[object], cost: int, removed: float
) -> None:
    program = [Op(1_000, 1_000), *program]
    (recorded, *_), _ = run_programs([program], 4 * cost)
    names = [recorded.names[name] for name in recorded.name_id.tolist()]
    of_kernel = {name: row for row, name in enumerate(names)}
    numbered = tuple(f"{name} {row}" for row, name in enumerate(names))
    recorded = replace(recorded, names=numbered, name_id=np.arange(len(names), dtype=np.int32))
    (found,) = taken_out([recorded], empty_table(COMMS), removed)
    row = np.argsort(found.name_id)  # of each event of the recording
    for before, behind in needs_of(program):
        assert found.start_ns[row[of_kernel[behind]]] >= found.end_ns[row[of_kernel[before]]]
    boundaries = Boundaries.of(recorded)
    times = np.where(boundaries.is_end, found.end_ns[row[boundaries.event]], found.start_ns[row[boundaries.event]])
    for first, beyond in pairwise(boundaries.first.tolist()):
        assert (np.diff(times[first:beyond]) >= 0).all()


@settings(max_examples=200 if ALL else 25, deadline=None)
@given(st.lists(st.lists(programs, min_size=1, max_size=8), min_size=1, max_size=2), st.integers(1, 3_000))
def test_times_are_the_same_in_whatever_blocks_boundaries_are_gone_through(
    programs: list[list[object]], cost: int
) -> None:
    recorded, comms = run_programs([[Op(1_000, 1_000), *program] for program in programs], 4 * cost)
    found = taken_out(recorded, comms, cost)
    with patch.object(boundaries_of_threads, "_BLOCK", 3):
        in_blocks = taken_out(recorded, comms, cost)
    for whole, of_blocks in zip(found, in_blocks, strict=True):
        np.testing.assert_allclose(of_blocks.start_ns, whole.start_ns, rtol=0, atol=1)  # sums of parts of nanoseconds
        np.testing.assert_allclose(of_blocks.end_ns, whole.end_ns, rtol=0, atol=1)


def test_time_of_the_profiler_itself_is_taken_out_of_the_thread_that_it_was_on() -> None:
    """Two threads that do not wait for each other; on the second the profiler writes a buffer for 20 µs."""
    operators = [
        Event(Category.CPU_OP, f"aten::op{thread}{index}", at, at + 1_000, thread=thread)
        for thread, begins in ((1, (0, 50_000)), (2, (10_000, 60_000)), (3, (5_000, 70_000)))
        for index, at in enumerate(begins)
    ]
    buffers = [
        Event(Category.OVERHEAD, "Activity Buffer Request", at, at + 10_000, thread=2) for at in (20_000, 40_000)
    ]
    elsewhere = Event(Category.OVERHEAD, "Activity Buffer Request", 30_000, 35_000, thread=-1)
    (found,) = taken_out([make_trace([*operators, *buffers, elsewhere]).events], empty_table(COMMS), 1.0)
    starts = {found.names[name]: start for name, start in zip(found.name_id, found.start_ns, strict=True)}
    assert starts["aten::op11"] == pytest.approx(50_000, abs=10)
    assert starts["aten::op21"] == pytest.approx(40_000, abs=10)
    assert starts["aten::op31"] == pytest.approx(70_000, abs=10)


def test_a_thread_that_waits_for_a_core_after_what_it_waited_for_still_waits_for_it() -> None:
    """Operators that record much, then a barrier on a worker, after which the main thread gets a core 1.5 ms late."""
    operators = [
        Event(Category.CPU_OP, f"aten::op{index}", 10_000 * index, 10_000 * index + 9_000, thread=1)
        for index in range(200)
    ]
    ends = 2_000_000 + 20_000_000
    barrier = Event(Category.ANNOTATION, "gloo:barrier", 2_010_000, ends, thread=2)
    later = Event(Category.CPU_OP, "aten::next", ends + 1_500_000, ends + 1_510_000, thread=1)
    events = make_trace([*operators, barrier, later]).events
    graph = graph_of(events, Boundaries.of(events), np.array([barrier.end, later.start]))
    clock = Clock(ClockMethod.SAME_HOST, {0: 0}, 0)
    joined = join_graphs({0: graph}, {0: COST}, empty_table(COMMS), clock)
    comes = joined.replay(1.0)[joined.position[0]]
    found = corrected(trace_of(events), Correction.of(graph, comes, COST)).events
    of = dict(
        zip((found.names[name] for name in found.name_id), zip(found.start_ns, found.end_ns, strict=True), strict=True)
    )
    assert of["aten::op199"][1] < operators[-1].end, "recording is taken out"
    assert of["aten::next"][0] - of["gloo:barrier"][1] == pytest.approx(1_500_000, abs=2 * COST), (
        "less what it recorded"
    )
