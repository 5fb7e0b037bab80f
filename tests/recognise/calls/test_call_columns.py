"""Calls found in columns: as one after the other would be, however many there are and however they nest."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.model.tables import without_categories
from pptrace.model.traces import Category
from pptrace.recognise.calls.call_columns import CODE_OF_KIND, CommArgs, make_calls
from pptrace.recognise.calls.find_calls import find_calls, in_turn, one_by_one, with_works
from pptrace.recognise.calls.kernels import batches
from tests.recognise.kineto_calls import ALL_REDUCE, MAIN_THREAD, RECV, SEND, Rank

NAMES = (
    *("c10d::allreduce_", "c10d::send", "c10d::recv_", "_c10d_functional::all_reduce", "c10d::barrier"),
    *("nccl:all_reduce", "nccl:send 0->1", "nccl:recv 1<-0", "ncclAllReduce", "ncclSend", "aten::mm"),
)
LONG = 10_000


def add_nested(rank: Rank, chance: random.Random, begin: int, end: int, depth: int = 0) -> None:
    """Ranges in each other and one after the other, a few of which outlast the one around them."""
    at = begin
    while at < end:
        until = min(at + chance.choice((0, 1, 5, 40)), end + chance.choice((0, 0, 0, 2)))
        name = chance.choice(("record_param_comms", *NAMES))
        if name == "record_param_comms":
            collective = chance.choice(("allreduce", "send", "wait", ""))
            rank.record(at, until, collective=collective, group_id="0", in_bytes=chance.randint(-1, 9))
        else:
            rank.add(Category.CPU_OP, name, at, until, thread=MAIN_THREAD)
        if depth < 3 and until > at:
            add_nested(rank, chance, at + chance.choice((0, 1)), until, depth + 1)
        at = until + chance.choice((0, 1, 7))


def stretch(seed: int, first: int = 0, rank: Rank | None = None) -> Rank:
    made = rank or Rank(0)
    add_nested(made, random.Random(seed), first, first + 60)
    return made


@pytest.mark.parametrize("seeds", [range(8), range(100, 140, 5), [3, 3, 3, 4, 3]])
def test_calls_of_stretches_apart_are_those_of_each_stretch_by_itself(seeds: Sequence[int]) -> None:
    together, apart = Rank(0), []
    for index, seed in enumerate(seeds):
        stretch(seed, LONG * index, together)
        calls = without_categories(find_calls(stretch(seed).trace().events))
        times = ["host_ns", "start_ns", "posted_ns", "asked_ns", "end_ns"]
        apart.append(calls.assign(**{name: calls[name] + LONG * index for name in times}))
    expected = pd.concat(apart, ignore_index=True)
    assert len(expected) > len(seeds)
    pd.testing.assert_frame_equal(without_categories(find_calls(together.trace().events)), expected)


def test_a_thousand_calls_of_each_way_to_nest_keep_their_own_peers_and_bytes() -> None:
    rank = Rank(0)
    for index in range(1000):
        at = 3000 * index
        rank.call(SEND, at, (at + 20, at + 30 + index), ranks=(0, 1), dst=index % 7, in_bytes=index)
        rank.call(RECV, at + 1000, (at + 1020, at + 1030), ranks=(0, 1), src=index % 5, in_bytes=2 * index)
        rank.call(ALL_REDUCE, at + 2000, None, ranks=(0, 1), in_bytes=3 * index, seq=index)
    calls = find_calls(rank.trace().events)
    number = np.arange(1000)
    of_kind = {str(kind): rows for kind, rows in calls.groupby("kind", observed=True)}
    assert (of_kind["send"]["peer"].to_numpy() == number % 7).all()
    assert ((of_kind["send"]["end_ns"] - of_kind["send"]["start_ns"]).to_numpy() == 10 + number).all()
    assert (of_kind["recv"]["peer"].to_numpy() == number % 5).all()
    assert (of_kind["recv"]["bytes"].to_numpy() == 2 * number).all()
    assert (of_kind["all_reduce"]["seq"].to_numpy() == number).all()
    assert set(of_kind["all_reduce"]["clock"]) == {"host"}


KERNELS = st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 11), st.booleans()), max_size=12)


@given(KERNELS)
def test_kernels_carry_what_no_kernel_before_them_carried(kernels: list[tuple[int, int, bool]]) -> None:
    begun = np.array(sorted(number for number, _, _ in kernels), dtype=np.int64)
    latest = np.array([min(last, number - 1) for (_, last, _), number in zip(kernels, begun.tolist(), strict=True)])
    is_around = np.array([around for _, _, around in kernels], dtype=np.bool_)
    carries, first = batches(begun, latest.astype(np.int64), is_around)
    reached, expected = 0, []
    for around, number, last in zip(is_around.tolist(), begun.tolist(), latest.tolist(), strict=True):
        does = around or last >= reached
        expected.append((does, reached))
        reached = number if does else reached
    assert list(zip(carries.tolist(), first.tolist(), strict=True)) == expected


POSTED_OR_WORK = st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=30)


@given(POSTED_OR_WORK)
def test_works_taken_in_turn_are_those_taken_one_by_one(events: list[tuple[bool, int, int]]) -> None:
    calls = make_calls(
        len(events),
        {
            "kind": np.full(len(events), CODE_OF_KIND["all_reduce"]),
            "start_ns": np.array([start for _, start, _ in events]),
            "end_ns": np.array([start + 5 if is_work else -1 for is_work, start, _ in events]),
            "elements": np.array([elements for *_, elements in events]),
            "on_worker": np.array([is_work for is_work, _, _ in events]),
        },
    )
    by_start = np.argsort(calls["start_ns"], kind="stable")
    works, posted = by_start[calls["on_worker"][by_start]], by_start[~calls["on_worker"][by_start]]
    rows = [
        sorted(zip(*(column.tolist() for column in owned), strict=True))
        for owned in (in_turn(calls, works, posted, calls["elements"]), one_by_one(calls, works, posted))
    ]
    assert rows[0] == rows[1]


def test_a_work_that_nothing_posted_stays_a_call_and_the_others_are_joined() -> None:
    columns = {
        "kind": np.full(3, CODE_OF_KIND["barrier"]),
        "start_ns": np.array([0, 10, 20]),
        "end_ns": np.array([5, -1, 90]),
        "on_worker": np.array([True, False, True]),
        "thread": np.array([7, 1, 8]),
    }
    joined = with_works(make_calls(3, columns))
    assert (joined["end_ns"].tolist(), joined["worker"].tolist()) == ([5, 90], [-1, 8])


def test_of_several_arguments_of_an_event_the_last_count_and_of_none_nothing_is_known() -> None:
    table = pd.DataFrame(
        {"event": [4, 2, 4], "in_bytes": [1, 2, 3], "out_bytes": [-1, 9, -1], "collective": ["a", "b", "c"]}
    )
    args = CommArgs(table)
    rows = args.rows_of(np.array([2, 3, 4, 5]))
    assert args.message_bytes(rows).tolist() == [9, -1, 3, -1]
    assert args.texts("collective", rows).tolist() == ["b", "", "c", ""]


def test_events_of_equal_names_that_nest_otherwise_are_other_calls() -> None:
    rank = Rank(0)
    for index, second in enumerate(((2, 3), (5, 6), (2, 3), (5, 6))):
        at = LONG * index
        rank.add(Category.CPU_OP, "c10d::allreduce_", at, at + 10, thread=MAIN_THREAD)
        rank.record(at + 1, at + 4, collective="allreduce", in_bytes=8)
        rank.record(at + second[0], at + second[1], collective="allreduce", in_bytes=16)
    calls = find_calls(rank.trace().events)
    assert calls["bytes"].tolist() == [8, 8, 16, 8, 8, 16]
