"""Evaluations: the loss that the step after them finds, nothing of the training changed, and no part of a report's steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instrument.models.gpt_config import Recompute
from instrument.pipeline.runtime import forwards_of
from pptrace.schedule.actions import Kind
from pptrace.schedule.lower import lower
from pptrace.schedule.registry import build
from pptrace.sizes.expert_options import ExpertOptions, Scoring
from tests.instrument.models.cases.mixes import STEPS, Mix
from tests.instrument.pipeline.cases.evaluation import evaluate_mixes
from tests.support.pool import Pool

EXPERTS = ExpertOptions(num=4, scoring=Scoring.SIGMOID, bias_rate=0.1)
MIXES = [
    [Mix(pp=2, tp=2, schedule="interleaved-1f1b", sequence=True, ahead=2, recompute=Recompute.FULL)],
    [Mix(pp=2, dp=2, zero=3), Mix(pp=2, dp=2, schedule="zbv", zero=1, overlaps_gathers=True)],
    [Mix(pp=2, dp=2, schedule="dualpipe")],
    [Mix(pp=2, dp=2, ep=2, experts=EXPERTS, schedule="dualpipe-v")],
]


@pytest.mark.parametrize("mixes", MIXES, ids=lambda mixes: mixes[-1].schedule)
def test_an_evaluation_finds_the_loss_of_the_next_step_and_changes_nothing(pool: Pool, mixes: list[Mix]) -> None:
    outcomes = pool.run(evaluate_mixes, mixes, world=4, timeout_s=300)
    for index, mix in enumerate(mixes):
        ranks = [row[index] for row in outcomes]
        assert sum(len(rank.evaluated) == STEPS for rank in ranks) > 0
        for rank in ranks:
            assert rank.evaluated == pytest.approx(rank.trained, abs=1e-9), mix
            assert rank.sums[0] == pytest.approx(rank.sums[1], rel=1e-12), mix
            assert rank.trains
            assert not rank.counted


def test_an_evaluation_has_no_dropout(pool: Pool) -> None:
    mix = Mix(pp=2, tp=2, dropout=0.3)
    with_it, without = (
        [row[0] for row in pool.run(evaluate_mixes, [one], world=4, timeout_s=300)]
        for one in (mix, replace(mix, dropout=0.0))
    )
    for dropping, plain in zip(with_it, without, strict=True):
        assert dropping.evaluated[:1] == pytest.approx(plain.evaluated[:1], abs=1e-9)
        assert not dropping.trained or dropping.trained[0] != pytest.approx(plain.trained[0], abs=1e-6)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "dualpipe", "dualpipe-v", "gpipe"])
def test_the_forwards_of_a_plan_are_all_of_them_in_each_rank_s_order(name: str) -> None:
    plan = lower(build(name, 4, 8))
    forwards = forwards_of(plan)
    for rank in range(plan.pp):
        halves = [half for action in plan.compute_actions(rank) for half in action.halves]
        assert list(forwards.compute_actions(rank)) == [half for half in halves if half.kind is Kind.F]
    messages = [action for row in forwards.ranks for action in row if action.kind.is_p2p]
    assert {action.kind for action in messages} <= {Kind.SEND_F, Kind.RECV_F}
    assert len(messages) == sum(action.kind in (Kind.SEND_F, Kind.RECV_F) for row in plan.ranks for action in row)
