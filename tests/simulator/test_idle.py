"""Idle time of a simulated step by cause."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_rows
from pptrace.simulator import IdleCause, Simulation, idle_by_cause, idle_parts, simulate, uniform
from tests.schedule.shapes import plans

F, B = 1, 2
SHAPES = [(1, 3), (2, 1), (4, 2), (4, 8), (8, 8), (5, 12)]


def times(plan: Plan, p2p_ns: int = 0) -> Simulation:
    return simulate(plan, uniform(F, B, p2p_ns=p2p_ns))


def causes(simulation: Simulation, rank: int) -> dict[str, int]:
    return {str(cause): time for cause, time in idle_by_cause(simulation)[rank].items() if time}


def nonzero(**expected: int) -> dict[str, int]:
    return {cause: time for cause, time in expected.items() if time}


@given(plans(), st.tuples(*(st.integers(0, 7) for _ in range(4))))
def test_the_parts_of_a_rank_are_its_bubble_and_overlap_nothing(plan: Plan, costs: tuple[int, ...]) -> None:
    forward, input_grad, weight_grad, p2p = costs
    simulation = simulate(plan, uniform(forward + 1, input_grad + weight_grad, weight_grad, p2p))
    for rank, parts in zip(simulation.ranks, idle_parts(simulation), strict=True):
        assert (
            sum(part.duration_ns for part in parts)
            == rank.bubble_ns
            == sum(idle_by_cause(simulation)[rank.rank].values())
        )
        spans = [(part.start_ns, part.end_ns) for part in parts]
        busy = [(timed.start, timed.end) for timed in rank.timeline if timed.start < timed.end]
        merged = sorted([*spans, *busy])
        assert merged[0][0] == 0
        assert merged[-1][1] == simulation.makespan_ns
        assert all(before[1] == after[0] for before, after in pairwise(merged))


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_1f1b_waits_to_fill_for_the_first_gradient_and_to_drain(p: int, m: int) -> None:
    simulation = times(build("1f1b", p, m))
    for r in range(p):
        behind = p - r - 1
        first_wait = behind * (F + B) - min(behind, m - 1) * F
        found = causes(simulation, r)
        assert found.get("fill", 0) == r * F
        assert found.get("drain", 0) == r * B
        assert found.get("warmup", 0) == first_wait
        assert found.get("steady", 0) == 0
        assert sum(found.values()) == (p - 1) * (F + B)


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_gpipe_waits_where_forwards_end(p: int, m: int) -> None:
    simulation = times(build("gpipe", p, m))
    for r in range(p):
        expected = nonzero(fill=r * F, warmup=(p - r - 1) * (F + B), drain=r * B)
        assert causes(simulation, r) == expected


def test_time_on_the_way_is_told_from_time_until_the_output_is_there() -> None:
    simulation = times(build("gpipe", 2, 1), p2p_ns=5)
    (_, waits), (comes, *_) = idle_parts(simulation)
    assert causes(simulation, 1) == nonzero(fill=F, message=5, drain=5 + B)
    assert causes(simulation, 0) == nonzero(warmup=5 + F + B, message=5)
    assert (str(comes.other), comes.other_rank, str(comes.before)) == ("0F0", 0, "1F0")
    assert (waits.cause, str(waits.other), waits.other_rank) == (IdleCause.MESSAGE, "1B0", 1)


def test_an_action_that_could_have_run_is_named() -> None:
    """Rank 0 keeps 0W0 for the end, although nothing is missing for it while 0I1 waits."""
    last = [["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"], ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]]
    simulation = simulate(from_rows(last, "last"), uniform(2, 4, 2))
    found = [part for parts in idle_parts(simulation) for part in parts if part.cause is IdleCause.ORDER]
    assert [(part.rank, part.start_ns, part.end_ns, str(part.before), str(part.other)) for part in found] == [
        (0, 8, 10, "0I1", "0W0")
    ]
    filled = [["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"], last[1]]
    assert causes(simulate(from_rows(filled, "filled"), uniform(2, 4, 2)), 0).get("order") is None


def test_a_later_forward_counts_as_order_only_within_the_memory_that_the_rank_needs_anyway() -> None:
    """Rank 0 waits for 1B0. In the first plan it holds one activation at most, in the second two later on."""
    lean = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    wide = [["0F0", "0B0", "0F1", "0F2", "0B1", "0B2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]
    assert causes(times(from_rows(lean, "lean")), 0).get("order") is None
    parts = [part for part in idle_parts(times(from_rows(wide, "wide")))[0] if part.cause is IdleCause.ORDER]
    assert [(part.start_ns, part.end_ns, str(part.before), str(part.other)) for part in parts] == [(1, 2, "0B0", "0F1")]


def test_a_wait_for_the_last_forward_is_between_warmup_and_cooldown() -> None:
    one_by_one = from_rows([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], "one by one")
    simulation = times(one_by_one)
    assert causes(simulation, 0) == nonzero(warmup=F + B, cooldown=F + B)
    assert causes(simulation, 1) == nonzero(fill=F, steady=F + B, drain=B)


def test_causes_are_those_of_the_order_whoever_tagged_its_phases() -> None:
    for name in ("dualpipe", "interleaved-1f1b", "v-min"):
        plan = build(name, 4, 8)
        untagged = from_rows([[str(action) for action in row] for row in plan.ranks], "handwritten")
        assert idle_by_cause(times(untagged)) == idle_by_cause(times(plan))


def test_zb_h1_loses_slots_to_its_order_alone_beyond_fill_and_wait() -> None:
    total = Counter[str]()
    for rank in range(4):
        total.update(causes(times(build("zb-h1", 4, 8)), rank))
    assert total == {"fill": 6, "warmup": 4, "order": 2}
