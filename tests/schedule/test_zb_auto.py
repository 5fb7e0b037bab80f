"""The searched schedule: legal within its memory, and near the bound that no order can beat."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.errors import ShapeError
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.builders.zb_auto import NAME, Choices, excess_of, list_schedule, lower_bound, run_heuristic
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.registry import build
from pptrace.schedule.shape import OpCosts, Shape
from pptrace.schedule.validate import validate
from pptrace.simulator import Costs, peak_inflight, simulate
from tests.schedule.zb_heuristic import Heuristic, list_orders

of_rank = st.tuples(*[st.integers(1, 9)] * 3)


def shapes_of(pp: int) -> st.SearchStrategy[Shape]:
    """Shapes of p ranks, which cost the same or not."""
    alike = st.builds(OpCosts, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 12))
    each = st.lists(of_rank, min_size=pp, max_size=pp).map(tuple)
    uneven = st.builds(OpCosts, p2p=st.integers(0, 12), of_ranks=each)
    memory = st.none() | st.integers(1, 14)
    return st.builds(Shape, st.just(pp), st.integers(1, 14), memory_limit=memory, costs=alike | uneven)


shapes = st.integers(1, 6).flatmap(shapes_of)


def searched(shape: Shape) -> Plan:
    return build(NAME, shape.pp, shape.num_microbatches, memory_limit=shape.memory_limit, costs=shape.costs)


def simulated_costs(costs: OpCosts, pp: int) -> Costs:
    each = costs.of_ranks or [(costs.forward, costs.input_grad, costs.weight_grad)] * pp
    stages = {(kind, rank): each[rank]["FIW".index(kind)] for rank in range(pp) for kind in (Kind.F, Kind.I, Kind.W)}
    return Costs(stages=stages, p2p_latency_ns=costs.p2p)


def makespan(plan: Plan, costs: OpCosts) -> int:
    return simulate(plan, simulated_costs(costs, plan.pp)).makespan_ns


@given(shapes)
def test_any_costs_and_any_memory_make_a_valid_plan_within_that_memory(shape: Shape) -> None:
    plan = searched(shape)
    validate(plan)
    assert plan.name == NAME
    assert max(peak_inflight(plan)) <= (shape.memory_limit or shape.num_microbatches)


@given(shapes)
def test_the_reported_makespan_is_the_simulated_one_and_not_below_the_bound(shape: Shape) -> None:
    plan = searched(shape)
    assert lower_bound(shape) <= makespan(plan, shape.costs)
    assert excess_of(plan, shape) == pytest.approx(makespan(plan, shape.costs) / lower_bound(shape) - 1)


@given(shapes, st.builds(Choices, st.booleans(), st.booleans(), st.booleans()))
def test_a_draft_has_the_clocks_the_waiting_and_the_memory_that_the_simulator_gives_its_orders(
    shape: Shape, choices: Choices
) -> None:
    costs = simulated_costs(shape.costs, shape.pp)
    for draft in (run_heuristic(shape, choices), list_schedule(shape, weight_waits=choices.overfill)):
        plan = make_plan(NAME, ([Action(kind, rank, mb) for kind, mb in row] for rank, row in enumerate(draft.rows)))
        ranks = simulate(plan, costs).ranks
        assert draft.clock == [rank.timeline[-1].end for rank in ranks]
        assert draft.wait_time == [rank.inner_bubble_ns for rank in ranks]
        assert draft.longest_rank == max(rank.inner_bubble_ns + rank.compute_ns for rank in ranks)
        assert draft.peak_in_flight == max(rank.peak_inflight_microbatches for rank in ranks)


def random_shape(seed: int) -> Shape:
    chance = random.Random(seed)
    p, m = chance.randint(1, 6), chance.randint(1, 12)
    costs = OpCosts(*(chance.randint(1, 9) for _ in range(3)), chance.choice([0, 0, 1, 3, 12]))
    if seed % 2:
        costs = replace(
            costs, of_ranks=tuple((chance.randint(1, 9), chance.randint(1, 9), chance.randint(1, 9)) for _ in range(p))
        )
    return Shape(p, m, memory_limit=chance.choice([None, *range(1, 13)]), costs=costs)


def on_its_own(shape: Shape, choices: Choices) -> Heuristic:
    p, m, c = shape.pp, shape.num_microbatches, shape.costs
    forward, input_grad, weight_grad = zip(*c.by_rank(p), strict=True)
    sizes = p, m, forward, input_grad, weight_grad, c.p2p, shape.memory_limit or m
    return Heuristic(*sizes, choices.overfill, choices.backward_first, choices.fill_short_gaps)


def letters(plan_rows: Sequence[Sequence[tuple[Kind, int]]]) -> list[str]:
    return ["".join(str(kind) for kind, _ in row) for row in plan_rows]


ALL_CHOICES = [Choices(*switches) for switches in product((False, True), repeat=3)]


@pytest.mark.parametrize("choices", ALL_CHOICES, ids=str)
def test_every_draft_is_that_of_the_heuristic_of_the_paper(choices: Choices) -> None:
    for seed in range(80):
        shape = random_shape(seed)
        draft = run_heuristic(shape, choices)
        assert letters(draft.rows) == on_its_own(shape, choices).run(), shape
        listed = list_schedule(shape, weight_waits=choices.overfill)
        assert letters(listed.rows) == list_orders(on_its_own(shape, choices), choices.overfill), shape
        for row in (*draft.rows, *listed.rows):
            numbers = {kind: [mb for of_row, mb in row if of_row is kind] for kind in (Kind.F, Kind.I, Kind.W)}
            assert set(map(tuple, numbers.values())) == {tuple(range(shape.num_microbatches))}


def test_the_plan_is_the_shortest_candidate_and_of_those_the_one_of_least_time_on_a_rank_and_then_least_memory() -> (
    None
):
    """Those of the heuristic before those of the list scheduler; ZB-H1 and then ZB-H2 where they are shorter and fit."""
    for seed in range(40):
        shape = random_shape(seed)
        p, m, limit = shape.pp, shape.num_microbatches, shape.memory_limit or shape.num_microbatches
        drafts = [run_heuristic(shape, choices) for choices in reversed(ALL_CHOICES)]
        drafts += [list_schedule(shape, weight_waits) for weight_waits in (True, False)]
        rows = [[[Action(k, rank, mb) for k, mb in row] for rank, row in enumerate(d.rows)] for d in drafts]
        candidates = [make_plan(NAME, of_draft) for of_draft in rows]
        keys = []
        for plan in candidates:
            ranks = simulate(plan, simulated_costs(shape.costs, p)).ranks
            longest = max(rank.timeline[-1].end - rank.timeline[0].start for rank in ranks)
            keys.append((makespan(plan, shape.costs), longest, max(peak_inflight(plan))))
        best = candidates[keys.index(min(keys))]
        for name, held in (("zb-h1", p), ("zb-h2", 2 * p - 1)):
            handmade = build(name, p, m)
            if min(held, m) <= limit and makespan(handmade, shape.costs) < makespan(best, shape.costs):
                best = handmade
        values = [[str(action) for action in row] for row in searched(shape).ranks]
        assert values == [[str(action) for action in row] for row in best.ranks], shape


@given(shapes)
def test_a_fixed_schedule_that_fits_is_no_shorter_and_not_below_the_bound(shape: Shape) -> None:
    p, m, limit = shape.pp, shape.num_microbatches, shape.memory_limit or shape.num_microbatches
    plan = searched(shape)
    for name, held in (("zb-h1", p), ("zb-h2", 2 * p - 1)):
        if min(held, m) <= limit:
            fixed = makespan(build(name, p, m), shape.costs)
            assert fixed >= max(makespan(plan, shape.costs), lower_bound(shape))


def test_with_equal_costs_and_the_memory_of_1f1b_or_more_it_reaches_the_bound() -> None:
    for p in range(1, 7):
        for m in (p, p + 1, 2 * p, 4 * p):
            for limit in (p, 2 * p - 1, None):
                shape = Shape(p, m, memory_limit=limit)
                assert excess_of(searched(shape), shape) == 0, shape
                assert lower_bound(shape) == 3 * m + p - 1


def test_with_equal_costs_and_the_memory_of_h2_no_rank_waits_between_its_actions() -> None:
    for p, m in [(2, 4), (3, 6), (4, 8), (4, 20), (8, 24)]:
        plan = build(NAME, p, m, memory_limit=2 * p - 1)
        kinds = {Kind.F: 1, Kind.I: 1, Kind.W: 1}
        assert [rank.inner_bubble_ns for rank in simulate(plan, Costs(kinds)).ranks] == [0] * p


def test_the_lower_bound_by_hand() -> None:
    """p=2, m=2, F=3, I=2, W=1, message 1.

    Rank 1 starts at 4 and has 12 to do: 16. Rank 0: two F's until 6, the first I not before 3+1+3+2+1 = 10, then I I W W: 16.
    Rank 1's last I at the earliest at 4 + 6 + 4 = 14, a message, an I and a W on rank 0: 18.
    """
    assert lower_bound(Shape(2, 2, costs=OpCosts(3, 2, 1, 1))) == 18
    one_held = Shape(2, 2, costs=OpCosts(3, 2, 1, 1), memory_limit=1)
    assert lower_bound(one_held) == 26, "F 3, there 1, F 3, I 2, back 1, I 2, W 1: 13 for each, one after the other"


def test_the_lower_bound_is_that_of_every_rank_and_of_memory() -> None:
    """Each rank's own work behind the warmup; its last I, the way up and a W; or the time that a microbatch fills memory."""
    for seed in range(60):
        shape = random_shape(seed)
        p, m, c = shape.pp, shape.num_microbatches, shape.costs
        held = shape.memory_limit or m
        bounds = []
        f, i, w = zip(*(c.of_ranks or [(c.forward, c.input_grad, c.weight_grad)] * p), strict=True)
        for r in range(p):
            reached = sum(f[:r]) + r * c.p2p
            first_gradient = sum(f) + (p - 1) * c.p2p + sum(i[r + 1 :]) + (p - 1 - r) * c.p2p
            early = min(m, held)
            forwards = max(reached + early * f[r], first_gradient) + (m - early) * f[r]
            bounds += [forwards + m * i[r] + max(m * w[r], sum(i[:r]) + r * c.p2p + w[0])]
            one = sum(f[r:]) + sum(i[r:]) + 2 * (p - 1 - r) * c.p2p + w[r]
            bounds += [reached + math.ceil(m * one / held)]
        assert lower_bound(shape) == max(bounds)


