"""Parts of causes: what a step would be shorter by without each of them, and what only several of them add."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.analysis.explain.causes import (
    HOST,
    INNER,
    MESSAGES,
    ROUTING,
    CauseCosts,
    in_proportion,
    parts_of_causes,
)
from pptrace.analysis.whole_run import INTERACTION
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.registry import build
from tests.analysis.explain.op_by_op import costs_by_cause
from tests.support.analysed import analyse
from tests.support.extent import ALL
from tests.support.parts import by_cause
from tests.support.synthetic import record, run_on_paper

TABLE = build("1f1b", 3, 4).table


def random_costs(seed: int) -> CauseCosts:
    rng = np.random.default_rng(seed)

    def times(high: int, columns: int = len(TABLE)) -> Int64:
        return rng.integers(0, high, (2, columns))

    of_kind = 100 + times(1) + 100 * (TABLE.kind == TABLE.kind.max())
    of_stage = of_kind + 20 * TABLE.stage
    of_rank = of_stage + np.where(TABLE.rank == 1, 60, 0)
    own = of_rank + times(50)
    added = (times(20), times(30, TABLE.num_messages), times(15), times(1 if seed == 2 else 25))
    late = times(30) if seed == 2 else None  # of ranks without a device
    return costs_by_cause(TABLE, (of_kind, of_stage, of_rank, own), *added, times(20 if seed == 1 else 1), late)


@pytest.mark.parametrize("seed", range(4) if ALL else (1, 2))
def test_a_part_is_what_the_cause_adds_to_all_others_and_the_interaction_is_the_rest(seed: int) -> None:
    costs = random_costs(seed)
    of_experts = {ROUTING} if seed == 1 else set()
    assert set(costs.players) == {"imbalance", "straggler", "jitter", MESSAGES, INNER, HOST, *of_experts}
    (added, without, with_all), every = parts_of_causes(costs), frozenset(costs.players)
    for player in every:
        shorter = costs.makespans(every) - costs.makespans(every - {player})
        assert added[player].tolist() == np.maximum(shorter, 0).tolist()
    assert (with_all == costs.makespans(every)).all()
    assert (without == costs.makespans(frozenset())).all()
    assert (sum(added.values()) == with_all - without).all()


def test_of_two_causes_that_hide_each_other_neither_alone_gets_anything_back() -> None:
    """F1 on stage 1 waits for F0 there and for F1 on stage 0, side by side: either one long is enough."""
    table = build("gpipe", 2, 2).table
    usual = np.full((1, len(table)), 100)
    long = np.zeros_like(usual)
    for stage, microbatch in ((0, 1), (1, 0)):
        long[0, (table.stage == stage) & (table.kind == Kind.F.code) & (table.microbatch == microbatch)] = 50
    first, second = (np.where(table.stage == stage, long, 0) for stage in (0, 1))
    zeros, none = np.zeros_like(usual), np.zeros((1, table.num_messages), dtype=np.int64)
    levels = (usual, usual, usual, usual + first)  # one varies, the other's host is late
    added, *_ = parts_of_causes(costs_by_cause(table, levels, zeros, none, zeros, second, zeros))
    assert {name: ns.tolist() for name, ns in added.items()} == {"jitter": [0], HOST: [0], INTERACTION: [50]}


@given(st.integers(-(10**12), 10**12), st.lists(st.integers(1, 10**12), min_size=1, max_size=8))
def test_parts_in_proportion_keep_their_sum(ns: int, weights: list[int]) -> None:
    parts = in_proportion(ns, weights)
    assert sum(parts) == ns
    assert all(abs(part - ns * weight / sum(weights)) <= 1 for part, weight in zip(parts, weights, strict=True))


@pytest.mark.parametrize("late_ns", [0, 500, 5000])
def test_one_late_op_of_the_embedding_alone_hides_no_imbalance(late_ns: int) -> None:
    """Imbalance is what the step loses to layers on two of four stages, and the late op what it is late by."""
    plan, usual = build("1f1b", 4, 8), {0: 50, 1: 10_000, 2: 10_000, 3: 50}

    def cost(action: Action, stages: dict[int, int] = usual) -> int:
        is_late = (action.stage, action.kind, action.microbatch) == (0, Kind.F, 0)
        return stages[action.stage] * (2 if action.kind is Kind.B else 1) + late_ns * is_late

    step = analyse(record(plan, cost, steps=2).traces()).report.steps[0]
    parts = by_cause(step.causes)
    begin, end = run_on_paper(plan, partial(cost, stages=dict.fromkeys(usual, 5025))).window
    assert step.span_ns - parts["imbalance"] == pytest.approx(end - begin, abs=50)
    assert parts["jitter"] == pytest.approx(late_ns, abs=50)
    assert abs(parts["interaction"]) <= 50
