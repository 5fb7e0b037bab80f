"""Clocks put wrong on purpose, and found again from messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pptrace.clock import Clock, ClockMethod, estimate_clock, shift
from pptrace.ingest import open_inputs
from pptrace.model.tables import OPS
from pptrace.model.traces import HOST_NAME, Trace
from tests.support.analysed import analyse
from tests.support.extent import ALL, by_turns
from tests.support.programs import SAMPLES
from tests.support.read import read_traces
from tests.support.synthetic import START
from tests.support.tables import Match as Row
from tests.support.tables import matched_comms as comms_of
from tests.support.tables import named as named_rows
from tests.support.tables import table_of


def message(match: int, source: int, target: int, sent: int, received: int) -> list[Row]:
    return [(source, "send", match, sent, sent + 1), (target, "recv", match, sent - 5, received)]


def shifted(comms: pd.DataFrame, offsets: dict[int, int]) -> pd.DataFrame:
    return shift(comms, Clock(ClockMethod.NONE, offsets, None))


offsets_ns = st.one_of(st.integers(-5_000, 5_000), st.integers(-300_000_000_000, 300_000_000_000))


@settings(max_examples=60 if ALL else 30)
@given(st.integers(2, 6), st.data())
def test_any_true_messages_and_collectives_bound_the_offsets(num_ranks: int, data: st.DataObject) -> None:
    """Random traffic in true time, every rank on a clock of its own: the truth always lies within the uncertainty."""
    wrong = data.draw(st.lists(offsets_ns, min_size=num_ranks, max_size=num_ranks))
    rows: list[Row] = []
    pairs = st.tuples(st.integers(0, num_ranks - 1), st.integers(0, num_ranks - 1)).filter(lambda p: p[0] != p[1])
    for match, (source, target) in enumerate(data.draw(st.lists(pairs, max_size=12))):
        sent = data.draw(st.integers(0, 10_000))
        rows += message(match, source, target, sent, sent + data.draw(st.integers(0, 500)))
    starts = data.draw(st.lists(st.integers(0, 1_000), min_size=num_ranks, max_size=num_ranks))
    rows += [(rank, "all_reduce", 99, start, max(starts) + rank) for rank, start in enumerate(starts)]
    clock = estimate_clock(shifted(comms_of(rows), dict(enumerate(wrong))), range(num_ranks), {})
    assert clock.method is ClockMethod.BOUNDS
    for rank in range(num_ranks):
        assert abs(clock.offsets_ns[rank] - (wrong[0] - wrong[rank])) <= clock.uncertainty_ns


def test_messages_one_way_give_a_bound_and_say_so() -> None:
    clock = estimate_clock(comms_of([*message(0, 0, 1, 100, 130), *message(1, 0, 1, 200, 215)]), [0, 1], {})
    assert clock.method is ClockMethod.BOUNDS
    assert clock.offsets_ns == {0: 0, 1: 0}, "no message says that it is another"
    assert clock.uncertainty_ns is None
    assert clock.warnings == (
        "rank 1: messages bound its clock from one side only: it is moved no further than they demand, and the uncertainty "
        "is null",
    )
    back = estimate_clock(comms_of(message(0, 1, 0, 130, 100)), [0, 1], {})
    assert back.offsets_ns == {0: 0, 1: -30}, "received 30 before it was sent"
    assert back.uncertainty_ns is None


def test_a_rank_without_messages_is_taken_as_it_is_and_named() -> None:
    rows = [*message(0, 0, 1, 100, 110), *message(1, 1, 0, 200, 210)]
    clock = estimate_clock(comms_of(rows), [0, 1, 2], {})
    assert clock.offsets_ns[2] == 0
    assert clock.uncertainty_ns is None
    assert clock.warnings == (
        "rank 2: no message relates its clock to rank 0's: its times are left unchanged, and "
        "figures that compare it with other ranks are null",
    )


def test_without_any_message_nothing_relates_the_clocks() -> None:
    clock = estimate_clock(comms_of([]), [3, 1], {})
    assert clock.method is ClockMethod.NONE
    assert clock.offsets_ns == {1: 0, 3: 0}
    assert clock.uncertainty_ns is None
    assert "could not be related: no matched messages" in clock.warnings[0]


def test_unmatched_messages_bound_nothing() -> None:
    rows = [(rank, kind, -1, start, end) for rank, kind, _, start, end in message(0, 0, 1, 100, 130)]
    assert estimate_clock(comms_of(rows), [0, 1], {}).method is ClockMethod.NONE


def test_one_rank_is_its_own_clock() -> None:
    assert estimate_clock(comms_of([]), [5], {}) == Clock(ClockMethod.SINGLE_RANK, {5: 0}, 0)


def facts(host: str, wall: int = START, monotonic: int = 1_000) -> dict[str, object]:
    reading = {"time_ns": wall, "monotonic_ns": monotonic, "perf_counter_ns": monotonic}
    return {"host": host, "clock": {"start": reading, "stop": reading}}


BOTH_WAYS = [*message(0, 0, 1, 1_000_000, 1_000_040), *message(1, 1, 0, 2_000_000, 2_000_040)]


def test_one_host_is_not_believed_when_its_messages_arrive_before_they_are_sent() -> None:
    wrong = shifted(comms_of(BOTH_WAYS), {1: -1_000_000})
    clock = estimate_clock(wrong, [0, 1], {0: facts("a"), 1: facts("a")})
    assert clock.method is ClockMethod.BOUNDS
    assert clock.offsets_ns[1] == pytest.approx(1_000_000, abs=40)


def named(*names: str | None) -> dict[int, dict[str, object]]:
    return {rank: {} if name is None else {HOST_NAME: name} for rank, name in enumerate(names)}


def test_one_name_of_a_host_and_no_message_against_it_is_one_clock() -> None:
    for rows in (BOTH_WAYS, [], message(0, 0, 1, 1_000_000, 1_000_040)):
        clock = estimate_clock(comms_of(rows), [0, 1], named("node-7", "node-7"))
        assert clock == Clock(ClockMethod.SAME_HOST, {0: 0, 1: 0}, 50_000)


@pytest.mark.parametrize(
    "names", [("node-7", "node-8"), ("node-7", None), ("localhost", "localhost"), (" ", " ")], ids=str
)
def test_other_names_and_those_of_any_host_tell_nothing(names: tuple[str | None, ...]) -> None:
    assert estimate_clock(comms_of(BOTH_WAYS), [0, 1], named(*names)).method is ClockMethod.BOUNDS
    assert estimate_clock(comms_of([]), [0, 1], named(*names)).method is ClockMethod.NONE


def test_a_recorders_own_fact_about_the_host_outweighs_its_name() -> None:
    both = {rank: {**facts(f"host-{rank}"), HOST_NAME: "node-7"} for rank in (0, 1)}
    assert estimate_clock(comms_of(BOTH_WAYS), [0, 1], both).method is ClockMethod.BOUNDS


def test_hosts_of_one_name_whose_traces_never_meet_and_no_message_relates_are_not_related() -> None:
    apart = comms_of([(0, "send", -1, 0, 10), (1, "recv", -1, 5, 15)])
    assert estimate_clock(apart, [0, 1], named("node-7", "node-7")).method is ClockMethod.SAME_HOST
    moved = shifted(apart, {1: 12_000_000_000})
    assert estimate_clock(moved, [0, 1], named("node-7", "node-7")).method is ClockMethod.NONE


def test_hosts_of_one_name_whose_labelled_ops_run_in_the_wrong_order_are_two() -> None:
    ops = ops_of([(0, 0), (1, 1)]).assign(source="label")
    one_name = named("node-7", "node-7")
    clock = estimate_clock(comms_of([]), [0, 1], one_name, ops, [(0, 1)])
    assert clock.method is ClockMethod.SAME_HOST
    moved = shift(ops, Clock(ClockMethod.NONE, {1: -60_000}, None))
    assert estimate_clock(comms_of([]), [0, 1], one_name, moved, [(0, 1)]).method is ClockMethod.OP_ORDER


def test_ranks_of_each_of_two_hosts_keep_together() -> None:
    """Messages cross between ranks 1 and 2 alone."""
    crossing = [*message(0, 1, 2, 1_000_000, 1_000_040), *message(1, 2, 1, 2_000_000, 2_000_040)]
    names = named("node-7", "node-7", "node-8", "node-8")
    clock = estimate_clock(shifted(comms_of(crossing), {2: -7_000_000, 3: -7_000_000}), range(4), names)
    assert clock.method is ClockMethod.BOUNDS
    assert (clock.offsets_ns[1], clock.offsets_ns[2]) == (0, clock.offsets_ns[3])
    assert clock.offsets_ns[2] == pytest.approx(7_000_000, abs=40)
    assert 50_000 < clock.uncertainty_ns <= 50_040
    alone = estimate_clock(comms_of([]), range(4), names)
    assert (alone.method, alone.uncertainty_ns) == (ClockMethod.SAME_HOST, None)
    assert alone.relates([0, 1])
    assert alone.relates([2, 3])
    assert not alone.relates([1, 2])


@pytest.mark.parametrize(
    "clock_fact",
    [
        *(None, {}, [], "text", {"start": None}, {"start": {"time_ns": "x", "monotonic_ns": 1}}),
        {"start": {"time_ns": None, "monotonic_ns": 2}},
    ],
)
def test_damaged_clock_facts_are_no_facts(clock_fact: object) -> None:
    damaged = {"host": "a", "clock": clock_fact}
    assert estimate_clock(comms_of(BOTH_WAYS), [0, 1], {0: damaged, 1: damaged}).method is ClockMethod.BOUNDS


def test_a_broadcast_bounds_nothing_because_its_root_does_not_wait() -> None:
    early_root = [(0, "broadcast", 7, 0, 10), (1, "broadcast", 7, 5_000_000, 5_000_010)]
    assert estimate_clock(comms_of(early_root), [0, 1], {}).method is ClockMethod.NONE
    same_host = {0: facts("a"), 1: facts("a")}
    assert estimate_clock(comms_of(early_root), [0, 1], same_host).method is ClockMethod.SAME_HOST


def test_an_all_reduce_bounds_both_ways() -> None:
    rows: list[Row] = [(0, "all_reduce", 7, 0, 100), (1, "all_reduce", 7, 1_000_060, 1_000_110)]
    clock = estimate_clock(comms_of(rows), [0, 1], {})
    assert -1_000_110 <= clock.offsets_ns[1] <= -999_960
    assert clock.uncertainty_ns == 75


def test_clocks_that_drift_and_contradict_each_other_a_little_stay_near_the_truth() -> None:
    """Every message of a long ring seems to arrive 10 ns before it was sent: no offsets can be right, none may be wild."""
    n = 60
    rows: list[Row] = []
    for match, rank in enumerate(range(n)):
        rows += message(2 * match, rank, (rank + 1) % n, 1_000, 990) + message(
            2 * match + 1, (rank + 1) % n, rank, 1_000, 990
        )
    clock = estimate_clock(comms_of(rows), range(n), {})
    assert max(abs(offset) for offset in clock.offsets_ns.values()) <= 10 * n
    assert clock.uncertainty_ns <= 10 * n


def drifting(comms: pd.DataFrame, start_ns: dict[int, int], per_million: dict[int, int]) -> pd.DataFrame:
    """As clocks show it that are wrong by ``start_ns`` at the first event and then run fast by parts per million."""
    first = int(comms["start_ns"].min())
    wrong, rate = comms["rank"].map(start_ns), comms["rank"].map(per_million)
    names = ("start_ns", "end_ns")
    return comms.assign(**{name: comms[name] + wrong + (comms[name] - first) * rate // 1_000_000 for name in names})


def shifted_trace(trace: Trace, offset_ns: int, host: str) -> Trace:
    """The trace as another host's clock would have recorded it."""
    events = replace(trace.events, start_ns=trace.events.start_ns + offset_ns)
    memory = trace.memory.assign(t_ns=trace.memory["t_ns"] + offset_ns)
    return replace(trace, events=events, memory=memory, metadata={**trace.metadata, "host": host})


