"""Which cost an action gets, and which costs are refused."""

from __future__ import annotations

import pytest

from pptrace.errors import UsageError
from pptrace.schedule.actions import Action, Kind, parse_action
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_rows
from pptrace.simulator import Costs, simulate, uniform

KINDS = {Kind.F: 1, Kind.B: 2}
STAGES = {(Kind.F, 1): 10}
OPS = {(Kind.F, 1, 2): 100}


@pytest.mark.parametrize(("action", "cost"), [("0F0", 1), ("1F0", 10), ("1F2", 100), ("1B2", 2)])
def test_an_op_wins_over_its_stage_and_that_over_its_kind(action: str, cost: int) -> None:
    assert Costs(kinds=KINDS, stages=STAGES, ops=OPS).duration(0, parse_action(action)) == cost


def test_a_cost_of_nothing_is_a_cost() -> None:
    assert Costs(kinds=KINDS, ops={(Kind.F, 0, 0): 0}).duration(0, parse_action("0F0")) == 0


def test_each_stage_and_each_op_takes_its_own_time() -> None:
    simulation = simulate(build("gpipe", 2, 3), Costs(kinds=KINDS, stages=STAGES, ops=OPS))
    took = {str(t.action): t.end - t.start for rank in simulation.ranks for t in rank.timeline}
    assert took == {
        **{f"0F{mb}": 1 for mb in range(3)},
        **{"1F0": 10, "1F1": 10, "1F2": 100},
        **{f"{stage}B{mb}": 2 for stage in range(2) for mb in range(3)},
    }


def test_an_action_without_a_cost_is_named() -> None:
    with pytest.raises(UsageError, match="no cost for 0B0: give one for its kind B, its stage or the action itself"):
        simulate(build("1f1b", 1, 1), Costs(kinds={Kind.F: 1}))


def test_an_overlapped_pair_costs_the_sum_of_its_halves_unless_it_has_a_cost_of_its_own() -> None:
    pair = parse_action("(0F1;0B0)OVERLAP_F_B")
    assert uniform(3, 5).duration(0, pair) == 8
    assert Costs(kinds={Kind.F: 3, Kind.B: 5, Kind.OVERLAP_F_B: 6}).duration(0, pair) == 6


def test_a_message_costs_what_was_measured_of_it_else_the_latency() -> None:
    producer = Action(Kind.F, 0, 0)
    assert Costs().latency(producer, 0, 1) == 0
    assert Costs(p2p_latency_ns=7).latency(producer, 0, 1) == 7
    measured = Costs(p2p_latency_ns=7, transfers={producer.key: 40})
    assert measured.latency(producer, 0, 1) == 40
    assert measured.latency(Action(Kind.F, 0, 1), 0, 1) == 7


def test_the_weight_gradient_is_a_part_of_the_backward() -> None:
    for costs, expected in ((uniform(2, 7), (2, 7, 4, 3)), (uniform(2, 7, 5), (2, 7, 2, 5))):
        assert tuple(costs.kinds[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W)) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"forward_ns": -1, "backward_ns": 2}, "forward costs -1 ns; expected at least 0"),
        ({"forward_ns": 1, "backward_ns": -2}, "backward costs -2 ns"),
        ({"forward_ns": 0, "backward_ns": 0}, "forward and backward both cost 0 ns"),
        ({"forward_ns": 1, "backward_ns": 2, "wgrad_ns": -3}, "wgrad costs -3 ns"),
        ({"forward_ns": 1, "backward_ns": 2, "p2p_ns": -4}, "p2p costs -4 ns"),
        ({"forward_ns": 1, "backward_ns": 2, "wgrad_ns": 3}, "wgrad (3 ns) is a part of backward (2 ns)"),
    ],
)
def test_impossible_uniform_costs_are_refused(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        uniform(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kinds": {Kind.F: -1}}, "F costs -1 ns; expected at least 0"),
        ({"stages": {(Kind.F, 3): -1}}, "F 3 costs -1 ns"),
        ({"ops": {(Kind.F, 3, 0): -2}}, "F 3 0 costs -2 ns"),
        ({"transfers": {(Kind.F, 3, 0): -2}}, "costs -2 ns"),
        ({"p2p_latency_ns": -1}, "a latency of -1 ns"),
    ],
)
def test_impossible_costs_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Costs(**arguments)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_split_backwards_take_their_two_costs() -> None:
    simulation = simulate(from_rows([["0F0", "0I0", "0W0"]], "split"), uniform(10, 7, 4))
    assert [(t.start, t.end) for t in simulation.ranks[0].timeline] == [(0, 10), (10, 13), (13, 17)]
