"""Shares of causes: Shapley values in integers, which do not depend on an order and sum to the whole."""

from __future__ import annotations

from functools import cache
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.analysis.explain.causes import HOST, INNER, MESSAGES, ROUTING, Costs, apportion, shapley_values
from pptrace.analysis.explain.explain import _proportional
from pptrace.model.tables import Int64
from pptrace.schedule.registry import build
from pptrace.workflow.analyse import analyse
from tests.support.extent import ALL
from tests.support.synthetic import record

TABLE = build("1f1b", 3, 4).table


def random_costs(seed: int) -> Costs:
    rng = np.random.default_rng(seed)

    def times(high: int, columns: int = len(TABLE)) -> Int64:
        return rng.integers(0, high, (2, columns))

    of_kind = 100 + times(1) + 100 * (TABLE.kind == TABLE.kind.max())
    of_stage = of_kind + 20 * TABLE.stage
    of_rank = of_stage + np.where(TABLE.rank == 1, 60, 0)
    own = of_rank + times(50)
    added = (times(20), times(30, TABLE.num_messages), times(15), times(1 if seed == 2 else 25))
    late = times(30) if seed == 2 else None  # of ranks without a device
    return Costs(own, of_rank, of_stage, of_kind, *added, routing=times(20 if seed == 1 else 1), late=late)


@pytest.mark.parametrize("seed", range(4) if ALL else (1, 2))
def test_a_share_is_the_mean_over_all_orders_of_what_the_cause_adds(seed: int) -> None:
    costs = random_costs(seed)
    of_experts = {ROUTING} if seed == 1 else set()
    assert set(costs.players) == {"imbalance", "straggler", "jitter", MESSAGES, INNER, HOST, *of_experts}
    shares = shapley_values(costs, TABLE)
    orders, makespans = list(permutations(costs.players)), cache(lambda present: costs.makespans(present, TABLE))
    for player in costs.players:
        added = np.zeros(2)
        for order in orders:
            before = frozenset(order[: order.index(player)])
            added += makespans(before | {player}) - makespans(before)
        assert np.abs(shares.added[player] - added / len(orders)).max() < 1
    assert (sum(shares.added.values()) == shares.with_all - shares.without).all()
    assert (shares.with_all == costs.makespans(frozenset(costs.players), TABLE)).all()


def test_with_all_causes_ops_cost_what_they_cost_and_with_none_what_their_kind_does() -> None:
    costs = random_costs(0)
    assert (costs._computing(frozenset(costs.players)) == costs.own).all()
    assert (costs._computing(frozenset()) == costs.of_kind).all()
    assert (costs._computing(frozenset({"imbalance"})) == costs.of_stage).all()
    assert (costs._computing(frozenset({"imbalance", "straggler"})) == costs.of_rank).all()


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=6), st.integers(1, 720))
def test_rounded_parts_keep_their_sum(parts: list[int], divisor: int) -> None:
    parts[-1] += -sum(parts) % divisor  # a whole number in all
    rounded = apportion(np.array(parts)[:, np.newaxis], divisor)[:, 0]
    assert rounded.sum() * divisor == sum(parts)
    assert all(abs(value - part / divisor) < 1 for value, part in zip(rounded.tolist(), parts, strict=True))


@given(st.integers(-(10**12), 10**12), st.lists(st.integers(1, 10**12), min_size=1, max_size=8))
def test_parts_in_proportion_keep_their_sum(ns: int, weights: list[int]) -> None:
    parts = _proportional(ns, weights)
    assert sum(parts) == ns
    assert all(abs(part - ns * weight / sum(weights)) <= 1 for part, weight in zip(parts, weights, strict=True))


def causes_of(cost: object, dp: int = 1, latency: int = 0) -> dict[tuple[str, str], int]:
    """The causes of the first step, by name and place; they sum to what is beyond the ideal."""
    step = analyse(record(build("1f1b", 4, 16), cost, latency=latency, dp=dp).traces()).report.steps[0]  # type: ignore[arg-type]
    assert step.causes is not None
    assert step.span_ns is not None
    assert step.ideal_ns is not None
    assert sum(cause.ns for cause in step.causes) == step.span_ns - step.ideal_ns
    return {(cause.cause, str(dict(cause.where))): cause.ns for cause in step.causes}


def test_a_run_as_planned_has_no_cause_but_the_schedule() -> None:
    causes = causes_of(None)
    assert {name for (name, _), ns in causes.items() if ns} == {"structural"}
    # 1F1B: the fill and drain take p − 1 = 3 forwards of 100 ns and backwards of 200.
    assert causes["structural", "{}"] == 900


def test_a_heavy_stage_is_an_imbalance_of_that_stage() -> None:
    causes = causes_of(lambda action: 300 if action.stage == 2 else 100)
    assert max(causes, key=causes.__getitem__) == ("imbalance", "{'stage': 2}")
    assert not [ns for (name, _), ns in causes.items() if name == "straggler" and ns]