@pytest.mark.parametrize(
    ("scale_ns", "sample"), by_turns([5_000, 3_000_000, 2_000_000_000, 600_000_000_000], ["1f1b_p2", "1f1b_p4"])
)
def test_ranks_of_a_real_run_that_are_shifted_are_found_within_the_stated_uncertainty(
    sample: str, scale_ns: int
) -> None:
    traces = read_traces(open_inputs([SAMPLES / sample]), 1).traces
    wrong = {trace.info.rank: (-1) ** index * index * scale_ns for index, trace in enumerate(traces)}
    shifted_traces = [shifted_trace(trace, wrong[trace.rank], f"host{trace.rank}") for trace in traces]
    clock = analyse(shifted_traces).report.clock
    assert clock.method == ClockMethod.BOUNDS
    assert 0 < clock.uncertainty_ns < 5_000_000, "the latency of a few messages of this run"
    for rank, offset in clock.offsets_ns.items():
        assert abs(offset - (wrong[0] - wrong[int(rank)])) <= clock.uncertainty_ns


def test_a_stretch_of_one_collective_of_many_ranks_is_bounded_without_all_its_pairs() -> None:
    """200 ranks and 500 collectives are 20 million pairs, but 100,000 ends."""
    num_ranks, num_calls = 200, 500
    calls = np.repeat(np.arange(num_calls), num_ranks)
    members = np.tile(np.arange(num_ranks), num_calls)
    begin = calls * 1_000_000 + (members * 7919 + calls * 104729) % 1000 + members * 10**9
    table = comms_of([(0, "all_reduce", 0, 0, 0)] * len(calls))
    ends = calls * 1_000_000 + 2_000 + members * 10**9
    clock = estimate_clock(table.assign(rank=members, match=calls, start_ns=begin, end_ns=ends), range(num_ranks), {})
    assert clock.uncertainty_ns <= 2_000 + 25_000, "and what oscillators may drift apart in half of 500 ms"
    for rank in range(num_ranks):
        assert abs(clock.offsets_ns[rank] + rank * 10**9) <= clock.uncertainty_ns


