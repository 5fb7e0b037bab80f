"""Calls that a worker thread carries out: each once, done when their work is."""

from __future__ import annotations

import pandas as pd
import pytest

from pptrace.clock import ClockMethod
from pptrace.model.traces import Category
from pptrace.recognise.calls.call_columns import Role
from pptrace.recognise.calls.find_calls import find_calls
from pptrace.recognise.calls.host_calls import read_name
from pptrace.recognise.messages.match import has_posting_time_only
from tests.recognise.kineto_calls import ALL_REDUCE, MAIN_THREAD, Rank
from tests.support.analysed import analyse
from tests.support.synthetic import START

WORKERS = (501, 502)


def shaped(rank: Rank, elements: int, size: int = -1) -> None:
    """Give the last event sizes, as recorded shapes tell them."""
    sizes = {"in_elements": elements, "in_bytes": size, "out_bytes": size}
    rank.args.append((rank.events[-1], sizes))


def post(rank: Rank, operator: str, start: int, end: int) -> None:
    rank.add(Category.CPU_OP, f"c10d::{operator}", start, end, thread=MAIN_THREAD)


def work(rank: Rank, name: str, start: int, end: int, worker: int = 0) -> None:
    rank.add(Category.ANNOTATION, f"gloo:{name}", start, end, thread=WORKERS[worker])


def calls_of(rank: Rank) -> pd.DataFrame:
    return find_calls(rank.trace().events).assign(rank=rank.rank)


def spans(calls: pd.DataFrame, *names: str) -> list[tuple[str, ...]]:
    columns = [(calls[name] - START).tolist() for name in names]
    return list(zip(calls["kind"], *columns, strict=True))


def test_the_posting_of_a_barrier_and_its_work_are_one_call_that_ends_with_the_work() -> None:
    rank = Rank(0)
    post(rank, "barrier", 0, 10)
    work(rank, "barrier", 5, 300)
    rank.add(Category.CPU_OP, "aten::mm", 20, 70, thread=MAIN_THREAD)
    rank.add(Category.CPU_OP, "_c10d_functional::wait_tensor", 80, 300, thread=MAIN_THREAD)
    calls = calls_of(rank)
    assert spans(calls, "start_ns", "posted_ns", "asked_ns", "end_ns") == [("barrier", 0, 10, 70, 300)]
    assert not has_posting_time_only(calls).any()


def test_a_call_whose_record_tells_no_size_has_that_of_the_shapes_around_and_inside_it() -> None:
    """As torch before 2.2 records them: the operator knows both sides of an all-to-all, the range the type of an all-reduce."""
    rank = Rank(0)
    for at, operator, of_operator, of_range in ((0, "alltoall_base_", 96, -1), (100, "allreduce_", -1, 48)):
        post(rank, operator, at, at + 50)
        shaped(rank, 12, of_operator)
        rank.add(Category.CPU_OP, "record_param_comms", at + 5, at + 45, thread=MAIN_THREAD)
        rank.add(
            Category.ANNOTATION, "nccl:all_reduce" if at else "nccl:all_to_all", at + 10, at + 40, thread=MAIN_THREAD
        )
        shaped(rank, 12, of_range)
    assert calls_of(rank)["bytes"].tolist() == [96, 48]


def test_an_operator_on_a_tensor_that_is_under_way_is_busy_until_it_waits_for_that() -> None:
    """As of DTensor: the operator's range is around the wait, and around what it computes then."""
    rank = Rank(0)
    post(rank, "allreduce_", 0, 10)
    work(rank, "all_reduce", 5, 300)
    rank.add(Category.CPU_OP, "aten::add", 60, 350, thread=MAIN_THREAD)
    rank.add(Category.CPU_OP, "_c10d_functional::wait_tensor", 80, 310, thread=MAIN_THREAD)
    rank.add(Category.CPU_OP, "aten::add", 320, 350, thread=MAIN_THREAD)
    calls = calls_of(rank)
    assert spans(calls, "start_ns", "posted_ns", "asked_ns", "end_ns") == [("all_reduce", 0, 10, 80, 300)]


