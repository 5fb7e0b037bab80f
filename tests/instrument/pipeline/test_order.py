"""Receives move ahead, nothing else does; and what cannot be done one call at a time is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.pipeline.order import Posting, arrange, prefetch_receives, require_total_order
from pptrace.errors import ScheduleError, ShapeError, UsageError
from pptrace.schedule.actions import Action, parse_action
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.registry import SCHEDULES, build
from tests.support.extent import ALL

Instructions = tuple[tuple[Action, ...], ...]


def read(text: str) -> Instructions:
    """Groups are joined by "+"."""
    return tuple(tuple(parse_action(cell) for cell in group.split("+")) for group in text.split())


def write(instructions: Instructions) -> str:
    return " ".join("+".join(map(str, group)) for group in instructions)


def flat(instructions: Instructions) -> list[Action]:
    return [action for group in instructions for action in group]


def test_receives_move_before_the_compute_that_they_do_not_feed() -> None:
    steady = read("1RECV_F0 1F0 1SEND_F0+1RECV_B0 1B0 1SEND_B0+1RECV_F1 1F1 1SEND_F1+1RECV_B1 1B1 1SEND_B1")
    assert write(prefetch_receives(steady, 1, tagged=True)) == (
        "1RECV_F0+1RECV_B0 1F0 1SEND_F0+1RECV_F1 1B0 1SEND_B0+1RECV_B1 1F1 1SEND_F1 1B1 1SEND_B1"
    )
    assert write(prefetch_receives(steady, 2, tagged=True)) == (
        "1RECV_F0+1RECV_B0+1RECV_F1 1F0 1SEND_F0+1RECV_B1 1B0 1SEND_B0 1F1 1SEND_F1 1B1 1SEND_B1"
    )
    assert write(prefetch_receives(steady, 9, tagged=True)).startswith("1RECV_F0+1RECV_B0+1RECV_F1+1RECV_B1 1F0")


def test_without_tags_a_receive_passes_no_other_transfer() -> None:
    steady = read("0F0 0F1 0RECV_B0 0B0 0SEND_B0+0RECV_F2 0F2 0SEND_F2 0B1 0W1 0RECV_B2 0B2")
    assert write(prefetch_receives(steady, 1, tagged=False)) == (
        "0F0 0RECV_B0 0F1 0B0 0SEND_B0+0RECV_F2 0F2 0SEND_F2 0B1 0RECV_B2 0W1 0B2"
    )
    assert write(prefetch_receives(steady, 5, tagged=False)) == (
        "0RECV_B0 0F0 0F1 0B0 0SEND_B0+0RECV_F2 0F2 0SEND_F2 0RECV_B2 0B1 0W1 0B2"
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    while True:
        name = draw(st.sampled_from(sorted(SCHEDULES)))
        pp = draw(st.integers(1, 5))
        try:
            return lower(build(name, pp, draw(st.integers(pp, 3 * pp)), None))
        except (ShapeError, UsageError):
            continue


@settings(max_examples=60 if ALL else 20, deadline=None)
@given(plans(), st.integers(1, 4), st.booleans())
def test_posting_ahead_keeps_every_action_and_the_order_of_all_but_receives(
    plan: Plan, depth: int, tagged: bool
) -> None:
    for rank in range(plan.pp):
        before = flat(tuple(plan.instructions(rank)))
        after = flat(arrange(plan, rank, Posting(depth, tagged=tagged)))
        assert sorted(map(str, before)) == sorted(map(str, after))
        assert [a for a in before if not a.kind.is_recv] == [a for a in after if not a.kind.is_recv]
        if not tagged:
            assert [a for a in before if a.kind.is_p2p] == [a for a in after if a.kind.is_p2p]
        index, computes = {a: i for i, a in enumerate(after)}, [a for a in after if a.kind.is_compute]
        behind = {a: sum(index[c] < index[a] for c in computes) for a in after}
        was = {a: sum(before.index(c) < before.index(a) for c in computes) for a in before if a.kind.is_recv}
        for action, computed_before in was.items():
            assert computed_before - depth <= behind[action] <= computed_before, action
            if tagged:
                assert behind[action] == max(0, computed_before - depth), action


@settings(max_examples=60 if ALL else 20, deadline=None)
@given(plans())
def test_every_lowered_plan_can_run_one_blocking_call_at_a_time(plan: Plan) -> None:
    require_total_order(plan)
    for rank in range(plan.pp):
        assert all(len(group) == 1 for group in arrange(plan, rank, Posting(blocking=True)))


def test_a_plan_that_needs_its_groups_is_refused_one_call_at_a_time() -> None:
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    plan = make_plan("crossed", [[parse_action(cell) for cell in row.split()] for row in rows])
    with pytest.raises(
        ScheduleError,
        match=re.escape("crossed: deadlock with one blocking call at a time: rank 0 is stuck in 0SEND_F1"),
    ):
        arrange(plan, 0, Posting(blocking=True))


@pytest.mark.parametrize(
    ("ahead", "blocking", "message"),
    [(-1, False, "posted -1 compute actions ahead"), (1, True, "nothing to post ahead")],
)
def test_postings_that_make_no_sense_are_refused(ahead: int, blocking: bool, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Posting(ahead, blocking)