def test_a_table_is_shifted_in_all_its_times_and_nothing_else() -> None:
    table = comms_of(message(0, 0, 1, 100, 130))
    moved = shift(table, Clock(ClockMethod.BOUNDS, {0: 0, 1: 7}, 1))
    for name in ("start_ns", "end_ns", "transfer_start_ns", "transfer_end_ns"):
        assert (moved[name] - table[name]).tolist() == [0, 7]
        assert moved[name].dtype == np.int64
    assert moved.drop(columns=[c for c in moved if c.endswith("_ns")]).equals(
        table.drop(columns=[c for c in table if c.endswith("_ns")])
    )


def ops_of(stages: Sequence[tuple[int, int]], clock: str = "device", waiting: int = 0) -> pd.DataFrame:
    """Two microbatches forward and back through (rank, stage), 100 each and 7 apart, each begun ``waiting`` before its time."""
    rows = []
    for microbatch in range(2):
        begin = 10_000 * microbatch
        path = [("F", *index) for index in stages] + [("B", *index) for index in reversed(stages)]
        for turn, (kind, rank, stage) in enumerate(path):
            start = begin + 107 * turn
            rows.append((kind, rank, stage, microbatch, start - waiting, start + 100))
    return table_of(OPS, named_rows("kind rank stage microbatch start_ns end_ns", rows)).assign(clock=clock)


