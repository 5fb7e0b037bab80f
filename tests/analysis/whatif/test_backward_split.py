"""Costs of splitting a backward into I and W: ends of intervals in closed forms, and only where a plan splits or merges."""

from __future__ import annotations

import random
from math import ceil, floor

import numpy as np
import pytest

from pptrace.analysis.whatif import predict as predicting
from pptrace.analysis.whatif.change import Change, plan_of
from pptrace.analysis.whatif.predict import Baseline, Prediction, identity_map, predict
from pptrace.analysis.whatif.recompute import SPLIT_COST, parts_of_whole, whole_backwards
from pptrace.analysis.whatif.replay import Target, _Builder, replay, splits_otherwise
from pptrace.analysis.whatif.stage_costs import Assumed, StageCosts, stage_costs, with_assumed
from pptrace.analysis.whatif.stage_map import stage_map
from pptrace.analysis.whatif.study import Study
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from tests.analysis.whatif.random_costs import PLANS, random_costs
from tests.support.extent import ALL
from tests.support.measured import measured_costs

F_NS, B_NS, STEPS, MICROBATCHES = 100_000, 300_000, 5, 6
BETWEEN_RUNS = 0.015
MOST_FIXED = 0.06


def costs_on_paper(plan: Plan, splitting: float = 1.0) -> StageCosts:
    """Steps of equal ops, of which an I and a W are half of a B, times what splitting costs."""
    lengths = {Kind.F: F_NS, Kind.B: B_NS} | dict.fromkeys((Kind.I, Kind.W), round(B_NS / 2 * splitting))
    of_rows = np.array([lengths[list(Kind)[kind]] for kind in plan.table.kind])
    return stage_costs(plan, measured_costs(plan.table, np.tile(of_rows, (STEPS, 1, 1)), 0), None)


def predicted(costs: StageCosts, schedule: str) -> Prediction:
    measured = replay(costs, Target(costs.plan, identity_map(costs))).spans
    change = Change(schedule=schedule)
    return predict(Baseline(costs, measured), change, plan_of(change, costs.plan.name, costs))


def alone(name: str) -> Plan:
    """One rank, whose step is the sum of its ops whatever their order."""
    return build(name, 1, MICROBATCHES).compute_only()


def mixed(pp: int = 1) -> Plan:
    """Every second backward is split."""
    every = [
        [
            *(Action(Kind.F, rank, number) for number in range(MICROBATCHES)),
            *(
                Action(kind, rank, number)
                for number in range(MICROBATCHES)
                for kind in ((Kind.I, Kind.W) if number % 2 else (Kind.B,))
            ),
        ]
        for rank in range(pp)
    ]
    return Plan("custom", MICROBATCHES, tuple(range(pp)), tuple(map(tuple, every)))


@pytest.mark.parametrize("cost", [0.0, 0.03, 0.08, 0.5])
def test_split_backwards_of_whole_ones_may_take_longer_and_merged_ones_of_split_ones_less(
    monkeypatch: pytest.MonkeyPatch, cost: float
) -> None:
    """The step of one rank is m·(f + b). What ops cost whatever they do, 6 % of a B, is a cost of splitting too: the interval has
    the larger of both and not their sum.
    """
    monkeypatch.setattr(predicting, "SPLIT_COST", cost)
    split = predicted(costs_on_paper(alone("1f1b")), "zb-h1")
    assert split.span == MICROBATCHES * (F_NS + B_NS)
    assert split.low == floor(split.span * (1 - BETWEEN_RUNS))
    most = MICROBATCHES * (F_NS + B_NS * (1 + max(cost, MOST_FIXED)))
    assert split.high == pytest.approx(ceil(most * (1 + BETWEEN_RUNS)), abs=1)
    merged = predicted(costs_on_paper(alone("zb-h1")), "1f1b")
    assert merged.span == split.span
    assert merged.high == ceil(merged.span * (1 + BETWEEN_RUNS))
    least = MICROBATCHES * (F_NS + B_NS * min(1 / (1 + cost), 1 - MOST_FIXED / 2))
    assert merged.low == pytest.approx(floor(least * (1 - BETWEEN_RUNS)), abs=1)


