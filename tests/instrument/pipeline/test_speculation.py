"""Prefixes that may run before validation are closed under messages, as long as can be, and hold forwards only."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.pipeline.instruction import Instruction
from instrument.pipeline.order import Posting, arrange
from instrument.pipeline.runtime import prefix_lengths
from pptrace.errors import ShapeError, UsageError
from pptrace.schedule.actions import Kind
from pptrace.schedule.lower import lower
from pptrace.schedule.messages import message_of, peer_of
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES, build
from tests.support.extent import ALL

POSTINGS = [
    Posting(),
    Posting(blocking=True),
    *(Posting(depth, tagged=tagged) for depth in (1, 3) for tagged in (True, False)),
]
HARMLESS = {Kind.F, Kind.SEND_F, Kind.RECV_F}


def arranged(plan: Plan, posting: Posting) -> list[tuple[Instruction, ...]]:
    return [arrange(plan, rank, posting) for rank in range(plan.pp)]


def is_closed(plan: Plan, instructions: list[tuple[Instruction, ...]], lengths: tuple[int, ...]) -> bool:
    sent, received = [], []
    for row, length in zip(instructions, lengths, strict=True):
        for group in row[:length]:
            for action in group:
                if action.kind not in HARMLESS:
                    return False
                if action.kind.is_p2p:
                    (sent if action.kind.is_send else received).append(message_of(plan, action))
    return sorted(sent, key=str) == sorted(received, key=str)


@cache
def legal_plans(schedule: str) -> list[Plan]:
    result = []
    for pp in range(1, 7):
        for microbatches, chunks in product(
            sorted({1, pp, pp + 1, 2 * pp, 3 * pp} if ALL else {1, pp + 1, 2 * pp}), (None, 3)
        ):
            try:
                result.append(lower(build(schedule, pp, microbatches, chunks)))
            except (ShapeError, UsageError):
                continue
    return result


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@settings(max_examples=25 if ALL else 8, deadline=None)
@given(data=st.data())
def test_prefixes_are_closed_and_none_can_be_longer(schedule: str, data: st.DataObject) -> None:
    plan = data.draw(st.sampled_from(legal_plans(schedule)))
    instructions = arranged(plan, data.draw(st.sampled_from(POSTINGS)))
    lengths = prefix_lengths(plan, instructions)
    assert lengths[-1] == 0
    assert is_closed(plan, instructions, lengths)
    # Closed prefixes have a closed union, so the longest are found where no rank, with what it pulls along, can go on.
    for rank in range(plan.pp - 1):
        assert not can_go_on(plan, instructions, lengths, rank)


def can_go_on(plan: Plan, instructions: list[tuple[Instruction, ...]], lengths: tuple[int, ...], rank: int) -> bool:
    """Return whether closed prefixes exist that are longer on a rank: found by adding what is missing, step by step."""
    longer = list(lengths)
    longer[rank] += 1
    position = {
        (rank, message_of(plan, action), action.kind.is_send): index + 1
        for rank, row in enumerate(instructions)
        for index, group in enumerate(row)
        for action in group
        if action.kind.is_p2p
    }
    while True:
        before = list(longer)
        for one, row in enumerate(instructions):
            for group in row[: longer[one]]:
                for action in group:
                    if action.kind not in HARMLESS:
                        return False
                    if action.kind.is_p2p:
                        peer = peer_of(plan, action)
                        other = position[peer, message_of(plan, action), not action.kind.is_send]
                        longer[peer] = max(longer[peer], other)
            if longer[one] > len(row):
                return False
        if longer[-1]:
            return False
        if longer == before:
            return True


@pytest.mark.parametrize("pp", [2, 4, 6])
def test_rank_r_of_zb_h2_runs_a_forward_for_each_rank_after_it_but_the_last(pp: int) -> None:
    plan = lower(build("zb-h2", pp, 3 * pp))
    instructions = arranged(plan, Posting())
    lengths = prefix_lengths(plan, instructions)
    forwards = [
        sum(group[0].kind is Kind.F for group in row[:length])
        for row, length in zip(instructions, lengths, strict=True)
    ]
    assert forwards == [pp - 1 - rank for rank in range(pp)]


def test_a_pipeline_of_one_rank_has_nothing_to_wait_for() -> None:
    plan = lower(build("1f1b", 1, 3))
    assert prefix_lengths(plan, arranged(plan, Posting())) == (0,)