def test_negative_costs_are_refused() -> None:
    with pytest.raises(ShapeError, match="negative cost"):
        OpCosts(1, -1, 1)
    with pytest.raises(ShapeError, match="negative cost"):
        OpCosts(of_ranks=((1, 1, 1), (1, 1, -1)))
    with pytest.raises(ShapeError, match="costs of 2 ranks; expected 3"):
        searched(Shape(3, 4, costs=OpCosts(of_ranks=((1, 1, 1), (1, 1, 1)))))
    assert OpCosts(0, 0, 0, 0).p2p == 0, "free ops are allowed"


def test_a_shape_has_ten_million_forwards_at_most() -> None:
    assert Shape(1_000, 5_000, 2).pp == 1_000
    with pytest.raises(ShapeError, match="are 10,002,000 forwards; expected at most 10,000,000"):
        Shape(1_000, 5_001, 2)


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        (Shape(8, 24, memory_limit=6), 89),  # a list scheduler's, found by an independent program
        (Shape(4, 8, memory_limit=2), 41),
        (Shape(4, 8, memory_limit=1), 72),  # one microbatch at a time: 9 each
    ],
)
def test_little_memory_is_no_excuse_for_a_long_step(shape: Shape, most: int) -> None:
    assert makespan(searched(shape), shape.costs) <= most
