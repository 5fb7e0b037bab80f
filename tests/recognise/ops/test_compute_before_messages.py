"""Ops that compute something before they wait for their message, as FSDP's copies of gathered parameters; times count from
:data:`START`.
"""

from __future__ import annotations

import pytest

from pptrace.model.traces import Category
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.recognised_rank import RecognisedRank
from tests.support.synthetic import COMPUTE_STREAM, MAIN_THREAD, START, Event, make_trace

GLOO_THREAD = 300
COPY, LINEAR = ("fsdp::all_gather_copy_out", 50, 90), ("aten::addmm", 310, 450)


def host(
    category: Category, name: str, start: int, end: int, thread: int = MAIN_THREAD, correlation: int = -1
) -> Event:
    return Event(category, name, START + start, START + end, thread=thread, correlation=correlation)


def recognised(*operators: tuple[str, int, int], arrival: int, more: tuple[Event, ...] = ()) -> RecognisedRank:
    """A forward from 40 to 500, whose message is posted from 0 to 20 and waited for until ``arrival``."""
    events = [
        host(Category.ANNOTATION, "PP:1RECV_F0", 0, 20),
        host(Category.CPU_OP, "c10d::recv_", 5, 10),
        host(Category.ANNOTATION, "gloo:recv", 6, arrival, GLOO_THREAD),
        host(Category.ANNOTATION, "PP:1F0", 40, 500),
        *(host(Category.CPU_OP, name, start, end) for name, start, end in operators),
    ]
    return recognise_rank(make_trace([*events, *more]))


def times(rank: RecognisedRank) -> tuple[list[int], list[int]]:
    """(start and end of the op; from when on its receive was waited for, and until when)."""
    op, receive = rank.ops[rank.ops["kind"] == "F"], rank.comms[rank.comms["kind"] == "recv"]
    rows = (op.iloc[0][["start_ns", "end_ns"]], receive.iloc[0][["asked_ns", "end_ns"]])
    of_op, of_receive = ([int(time) - START for time in row] for row in rows)
    return of_op, of_receive


def test_what_an_op_computes_before_its_message_is_there_ends_no_receive_and_waiting_is_no_compute() -> None:
    assert times(recognised(COPY, LINEAR, arrival=300)) == ([310, 450], [90, 300])


def test_ranges_before_the_wait_are_no_waiting_for_the_message() -> None:
    gathered = host(Category.ANNOTATION, "FSDP::all_gather_copy_out", 45, 200)
    assert times(recognised(COPY, LINEAR, arrival=300, more=(gathered,))) == ([310, 450], [200, 300])


def test_an_operator_that_waits_for_the_message_itself_is_the_op_from_then_on() -> None:
    assert times(recognised(("Receiving", 60, 450), arrival=300)) == ([300, 450], [40, 300])


@pytest.mark.parametrize("arrival", [30, 305, 600])
def test_what_was_waited_for_before_the_op_computed_or_behind_it_leaves_its_times(arrival: int) -> None:
    end = min(arrival, 310)
    assert times(recognised(LINEAR, arrival=arrival)) == ([310, 450], [min(40, end), end])


def test_kernels_launched_before_the_wait_are_no_part_of_the_op() -> None:
    launches = (("copy", 60, 70, 90), ("gemm", 320, 330, 460))
    device = [
        event
        for number, (name, launch, start, end) in enumerate(launches, 1)
        for event in (
            host(Category.RUNTIME, "cudaLaunchKernel", launch, launch + 5, correlation=number),
            Event(Category.KERNEL, name, START + start, START + end, 0, COMPUTE_STREAM, correlation=number),
        )
    ]
    assert times(recognised(COPY, LINEAR, arrival=300, more=tuple(device))) == ([330, 460], [90, 300])
    before = times(recognised(COPY, LINEAR, arrival=300, more=tuple(device[:2])))
    assert before == ([70, 90], [40, 70])


@pytest.mark.parametrize(("computed", "expected"), [((45, 50), ([320, 480], [78, 300])), ((45, 400), None)])
def test_a_receive_inside_an_op_ends_with_its_wait_and_the_op_begins_then_unless_it_computed_most_before(
    computed: tuple[int, int], expected: tuple[list[int], list[int]] | None
) -> None:
    """A loop by hand, whose range of a forward makes a tensor, receives into it, and computes."""
    allocates, posts = computed[0], computed[1] + 20
    arrival = posts + 230
    events = [
        host(Category.ANNOTATION, "Forward 0", 40, 900),
        host(Category.CPU_OP, "aten::empty", allocates, computed[1]),
        host(Category.CPU_OP, "c10d::recv_", posts, posts + 8),
        host(Category.ANNOTATION, "gloo:recv", posts + 2, arrival),
        host(Category.CPU_OP, "aten::addmm", arrival + 20, arrival + 180),
        host(Category.ANNOTATION, "Backward 0", 1000, 1100),
        host(Category.CPU_OP, "autograd::engine::evaluate_function: AddmmBackward0", 1010, 1090),
    ]
    kept = ([allocates, arrival + 180], [posts + 8, arrival])
    assert times(recognise_rank(make_trace(events))) == (expected or kept)