def test_a_bucket_of_ddp_is_there_when_ddp_copies_the_last_one_back() -> None:
    """Its worker's range ends at 500, when the thread of the worker has a core again; two buckets, the second one waited for."""
    rank = Rank(0)
    copy = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
    for start in (0, 40):
        rank.add(
            Category.CPU_OP,
            "autograd::engine::evaluate_function: AccumulateGrad",
            start,
            start + 30,
            thread=MAIN_THREAD,
        )
        post(rank, "allreduce_", start + 10, start + 20)
        work(rank, "all_reduce", start + 15, 100 if start == 0 else 500)
    for start in (110, 300, 310):
        rank.add(Category.CPU_OP, "aten::as_strided", start - 5, start - 3, thread=MAIN_THREAD)
        rank.add(Category.CPU_OP, copy, start, start + 5, thread=MAIN_THREAD)
    post(rank, "allreduce_", 400, 405)  # of the script, not of a backward
    rank.add(Category.CPU_OP, copy, 450, 451, thread=MAIN_THREAD)
    calls = calls_of(rank)
    assert spans(calls, "posted_ns", "asked_ns", "end_ns")[:2] == [
        ("all_reduce", 20, 70, 100),
        ("all_reduce", 60, 60, 310),
    ]


def test_works_of_calls_that_are_pending_at_once_are_taken_in_their_order() -> None:
    rank = Rank(0)
    for at in range(3):
        post(rank, "allreduce_", 10 * at, 10 * at + 5)
    post(rank, "barrier", 30, 35)
    work(rank, "all_reduce", 100, 200, 0)
    work(rank, "all_reduce", 101, 190, 1)
    work(rank, "all_reduce", 191, 400, 1)
    work(rank, "barrier", 201, 410, 0)
    ends = [("all_reduce", 200), ("all_reduce", 190), ("all_reduce", 400), ("barrier", 410)]
    assert spans(calls_of(rank), "end_ns") == ends


def two_pending(first: tuple[int, int], second: tuple[int, int]) -> pd.DataFrame:
    """Two all-reduces, pending at once: the smaller is posted first; (elements, bytes) of their works as they begin."""
    rank = Rank(0)
    for number, elements in enumerate(sorted((first[0], second[0]))):
        post(rank, "allreduce_", 10 * number, 10 * number + 1)
        shaped(rank, elements)
    for number, (elements, size) in enumerate((first, second)):
        work(rank, "all_reduce", 20 + number, 30 + 10 * number, worker=number)
        shaped(rank, elements, size)
    return calls_of(rank)


def test_works_of_two_groups_that_begin_in_another_order_go_to_the_calls_of_their_size() -> None:
    calls = two_pending((20, 40), (10, 40))
    assert calls["bytes"].tolist() == [40, 40]
    assert spans(calls, "end_ns") == [("all_reduce", 40), ("all_reduce", 30)]
    assert calls["worker"].nunique() == 2
    assert -1 not in set(calls["worker"])


def test_whose_work_is_whose_is_not_told_where_either_may_be() -> None:
    assert two_pending((10, 40), (10, 40))["bytes"].tolist() == [40, 40]
    calls = two_pending((10, 20), (10, 40))
    assert calls["bytes"].tolist() == [-1, -1]
    assert calls["worker"].tolist() == [-1, -1]


def test_a_reduce_scatter_is_done_with_the_last_of_its_all_reduces() -> None:
    rank = Rank(0)
    post(rank, "reduce_scatter_", 0, 10)
    work(rank, "all_reduce", 20, 50, 0)
    work(rank, "all_reduce", 21, 70, 1)
    work(rank, "all_reduce", 51, 120, 0)
    post(rank, "allreduce_", 200, 210)
    work(rank, "all_reduce", 220, 260, 1)
    post(rank, "_reduce_scatter_base_", 300, 310)
    work(rank, "all_reduce", 320, 360, 1)
    assert spans(calls_of(rank), "end_ns") == [("reduce_scatter", 120), ("all_reduce", 260), ("reduce_scatter", 360)]