@pytest.mark.parametrize(("waiting", "widest"), [(0, 14), (20, 250)])
def test_the_order_of_ops_relates_ranks_that_no_message_relates(waiting: int, widest: int) -> None:
    wrong = {0: 0, 1: 3_700_000_000, 2: -90_000_000_000}
    ops = shift(ops_of([(0, 0), (1, 1), (2, 2)], waiting=waiting), Clock(ClockMethod.NONE, wrong, None))
    clock = estimate_clock(comms_of([]), [0, 1, 2], {}, ops, [(0, 1, 2)])
    assert (clock.method, clock.warnings) == (ClockMethod.OP_ORDER, ())
    assert 0 < clock.uncertainty_ns <= widest
    for rank, offset in clock.offsets_ns.items():
        assert abs(offset + wrong[rank]) <= clock.uncertainty_ns


def test_an_order_of_forwards_alone_bounds_one_side_and_relates_nothing() -> None:
    ops = ops_of([(0, 0), (1, 1)])
    clock = estimate_clock(comms_of([]), [0, 1], {}, ops[ops["kind"] == "F"], [(0, 1)])
    assert clock.method is ClockMethod.NONE
    assert clock.relates([0])
    assert not clock.relates([0, 1])


def test_no_message_moves_the_processes_of_one_recording() -> None:
    same: dict[int, dict[str, object]] = {rank: {"one_clock": "session 17", **facts("a")} for rank in (0, 1)}
    assert estimate_clock(comms_of(BOTH_WAYS), [0, 1], same) == Clock(ClockMethod.SAME_SESSION, {0: 0, 1: 0}, 0)
    bad = estimate_clock(comms_of([*BOTH_WAYS, *message(2, 0, 1, 9_000_000, 3_000_000)]), [0, 1], same)
    assert (bad.method, bad.offsets_ns, bad.uncertainty_ns) == (ClockMethod.SAME_SESSION, {0: 0, 1: 0}, 0)
    assert bad.warnings[0].startswith("1 of rank 1 of the messages and collectives end before the other side has begun")
    assert bad.early_ends[1].tolist() == [3_000_000]
    every = [*message(0, 0, 1, 9_000_000, 3_000_000), *message(1, 0, 1, 19_000_000, 13_000_000)]
    worse = estimate_clock(comms_of(every), [0, 1], same)
    assert (worse.offsets_ns, worse.uncertainty_ns, worse.early_ends) == ({0: 0, 1: 0}, 50_000, {})
    assert "contradict its clock by 6,000.0 µs" in worse.warnings[0]


