"""Faults on paper: the first finding names each, once, and its gain is that of a run without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding
from pptrace.analysis.stragglers.reason import Reason
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import build
from tests.analysis.stragglers.test_reasons import DP, OP_NS, STEPS, findings_of, real_gain, report_of, usual
from tests.support.analysed import analyse
from tests.support.synthetic import record


def delays_of(table: PlanTable) -> Int64:
    return np.zeros((STEPS, DP, len(table)), dtype=np.int64)


Only = Callable[..., tuple[Finding, Report]]


@pytest.fixture
def only_finding(tmp_path: Path, table: PlanTable, healthy: Report) -> Only:
    """The single finding of a run of some durations and delays, whose gain is what it really is longer than a healthy one."""

    def find(durations: Int64 | None = None, delays: Int64 | None = None) -> tuple[Finding, Report]:
        report = report_of(tmp_path / "run", table, usual(table) if durations is None else durations, delays=delays)
        (finding,) = findings_of(report)
        assert finding.gain_ns == pytest.approx(real_gain(report, healthy), rel=0.1)
        return finding, report

    return find


def test_the_gain_of_a_slow_stage_is_that_of_a_stage_like_the_others(only_finding: Only, table: PlanTable) -> None:
    durations = usual(table)
    durations[:, :, table.stage == 1] = durations[:, :, table.stage == 1] * 3 // 2
    finding, _ = only_finding(durations)
    assert (finding.evidence["cause"], finding.evidence["where"]) == ("imbalance", {"stage": 1})
    assert 0 < finding.evidence["gain_if_spread_ns"] < (finding.gain_ns or 0)


@pytest.mark.parametrize(("name", "pp"), [("zbv", 2), ("interleaved-1f1b", 4), ("interleaved-zb", 2)])
def test_a_rank_of_which_each_stage_takes_longer_is_slow_and_not_its_stages_heavy(name: str, pp: int) -> None:
    plan = build(name, pp, 8)
    of_rank = [stage for stage, rank in enumerate(plan.placement) if rank == 1]

    def report_with(slow: list[int]) -> Report:
        def cost(action: Action) -> int:
            return (300 if action.stage in slow else 200) * (2 if action.kind is Kind.B else 1)

        return analyse(record(plan, cost, 5, steps=STEPS).traces()).report

    slow, clean, heavy = (report_with(stages) for stages in (of_rank, [], of_rank[:1]))
    finding = slow.findings[0]
    assert (finding.evidence["reason"], finding.evidence["where"]) == ("slow rank", {"rank": 1})
    assert finding.evidence["times_usual"] == pytest.approx(1.5)
    assert finding.gain_ns == pytest.approx((slow.steps[0].span_ns or 0) - (clean.steps[0].span_ns or 0), rel=0.02)
    assert "imbalance" not in {one.evidence.get("cause") for one in slow.findings[1:]}
    assert "rank 1 computes longer" in slow.verdict
    assert heavy.findings[0].evidence["where"] == {"stage": of_rank[0]}
    assert {one.evidence.get("reason") for one in (*clean.findings, *heavy.findings)} == {None}
    lacking = [("straggler",) in {kinds.findings for kinds in one.missing_evidence} for one in (slow, clean, heavy)]
    assert lacking == [False, True, True], "what was found is not listed as impossible to find"


def test_a_rank_with_a_heavy_stage_beside_unlike_stages_of_another_is_no_slow_one() -> None:
    """Stages 1 and 3 are rank 1's; stage 2 of rank 0 takes longer than stage 1, and stage 0, of one layer, the least."""
    plan, costs = build("interleaved-1f1b", 2, 8), (26, 62, 66, 73)
    report = analyse(record(plan, lambda action: costs[action.stage], 5, steps=STEPS).traces()).report
    assert "slow rank" not in {one.evidence.get("reason") for one in report.findings}


def test_single_long_ops_are_named_and_not_the_ops_that_vary_as_all_do(only_finding: Only, table: PlanTable) -> None:
    durations = usual(table)
    is_long = np.random.default_rng(3).random(durations.shape) < 0.02
    finding, _ = only_finding(np.where(is_long, 5 * durations, durations))
    assert (finding.evidence["cause"], finding.evidence["reason"]) == ("jitter", "long ops")
    assert finding.evidence["num_ops"] == is_long.sum()
    assert finding.evidence["times_usual"] == pytest.approx(5, rel=0.01)


def test_a_rank_that_comes_late_into_every_step_is_named(only_finding: Only, table: PlanTable) -> None:
    delays = delays_of(table)
    delays[:, :, (table.rank == 2) & (table.position == 0)] = 12 * OP_NS
    one = delays.copy()
    one[:, 1:] = 0
    finding, _ = only_finding(delays=one)
    assert (finding.evidence["cause"], finding.evidence["reason"]) == ("host", "late start")
    assert finding.evidence["where"] == {"rank": 2 * DP}
    several, _ = only_finding(delays=delays)
    assert several.evidence["where"] == {}


def test_a_rank_with_time_between_all_its_ops_is_named(only_finding: Only, table: PlanTable) -> None:
    delays = delays_of(table)
    delays[:, 1, table.rank == 1] = OP_NS // 2
    finding, report = only_finding(delays=delays)
    assert (finding.evidence["cause"], finding.evidence["where"]) == ("host", {"rank": DP + 1})
    assert finding.evidence["reason"] == "late launches"
    assert "ops of one rank that begin late (rank 4)" in report.verdict
    delays[:] = OP_NS // 2
    everywhere, _ = only_finding(delays=delays)
    assert everywhere.evidence["where"] == {}


def test_a_pause_before_the_same_op_of_half_of_the_steps_is_a_pause(only_finding: Only, table: PlanTable) -> None:
    delays = delays_of(table)
    delays[: STEPS // 2, 0, (table.rank == 2) & (table.position == 3)] = 4 * OP_NS
    finding, _ = only_finding(delays=delays)
    assert (finding.evidence["reason"], finding.evidence["where"]) == ("pauses", {"rank": 2 * DP})


def test_steps_that_are_long_for_pauses_are_no_outliers_besides(tmp_path: Path, table: PlanTable) -> None:
    delays = delays_of(table)
    for step in range(STEPS):
        delays[step, 0, (table.rank == 1) & (table.position == 4 + step)] = (30 if step == 3 else 3) * OP_NS
    report = report_of(tmp_path / "run", table, usual(table), delays=delays)
    assert {outlier.step for outlier in report.step_series.outliers} == {3}
    (finding,) = findings_of(report)
    assert finding.evidence["reason"] == "pauses"


def test_gains_of_one_step_alone_are_no_finding() -> None:
    def reason_with(*gains: int) -> Reason:
        return Reason("pauses", ("host",), {}, "", "", np.array(gains, dtype=np.int64))

    assert reason_with(*[40] * 10).is_finding(1000)
    assert not reason_with(*[19] * 10).is_finding(1000)
    assert not reason_with(400, *[1] * 9).is_finding(1000)
    assert reason_with(100, 1, 1, 1).is_finding(1000)  # too few steps to tell
