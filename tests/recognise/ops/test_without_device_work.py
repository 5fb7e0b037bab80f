"""Ops that launch nothing, on ranks whose hosts run ahead of their devices; times count from :data:`START`."""

from __future__ import annotations

import pytest

from pptrace.marks import OpMark, P2PMark, Transfer, format_mark
from pptrace.model.traces import Category
from pptrace.recognise.rank import recognise_rank
from pptrace.schedule.actions import parse_action
from tests.recognise.kineto_calls import RECV, Rank
from tests.support.synthetic import COMPUTE_STREAM, MAIN_THREAD, START

GEMM, OPS = "ampere_sgemm_128x64", "7F0 0I0 0W0 7F1 0I1 0W1"


def op_range(rank: Rank, op: str, at: int, marked: bool) -> None:
    text = format_mark(OpMark(parse_action(op), 0)) if marked else f"PP:{op}"
    rank.add(Category.ANNOTATION, text, at, at + 20, thread=MAIN_THREAD)


def first_stage(ops: str = OPS, marked: bool = False) -> Rank:
    """The ranges of a ZBV rank, 20 long, one every 30 from 100 on, whose kernels run from 1000 on, 100 each: none in 0I."""
    rank = Rank(0)
    end = 1000
    for index, op in enumerate(ops.split()):
        at = 100 + 30 * index
        op_range(rank, op, at, marked)
        if not op.startswith("0I"):
            rank.kernel(GEMM, at + 5, end, end + 100, stream=COMPUTE_STREAM)
            end += 100
    return rank


def shown(rank: Rank) -> list[tuple[str, int, int]]:
    """(op, start, end) in order of start, as the report has them."""
    ops = recognise_rank(rank.trace()).ops.sort_values("start_ns", kind="stable")
    columns = (ops[name].tolist() for name in ("stage", "kind", "microbatch", "start_ns", "end_ns"))
    rows = zip(*columns, strict=True)
    return [(f"{stage}{kind}{number}", start - START, end - START) for stage, kind, number, start, end in rows]


@pytest.mark.parametrize("marked", [False, True])
def test_an_op_that_launches_nothing_comes_after_the_device_work_of_ops_before_it(marked: bool) -> None:
    assert shown(first_stage(marked=marked)) == [
        ("7F0", 1000, 1100),
        ("0I0", 1100, 1100),
        ("0W0", 1100, 1200),
        ("7F1", 1200, 1300),
        ("0I1", 1300, 1300),
        ("0W1", 1300, 1400),
    ]


@pytest.mark.parametrize(("marked", "arrival", "place"), [(False, 300, 300), (True, 300, 300), (False, 900, 600)])
def test_it_comes_when_its_host_came_to_it_and_its_message_was_there(marked: bool, arrival: int, place: int) -> None:
    """But before the compute that was launched after it."""
    rank = Rank(0)
    receive = format_mark(P2PMark((Transfer(parse_action("0RECV_B0"), 1, 8192),), "pp", 0))
    rank.add(Category.ANNOTATION, receive if marked else "PP:0RECV_B0", 0, 20, thread=MAIN_THREAD)
    rank.call(RECV, 5, (30, arrival), in_bytes=8192, peer=1)
    op_range(rank, "7F0", 30, marked)
    rank.kernel(GEMM, 35, 40, 60, stream=COMPUTE_STREAM)
    op_range(rank, "0I0", 100, marked)
    op_range(rank, "0I1", 400, marked)
    op_range(rank, "7F1", 500, marked)
    rank.kernel(GEMM, 505, 600, 700, stream=COMPUTE_STREAM)
    expected = [("7F0", 40, 60), ("0I0", place, place), ("0I1", 400, 400), ("7F1", 600, 700)]
    assert shown(rank) == sorted(expected, key=lambda op: op[1])


def test_where_others_of_its_kind_have_kernels_they_may_be_lost() -> None:
    rank = first_stage()
    rank.kernel(GEMM, 100 + 30 * 4 + 5, 1290, 1300, stream=COMPUTE_STREAM)  # of 0I1
    assert ("0I0", 130, 150) in shown(rank)


def test_where_no_op_launches_anything_they_come_between_the_work_around_them() -> None:
    rank = first_stage("0I0 0I1")
    for launch, start in ((50, 1000), (170, 1100)):
        rank.kernel(GEMM, launch, start, start + 100, stream=COMPUTE_STREAM)
    assert shown(rank) == [("0I0", 1100, 1100), ("0I1", 1100, 1100)]


def test_where_no_compute_follows_device_events_may_end_early() -> None:
    assert ("0I1", 190, 210) in shown(first_stage("7F0 0W0 7F1 0I1"))


def test_on_a_rank_without_device_work_its_range_stays() -> None:
    rank = Rank(0)
    rank.add(Category.ANNOTATION, "PP:0I0", 100, 120, thread=MAIN_THREAD)
    rank.add(Category.ANNOTATION, "PP:0W0", 130, 150, thread=MAIN_THREAD)
    assert shown(rank) == [("0I0", 100, 120), ("0W0", 130, 150)]