@pytest.mark.parametrize(
    "same", [{"host": "a", "clock": {"start": {"time_ns": 5, "monotonic_ns": 2}}}, {"host_name": "a"}]
)
def test_a_receive_that_lost_its_end_leaves_the_clock_of_one_host_as_it_is(same: dict[str, object]) -> None:
    early = [*BOTH_WAYS, *message(2, 0, 1, 9_000_000, 3_000_000)]
    clock = estimate_clock(comms_of(early), [0, 1], dict.fromkeys((0, 1), same))
    assert (clock.method, clock.offsets_ns) == (ClockMethod.SAME_HOST, {0: 0, 1: 0})
    assert clock.early_ends[1].tolist() == [3_000_000]


def test_hosts_of_one_name_whose_messages_all_contradict_it_are_not_on_one_clock() -> None:
    other = [*message(0, 0, 1, 9_000_000, 3_000_000), *message(1, 1, 0, 4_000_000, 10_000_100)]
    clock = estimate_clock(comms_of(other), [0, 1], {rank: {"host_name": "a"} for rank in (0, 1)})
    assert clock.method is ClockMethod.BOUNDS
    assert 6_000_000 <= clock.offsets_ns[1] <= 6_000_200
    assert not clock.early_ends


def test_a_member_of_a_collective_that_lost_its_end_leaves_the_clock_of_one_host_as_it_is() -> None:
    calls: list[Row] = [
        (rank, "all_reduce", match, begin, begin + 100)
        for match, begin in ((1, 0), (2, 1_000_000), (3, 2_000_000))
        for rank in (0, 1)
    ]
    calls += [(0, "all_reduce", 4, 3_000_000, 3_000_010), (1, "all_reduce", 4, 8_000_000, 8_000_100)]
    clock = estimate_clock(comms_of(calls), [0, 1], {0: facts("a"), 1: facts("a")})
    assert (clock.method, clock.offsets_ns) == (ClockMethod.SAME_HOST, {0: 0, 1: 0})
    assert clock.early_ends.keys() == {0}


def test_processes_of_one_recording_keep_together_when_others_are_beside_them() -> None:
    facts_of: dict[int, dict[str, object]] = {0: {}, 1: {"one_clock": "session 1"}, 2: {"one_clock": "session 1"}}
    seen = shifted(comms_of([*BOTH_WAYS, *message(2, 1, 2, 9_000_000, 3_000_000)]), {1: 500_000, 2: 500_000})
    clock = estimate_clock(seen, [0, 1, 2], facts_of)
    assert clock.offsets_ns[1] == clock.offsets_ns[2] == pytest.approx(-500_000, abs=40)