@pytest.mark.parametrize("seed", range(6 if ALL else 3))
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("1f1b", "1f1b"),
        ("1f1b", "gpipe"),
        ("1f1b", "interleaved-1f1b"),
        ("zb-h1", "zb-h1"),
        ("zb-h1", "zb-h2"),
        ("zb-h1", "zbv"),
        ("dualpipe", "dualpipe"),
    ],
)
def test_a_plan_that_splits_what_was_split_and_no_more_is_predicted_as_ever(
    monkeypatch: pytest.MonkeyPatch, source: str, target: str, seed: int
) -> None:
    plan = build(source, 2, 8).compute_only()
    costs = stage_costs(plan, random_costs(random.Random(seed), plan), None)
    found = predicted(costs, target)
    for cost in (0.0, 0.7):
        monkeypatch.setattr(predicting, "SPLIT_COST", cost)
        assert predicted(costs, target) == found


@pytest.mark.parametrize("seed", range(6 if ALL else 3))
@pytest.mark.parametrize(
    ("source", "target"), [("1f1b", "zb-h1"), ("1f1b", "zbv"), ("1f1b", "v-half"), ("zb-h1", "gpipe")]
)
def test_what_splitting_costs_moves_one_end_of_the_interval(
    monkeypatch: pytest.MonkeyPatch, source: str, target: str, seed: int
) -> None:
    plan = build(source, 2, 8).compute_only()
    costs = stage_costs(plan, random_costs(random.Random(seed), plan), None)
    found = []
    for cost in (0.0, 0.1, 0.2):
        monkeypatch.setattr(predicting, "SPLIT_COST", cost)
        found.append(predicted(costs, target))
    assert len({(one.span, one.bubble_ratio) for one in found}) == 1
    fixed, moving = ("low", "high") if source == "1f1b" else ("high", "low")
    assert len({getattr(one, fixed) for one in found}) == 1
    ends = [getattr(one, moving) for one in found]
    assert ends == sorted(ends, reverse=moving == "low")
    assert ends[0] != ends[2]


