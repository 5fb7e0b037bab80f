"""The rank that others wait for in each step: closed forms, sums, and a reference in plain loops on random exchanges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from pptrace.analysis.experts.answer import ExpertsOfRun, report_experts
from pptrace.analysis.experts.turns import with_model_stages
from pptrace.analysis.experts.types import ExpertStep
from pptrace.analysis.experts.waits import Waits, expert_steps
from pptrace.slices import Slice
from tests.analysis.experts.on_paper import Call, exchanges_of_all, random_calls
from tests.analysis.experts.test_experts import HOT, ROW_NS, Experts, experts_of

GROUPS = ((0, 3, 4), (1, 2), (5, 6, 7, 8))


def by_loops(calls: Sequence[Call], step: int) -> tuple[int, int | None, int | None, float | None]:
    """(waits, late rank, what the others waited for it, rows of ranks max / mean) of a step, call by call."""
    waits, caused, ratios = 0, Counter[int](), []
    for call in calls:
        if call.step != step:
            continue
        for enters in call.enters.tolist():
            for at in enters:
                waits += max(enters) - at
            caused[call.ranks[enters.index(max(enters))]] += sum(max(enters) - at for at in enters)
        received = call.rows.sum(axis=0).tolist()
        if sum(received):
            ratios.append(max(received) * len(received) / sum(received))
    late = min(caused, key=lambda rank: (-caused[rank], rank))
    ratio = sum(ratios) / len(ratios) if ratios else None
    return (waits, late, caused[late], ratio) if caused[late] else (waits, None, None, ratio)


@pytest.mark.parametrize("seed", range(8))
def test_steps_are_those_of_a_reference_in_plain_loops(seed: int) -> None:
    calls = random_calls(seed, GROUPS)
    steps = expert_steps(Waits(exchanges_of_all(calls)))
    assert [step.step for step in steps] == [0, 1, 2, 3]
    for step in steps:
        waits, late, late_ns, ratio = by_loops(calls, step.step)
        assert (step.wait_ns, step.late_rank, step.late_ns) == (waits, late, late_ns)
        assert step.late_share == pytest.approx((late_ns or 0) / waits)
        assert step.rank_ratio == pytest.approx(ratio)


def test_the_order_of_exchanges_changes_nothing() -> None:
    exchanges = exchanges_of_all(random_calls(3, GROUPS))
    order = np.random.default_rng(0).permutation(len(exchanges))
    mixed = Slice({name: exchanges[name][order] for name in exchanges.columns})
    for step, other in zip(expert_steps(Waits(exchanges)), expert_steps(Waits(mixed)), strict=True):
        assert structs.replace(other, rank_ratio=None) == structs.replace(step, rank_ratio=None)
        assert other.rank_ratio == pytest.approx(step.rank_ratio)


@pytest.mark.parametrize("run", [HOT, Experts(slow=2.0), Experts(late=5_000), replace(HOT, again=True)])
def test_waits_of_steps_sum_to_those_of_calls(run: Experts) -> None:
    experts = experts_of(run)
    assert len(experts.steps) == run.steps
    assert sum(step.wait_ns or 0 for step in experts.steps) == sum(call.wait_ns or 0 for call in experts.calls) > 0
    assert sum(step.late_ns or 0 for step in experts.steps) == max(
        (rank.caused_before_ns or 0) + (rank.caused_after_ns or 0) for rank in experts.ranks
    )


def test_a_step_says_who_is_late_and_why() -> None:
    beyond = sum(2 * (rows - 60) for of in HOT.rows for rows in of)
    hot = (0, (ROW_NS["F"] + ROW_NS["B"]) * beyond, "rows")
    slow = (1, 3 * 2 * 60 * (ROW_NS["F"] + ROW_NS["B"]), "slow")
    late = (1, 5_000 * 2 * 2 * 3, "before")
    for run, expected in ((HOT, hot), (Experts(slow=2.0), slow), (Experts(late=5_000), late)):
        steps = experts_of(run).steps
        assert {(step.late_rank, step.late_ns, step.reason) for step in steps} == {expected}
        assert {(step.wait_ns, step.late_share) for step in steps} == {(expected[1], 1.0)}
    ratio = sum(rows / 60 for of in HOT.rows for rows in of) / 6
    assert [step.rank_ratio for step in experts_of(HOT).steps] == pytest.approx([ratio] * 3)


def test_in_steps_in_which_all_come_together_nobody_is_late() -> None:
    assert {step.wait_ns for step in experts_of(Experts()).steps} == {0}
    assert {(step.late_rank, step.late_ns, step.late_share, step.reason) for step in experts_of(Experts()).steps} == {
        (None, None, None, None)
    }


def test_a_rank_that_is_slow_in_one_step_is_slow_there() -> None:
    """Of three steps with equal rows rank 1 takes three times as long in the second one."""
    rows = np.full((2, 2), 10)
    calls = [
        Call(step, (0, 1), np.array([[0, 0], [300 + at, (900 if step == 1 else 301) - at]]), rows)
        for step in range(3)
        for at in range(2)
    ]
    steps = expert_steps(Waits(exchanges_of_all(calls)))
    assert [(step.late_rank, step.reason) for step in steps if step.step == 1] == [(1, "slow")]
    assert {step.reason for step in steps if step.step != 1} == {None}


def test_a_rank_that_is_late_no_more_than_by_chance_has_no_reason() -> None:
    rows = np.array([[5, 5], [5, 5]])
    enters = np.array([[[10, 0], [20, 20]], [[0, 9], [20, 20]]])
    (step,) = expert_steps(Waits(exchanges_of_all([Call(0, (0, 1), each, rows) for each in enters])))
    assert (step.wait_ns, step.late_rank, step.late_ns, step.reason) == (19, 0, 10, None)
    (step,) = expert_steps(Waits(exchanges_of_all([Call(0, (0, 1), enters[0], rows)])))
    assert (step.late_rank, step.reason) == (0, "before")


def test_who_comes_last_is_known_where_each_member_names_another_layer() -> None:
    """As where an op of one rank is missing: its calls stand in a line of their own."""
    rows = np.array([[1, 3], [1, 3]])
    calls = [Call(0, (0, 1), np.array([[0, 0], [20 + at, 40]]), rows) for at in (0, 5, 30)]
    exchanges = exchanges_of_all(calls)
    columns = {**exchanges.columns, "layer": exchanges["rank"]}
    part = report_experts(ExpertsOfRun(with_model_stages(Slice(columns), None), {}), (), {})
    combines = [(call.last_rank, call.last_share, call.last_reason) for call in part.calls if call.role == "combine"]
    assert combines == [(0, pytest.approx(1 / 3), None), (1, pytest.approx(2 / 3), None)]


def test_waits_are_those_of_whole_calls_where_members_name_other_layers() -> None:
    exchanges = exchanges_of_all(random_calls(2, ((0, 1, 2, 3),)))
    layer = np.where(exchanges["rank"] < 2, 0, 1)
    part = report_experts(
        ExpertsOfRun(with_model_stages(Slice({**exchanges.columns, "layer": layer}), None), {}), (), {}
    )
    waits = [step.wait_ns for step in expert_steps(Waits(exchanges))]
    assert [step.wait_ns for step in part.steps] == waits
    assert sum(call.wait_ns or 0 for call in part.calls) == sum(wait or 0 for wait in waits)


def test_steps_without_matched_calls_or_without_any_have_no_waits() -> None:
    exchanges = exchanges_of_all(random_calls(1, GROUPS, steps=2))
    unmatched = exchanges["step"] == 1
    one = Slice({**exchanges.columns, "out_match": np.where(unmatched, -1, exchanges["out_match"])})
    first, second, third = expert_steps(Waits(one), [0, 1, 7])
    assert first == expert_steps(Waits(exchanges))[0]
    assert second == ExpertStep(1, None, None, None, None, None, None)
    assert third == ExpertStep(7, None, None, None, None, None, None)
    no_step = Slice({**exchanges.columns, "step": np.full(len(exchanges), -1)})
    assert expert_steps(Waits(no_step)) == ()