def test_without_messages_the_recording_that_some_ranks_share_relates_these_alone() -> None:
    for shared, method in (("session 1", ClockMethod.SAME_SESSION), ("table.csv", ClockMethod.ONE_FILE)):
        facts_of: dict[int, dict[str, object]] = {0: {"one_clock": shared}, 1: {"one_clock": shared}, 2: {}}
        for rows in ([], message(0, 0, 1, 100, 130)):
            clock = estimate_clock(comms_of(rows), [0, 1, 2], facts_of)
            assert (clock.method, clock.offsets_ns, clock.uncertainty_ns) == (method, {0: 0, 1: 0, 2: 0}, None)
            assert clock.warnings == (
                "rank 2: no message relates its clock to rank 0's: its times are left "
                "unchanged, and figures that compare it with other ranks are null",
            )
            assert clock.relates([0, 1])
            assert not clock.relates([1, 2])
    alone: dict[int, dict[str, object]] = {0: {"one_clock": "session 1"}, 1: {"one_clock": "session 2"}}
    assert estimate_clock(comms_of([]), [0, 1], alone).method is ClockMethod.NONE


def test_a_call_on_the_host_bounds_nothing_beside_communication_on_devices() -> None:
    rows = comms_of([*BOTH_WAYS, *message(2, 0, 1, 9_000_000, 3_000_000), *message(3, 1, 0, 9_000_000, 3_000_000)])
    seen = rows.assign(clock=["device"] * 4 + ["device", "host"] * 2)
    clock = estimate_clock(seen, [0, 1], {})
    assert clock.uncertainty_ns == 40
    assert clock.warnings == ()


@pytest.mark.parametrize("wrong", [70_000, -3_000_000_000])
@pytest.mark.parametrize("kind", ["messages", "collectives"])
def test_kernels_that_end_together_tell_where_in_its_bounds_an_offset_lies(kind: str, wrong: int) -> None:
    """One way takes ten times as long as the other, and one more message is late: the middle of the bounds is not the truth."""
    rows: list[Row] = []
    for match in range(12):
        sent, latency = match * 1_000_000, (200_000, 20_000)[match % 2]
        if kind == "collectives":
            rows += [(rank, "all_reduce", match, sent + 9 * rank, sent + latency) for rank in (0, 1)]
        else:
            received = message(match, match % 2, 1 - match % 2, sent, sent + latency)
            rows += [(*row[:4], sent + latency) for row in received]
    rows += message(12, 0, 1, 20_000_000, 20_900_000)
    clock = estimate_clock(shifted(comms_of(rows).assign(clock="device"), {1: wrong}), range(2), {})
    assert clock.offsets_ns == {0: 0, 1: -wrong}
    assert 100_000 < clock.uncertainty_ns <= 200_000 if kind == "messages" else clock.uncertainty_ns < 20_010


@pytest.mark.parametrize("seed", range(3))
def test_messages_of_uneven_latency_are_taken_for_no_drift(seed: int) -> None:
    """The answer is what all messages together allow: no slope through their noise moves it, and no stretch widens it much."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for match in range(1600):
        sent = match * 1_000_000
        rows += message(match, match % 2, 1 - match % 2, sent, sent + int(rng.integers(10_000, 200_000)))
    latency = [min(row[4] - (row[2] * 1_000_000) for row in rows if row[1] == "recv" and row[0] == to) for to in (0, 1)]
    clock = estimate_clock(shifted(comms_of(rows), {1: 70_000}), range(2), {})
    lowest, highest = -70_000 - latency[1], -70_000 + latency[0]
    assert clock.offsets_ns == {0: 0, 1: (lowest + highest) // 2}
    assert (highest - lowest) / 2 <= clock.uncertainty_ns <= highest - lowest
    assert clock.warnings == ()


def test_a_rank_without_drift_beside_one_that_drifts_is_not_said_to_drift() -> None:
    rows: list[Row] = []
    for turn in range(100):
        for rank in range(2):
            sent = turn * 20_000_000 + rank * 10_000
            rows += message(len(rows), rank, rank + 1, sent, sent + 200)
            rows += message(len(rows), rank + 1, rank, sent + 1_000_000, sent + 1_000_200)
    clock = estimate_clock(drifting(comms_of(rows), dict.fromkeys(range(3), 0), {0: 0, 1: 200, 2: 0}), [0, 1, 2], {})
    assert [line.split(":")[0] for line in clock.warnings] == ["rank 1"]
    assert "its clock drifts" in clock.warnings[0]