def test_rows_take_longer_one_by_one() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        plan = build(*rng.choice(PLANS)).compute_only() if rng.random() < 0.7 else mixed(2)
        costs = stage_costs(plan, random_costs(rng, plan), None)
        other = build("dualpipe", 2, 8).compute_only() if rng.random() < 0.5 else mixed(plan.pp)
        layers = (1,) * costs.num_stages
        even = [costs.num_stages / other.chain_length] * other.chain_length
        stages = stage_map(layers, even, np.zeros((2, 3)))
        usual, longer = (
            _Builder(costs, Target(other, stages, split_cost=cost)).durations(slice(0, 2))[0] for cost in (0.0, 0.25)
        )
        whole = whole_backwards(plan)
        table = other.table
        for row in range(len(table)):
            kind = list(Kind)[table.kind[row]]
            if kind is Kind.F:
                assert (longer[:, row] == usual[:, row]).all()
                continue
            is_pair = kind is Kind.OVERLAP_F_B
            slot = int((table.second_slot if is_pair else table.slot)[row])
            stage, microbatch = divmod(slot // 3, other.num_microbatches)
            source = microbatch * plan.num_microbatches // other.num_microbatches
            share = stages.shares[1][stage % other.chain_length]
            part = sum(share[one] * whole[one, source] for one in range(costs.num_stages)) / share.sum()
            factor = 1 / (1 + 0.25 * (1 - part)) if is_pair or kind is Kind.B else 1 + 0.25 * part
            if is_pair:  # its forward takes what it takes
                assert (
                    (factor * usual[:, row] < longer[:, row]) & (longer[:, row] < usual[:, row]) | (factor == 1)
                ).all()
                continue
            assert longer[:, row] == pytest.approx(factor * usual[:, row])


@pytest.mark.parametrize("splitting", [1.0, 1.05, 0.9])
def test_a_run_that_has_both_tells_what_splitting_costs(splitting: float) -> None:
    costs = costs_on_paper(mixed(), splitting)
    assert costs.split_cost == pytest.approx(splitting - 1)
    split_ns = 2 * round(B_NS / 2 * splitting)

    def step(num_whole: int, whole: float, num_split: int, split: float) -> float:
        return MICROBATCHES * F_NS + num_whole * whole + num_split * split

    half, every = MICROBATCHES // 2, MICROBATCHES
    as_measured = step(half, B_NS, half, split_ns)
    merged, all_split = predicted(costs, "1f1b"), predicted(costs, "zb-h1")
    assert merged.span == all_split.span == as_measured, "backwards are as long as they were"
    ends = sorted((as_measured, step(0, 0, half, split_ns) + half * B_NS * splitting))
    assert all_split.low == pytest.approx(ends[0] * (1 - BETWEEN_RUNS), abs=2)
    assert all_split.high == pytest.approx(ends[1] * (1 + BETWEEN_RUNS), abs=2)
    ends = sorted((as_measured, step(every, B_NS, 0, 0)))
    assert merged.low <= ends[0] * (1 - BETWEEN_RUNS) + 1
    assert merged.high == pytest.approx(ends[1] * (1 + BETWEEN_RUNS), abs=2)


def test_a_stage_that_has_nothing_of_the_measured_ones_has_nothing_to_split() -> None:
    is_whole = np.array([[True, False], [True, True]])
    shares = np.array([[1.0, 0.0], [0.25, 0.75], [0.0, 0.0]])
    assert parts_of_whole(is_whole, shares).tolist() == [[1, 0], [1, 0.75], [1, 0.5]]


def test_a_backward_that_is_merged_in_a_pair_alone_is_merged() -> None:
    costs = costs_on_paper(build("zb-h1", 1, 2).compute_only())
    first, second = (Action(Kind.F, 0, number) for number in range(2))
    pair = Action(Kind.OVERLAP_F_B, 0, 1, parts=(second, Action(Kind.B, 0, 0)))
    rest = (Action(Kind.I, 0, 1), Action(Kind.W, 0, 1))
    for middle, is_otherwise in (((pair,), True), ((second, Action(Kind.I, 0, 0), Action(Kind.W, 0, 0)), False)):
        plan = Plan("custom", 2, (0,), ((first, *middle, *rest),))
        assert splits_otherwise(costs, Target(plan, identity_map(costs))) is is_otherwise


def test_backwards_in_pairs_tell_nothing_of_what_splitting_costs() -> None:
    for sizes in PLANS:
        plan = build(*sizes).compute_only()
        costs = stage_costs(plan, random_costs(random.Random(1), plan), None)
        assert costs.split_cost is None


def test_the_interval_says_what_it_has_of_splitting() -> None:
    def note(costs: StageCosts, schedule: str) -> str:
        measured = replay(costs, Target(costs.plan, identity_map(costs))).spans
        study = Study(Baseline(costs, measured), costs.plan.name, {}, ())
        return study.scenario(Change(schedule=schedule), schedule).note

    words = "I and W together are taken to take what a B takes (in the interval also {} of that{})"
    assumed = words.format(f"{1 + SPLIT_COST:.2f}", "")
    whole, split = (costs_on_paper(alone(name)) for name in ("1f1b", "zb-h1"))
    assert assumed in note(whole, "zb-h1")
    assert assumed in note(split, "1f1b")
    assert words.format("1.05", ", as those of this run that are not in pairs") in note(
        costs_on_paper(mixed(), 1.05), "zb-h1"
    )
    for costs, schedule in ((whole, "gpipe"), (split, "zb-h2"), (with_assumed(whole, Assumed(fixed=0.1)), "zb-h1")):
        assert "I and W together" not in note(costs, schedule)