def test_what_may_be_a_part_of_one_call_or_all_of_the_next_lets_neither_end_before_it() -> None:
    rank = Rank(0)
    post(rank, "reduce_scatter_", 0, 10)
    post(rank, "allreduce_", 20, 25)
    for at in range(3):
        work(rank, "all_reduce", 30 + 100 * at, 120 + 100 * at)
    assert spans(calls_of(rank), "end_ns") == [("reduce_scatter", 320), ("all_reduce", 320)]


def test_a_work_whose_posting_was_not_recorded_is_a_call_and_a_posting_without_work_has_no_end() -> None:
    rank = Rank(0)
    work(rank, "all_reduce", 5, 50)
    post(rank, "barrier", 60, 70)
    calls = calls_of(rank)
    assert spans(calls, "start_ns", "end_ns") == [("all_reduce", 5, 50), ("barrier", 60, 70)]
    assert has_posting_time_only(calls).tolist() == [False, True]


def test_a_monitored_barrier_waits_inside_and_its_messages_are_part_of_it() -> None:
    rank = Rank(0)
    post(rank, "monitored_barrier_", 0, 100)
    for name in ("gloo:recv", "gloo:send"):
        rank.add(Category.ANNOTATION, name, 5, 90, thread=MAIN_THREAD)
    calls = calls_of(rank)
    assert spans(calls, "start_ns", "posted_ns", "asked_ns", "end_ns") == [("barrier", 0, 0, 0, 100)]
    assert not has_posting_time_only(calls).any()


@pytest.mark.parametrize("backend", ["nccl", "ncclx", "nccl2", "rccl", "mccl", "gloo"])
def test_works_of_any_library_of_collectives_are_read(backend: str) -> None:
    peer, name = read_name(f"{backend}:send 0->3")
    assert (peer, name.role, name.kind) == (3, Role.WORK, "send")
    assert read_name(f"{backend}:all_reduce")[1].ends_with_work == (backend == "gloo")


@pytest.mark.parametrize("name", ["train:all_reduce", "ProfilerStep:broadcast", "nccl2:optimizer"])
def test_ranges_of_scripts_are_no_works(name: str) -> None:
    assert read_name(name)[1].role is Role.NONE


def test_gloos_works_are_no_works_of_calls_that_nccl_carries_out() -> None:
    rank = Rank(0)
    rank.call(ALL_REDUCE, 0, None, in_bytes=8)
    post(rank, "allreduce_", 100, 110)
    work(rank, "all_reduce", 105, 300)
    assert spans(calls_of(rank), "end_ns") == [("all_reduce", 9), ("all_reduce", 300)]


def two_ranks(late: int, completed: bool) -> list[Rank]:
    """A barrier that rank 1 reaches late, and what the ranks did before and after it."""
    job = {"world_size": 2, "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}]}
    ranks = [Rank(number, {**job, "rank": number}) for number in range(2)]
    for rank in ranks:
        start = late * rank.rank
        post(rank, "barrier", start, start + 10_000)
        if completed:
            work(rank, "barrier", start + 5_000, late + 40_000)
    return ranks


@pytest.mark.parametrize("completed", [True, False])
def test_only_the_completion_of_a_barrier_bounds_a_clock(completed: bool) -> None:
    """Its posting returns 200 ms before the other rank comes, which nothing contradicts."""
    report = analyse([rank.trace() for rank in two_ranks(200_000_000, completed)]).report
    assert report.clock.method == (ClockMethod.BOUNDS if completed else ClockMethod.NONE)
    if completed:
        assert abs(report.clock.offsets_ns["1"]) <= report.clock.uncertainty_ns < 200_100_000
