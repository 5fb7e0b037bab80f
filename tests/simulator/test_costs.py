"""Cost of each action, and costs that are refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pptrace.errors import UsageError
from pptrace.schedule.actions import Kind, parse_action
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_rows
from pptrace.simulator import Costs, simulate, uniform
from tests.schedule.shapes import plans

KINDS = {Kind.F: 1, Kind.B: 2}
STAGES = {(Kind.F, 1): 10}
OPS = {(Kind.F, 1, 2): 100}
MESSAGES: list[tuple[Kind, int, int]] = [(Kind.F, 0, 0), (Kind.F, 0, 1), (Kind.B, 1, 0), (Kind.B, 1, 1)]


@pytest.mark.parametrize(("action", "cost"), [("0F0", 1), ("1F0", 10), ("1F2", 100), ("1B2", 2)])
def test_an_op_wins_over_its_stage_and_that_over_its_kind(action: str, cost: int) -> None:
    assert Costs(kinds=KINDS, stages=STAGES, ops=OPS).duration(parse_action(action)) == cost


def test_a_cost_of_nothing_is_a_cost() -> None:
    assert Costs(kinds=KINDS, ops={(Kind.F, 0, 0): 0}).duration(parse_action("0F0")) == 0


def test_an_action_without_a_cost_is_named() -> None:
    with pytest.raises(UsageError, match="no cost for 0B0: give one for its kind B, its stage or the action itself"):
        simulate(build("1f1b", 1, 1), Costs(kinds={Kind.F: 1}))


def test_an_overlapped_pair_costs_the_sum_of_its_halves_unless_it_has_a_cost_of_its_own() -> None:
    pair = parse_action("(0F1;0B0)OVERLAP_F_B")
    assert uniform(3, 5).duration(pair) == 8
    assert Costs(kinds={Kind.F: 3, Kind.B: 5, Kind.OVERLAP_F_B: 6}).duration(pair) == 6


def test_a_message_costs_what_was_measured_of_it_else_the_latency() -> None:
    table = build("1f1b", 2, 2).table
    assert Costs().latencies(table).tolist() == 0
    assert Costs(p2p_latency_ns=7).latencies(table).tolist() == 7
    unsent = {(Kind.I, 1, 0): 50, (Kind.F, 1, 0): 60, (Kind.F, 9, 0): 70, (Kind.B, 0, 1): 80}
    measured = Costs(p2p_latency_ns=7, transfers={(Kind.F, 0, 0): 40, (Kind.B, 1, 1): 30} | unsent)
    latencies = measured.latencies(table).tolist()
    assert len(latencies) == 4
    by_key = {key: latencies[table.slot_to_message[table.slots_of(key[0].code, *key[1:])]] for key in MESSAGES}
    assert by_key == {(Kind.F, 0, 0): 40, (Kind.F, 0, 1): 7, (Kind.B, 1, 0): 7, (Kind.B, 1, 1): 30}


@given(plans(max_pp=3), st.randoms(use_true_random=False))
def test_costs_in_columns_are_those_of_the_actions(plan: Plan, chance: random.Random) -> None:
    actions = [action for row in plan.ranks for action in row]
    halves = [half for action in actions for half in (action, *action.parts)]
    costs = Costs(
        kinds=dict(zip(uniform(3, 8).kinds, (3, 8, 5, 4), strict=True)),
        stages={(half.kind, half.stage): chance.randrange(20) for half in halves if chance.random() < 0.3},
        ops={half.key: chance.randrange(50) for half in halves if chance.random() < 0.2},
    )
    for some in (costs, replace(costs, ops={}), replace(costs, ops={}, stages={})):
        assert some.durations(plan).tolist() == [some.duration(action) for action in actions]


def test_pairs_of_the_same_forward_with_other_backwards_have_costs_of_their_own() -> None:
    cells = ["(0F1;1B0)OVERLAP_F_B", "(0F2;0B0)OVERLAP_F_B", "(0F3;0I1)OVERLAP_F_B", "1F0", "0F0"]
    plan = from_rows([cells], "pairs")
    kinds = {Kind.F: 1, Kind.B: 10, Kind.I: 100}
    assert Costs(kinds=kinds).durations(plan).tolist() == [11, 11, 101, 1, 1]
    assert Costs(kinds=kinds, stages={(Kind.B, 1): 20}).durations(plan).tolist() == [21, 11, 101, 1, 1]


def test_the_weight_gradient_is_a_part_of_the_backward() -> None:
    for costs, expected in ((uniform(2, 7), (2, 7, 4, 3)), (uniform(2, 7, 5), (2, 7, 2, 5))):
        assert tuple(costs.kinds[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W)) == expected


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (partial(uniform, -1, 2), "forward costs -1 ns; expected at least 0"),
        (partial(uniform, 1, -2), "backward costs -2 ns"),
        (partial(uniform, 0, 0), "forward and backward both cost 0 ns"),
        (partial(uniform, 1, 2, wgrad_ns=-3), "wgrad costs -3 ns"),
        (partial(uniform, 1, 2, p2p_ns=-4), "p2p costs -4 ns"),
        (partial(uniform, 1, 2, wgrad_ns=3), "wgrad (3 ns) is a part of backward (2 ns)"),
        (partial(Costs, {Kind.F: -1}), "F costs -1 ns; expected at least 0"),
        (partial(Costs, stages={(Kind.F, 3): -1}), "F 3 costs -1 ns"),
        (partial(Costs, ops={(Kind.F, 3, 0): -2}), "F 3 0 costs -2 ns"),
        (partial(Costs, transfers={(Kind.F, 3, 0): -2}), "costs -2 ns"),
        (partial(Costs, p2p_latency_ns=-1), "a latency of -1 ns"),
    ],
)
def test_impossible_costs_are_refused(costs: Callable[[], Costs], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        costs()


def test_split_backwards_take_their_two_costs() -> None:
    simulation = simulate(from_rows([["0F0", "0I0", "0W0"]], "split"), uniform(10, 7, 4))
    assert [(t.start, t.end) for t in simulation.ranks[0].timeline] == [(0, 10), (10, 13), (13, 17)]
