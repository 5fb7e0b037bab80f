"""Outliers and changes in the length of steps: against definitions counted out, and in runs whose lengths are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport
from pptrace.analysis.steps import step_series
from pptrace.analysis.steps.step_series import FEWEST_OF_LEVEL, _far_above, series_of
from pptrace.analysis.whole_run import StepSeries
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import build
from pptrace.schedule.replay_table import replay_table
from pptrace.workflow.load import load
from tests.support.analysed import analyse
from tests.support.replayed import ops_of_steps
from tests.support.synthetic import record

GAP_NS = 1_000
TABLE = build("1f1b", 4, 8).table
USUAL = np.where(TABLE.kind == Kind.F.code, 100_000, 200_000)
ONE_STEP = analyse(record(build("1f1b", 2, 3, 1)).traces()).report


def report_of(tmp_path: Path, durations: Int64, table: PlanTable = TABLE) -> Report:
    """The report of steps whose ops take ``durations`` (steps, rows); replayed, as a table of ops."""
    replay = replay_table(table, durations)
    ops_of_steps(table, replay.start, replay.end, GAP_NS).to_csv(tmp_path / "ops.csv", index=False)
    return load([tmp_path / "ops.csv"]).report


def with_work(times: int) -> StepReport:
    """A step with so many times the forwards."""
    (step,) = ONE_STEP.steps
    ranks = []
    for rank in step.ranks:
        phases = {name: replace(phase, num_forward=times * phase.num_forward) for name, phase in rank.phases.items()}
        ranks.append(replace(rank, phases=phases))
    return replace(step, ranks=tuple(ranks))


def series_with(spans: Int64, work: Sequence[int] | None = None) -> StepSeries:
    """The series of steps of these lengths, ns, with so many times the usual forwards each."""
    steps = map(with_work, [1] * len(spans) if work is None else work)
    of_spans = enumerate(zip(steps, spans.tolist(), strict=True))
    series = series_of([replace(step, step=number, span_ns=span, period_ns=None) for number, (step, span) in of_spans])
    assert series is not None
    return series


def test_the_strongest_change_is_that_of_pettitts_statistic_counted_out() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        n = int(random.integers(16, 40))
        spans = random.integers(100, 120, n) + np.where(np.arange(n) < random.integers(5, n - 4), 0, 30)
        statistic = [
            abs(sum(int(np.sign(spans[later] - spans[earlier])) for earlier in range(cut) for later in range(cut, n)))
            for cut in range(5, n - 4)
        ]
        cut = 5 + int(np.argmax(statistic))
        significant = 2 * np.exp(-6 * max(statistic) ** 2 / (n**3 + n**2)) < 0.005
        assert step_series._strongest_change(spans) == (cut if significant else None)


def test_a_series_of_one_level_seldom_changes() -> None:
    random = np.random.default_rng(1)
    changed = sum(
        bool(series_with((random.normal(1e6, 5e4, int(random.integers(10, 200)))).astype(np.int64)).changes)
        for _ in range(200)
    )
    assert changed <= 0.01 * 200


@pytest.mark.parametrize("seed", range(5))
def test_levels_are_told_apart_where_they_change(seed: int) -> None:
    random = np.random.default_rng(seed)
    levels = np.repeat([1_000_000, 1_200_000, 1_050_000], [40, 30, 50])
    spans = (levels * random.normal(1, 0.01, len(levels))).astype(np.int64)
    assert [change.step for change in series_with(spans).changes] == [40, 70]


def test_an_outlier_is_far_above_its_own_level_and_not_above_the_whole_run() -> None:
    spans = np.repeat([1_000_000, 2_000_000], 20)
    spans[7], spans[30] = 1_500_000, 3_000_000
    outliers = series_with(spans).outliers
    assert [(outlier.step, outlier.excess_ns) for outlier in outliers] == [(30, 1_000_000), (7, 500_000)]


def test_a_step_longer_by_less_than_a_tenth_is_no_outlier_however_even_the_others_are() -> None:
    spans = np.full(20, 1_000_000)
    spans[7] = 1_090_000
    assert series_with(spans).outliers == ()
    spans[7] = 1_110_000
    assert [outlier.step for outlier in series_with(spans).outliers] == [7]


@pytest.mark.parametrize(
    ("spans", "work", "outliers"),
    [
        ([146, 105, 177, 109, 114], [6, 4, 6, 4, 4], []),
        ([100, 101, 150, 102, 103, 149], [2, 2, 3, 2, 2, 3], []),
        ([100, 101, 150, 102, 103, 160], [2, 2, 3, 2, 2, 2], [(5, 102)]),
        ([100, 150] * 5 + [145, 150], [2, 3] * 5 + [2, 3], [(10, 100)]),
        ([100, 150] * 5 + [100, 200], [2, 3] * 5 + [2, 3], [(11, 150)]),
    ],
)
def test_a_step_is_an_outlier_only_among_steps_with_as_many_microbatches_or_more(
    spans: list[int], work: list[int], outliers: list[tuple[int, int]]
) -> None:
    found = series_with(np.array(spans) * 1_000_000, work).outliers
    assert [(outlier.step, outlier.usual_ns // 1_000_000) for outlier in found] == outliers


def test_few_steps_have_neither_outliers_nor_changes() -> None:
    series = series_with(np.array([1, 1, 1, 10]) * 1_000_000)
    assert (series.outliers, series.changes) == ((), ())


def test_one_long_op_in_a_run_is_an_outlier_with_its_op_its_place_and_what_it_costs(tmp_path: Path) -> None:
    durations = np.tile(USUAL, (30, 1))
    (row,) = np.flatnonzero((TABLE.rank == 2) & (TABLE.kind == Kind.F.code) & (TABLE.microbatch == 3))
    durations[17, row] += 5_000_000
    report = report_of(tmp_path, durations)
    series = report.step_series
    (outlier,) = series.outliers
    assert outlier.step == 17
    assert outlier.differences is not None
    assert sum(part.ns for part in outlier.differences) == outlier.excess_ns
    (op,) = outlier.ops
    assert (op.rank, op.kind, op.microbatch) == (2, "F", 3)
    _, finding = report.findings
    assert finding.evidence == {"cause": "jitter", "where": {"rank": 2}, "steps": [17]}
    assert finding.gain_ns == outlier.excess_ns // 30
    assert "rank 2" in finding.title


def test_no_op_is_named_that_has_as_much_bubble_charged_to_it_in_every_step(tmp_path: Path) -> None:
    durations = np.tile(USUAL, (30, 1))
    durations[17] = 5 * USUAL // 4
    report = report_of(tmp_path, durations)
    (outlier,) = report.step_series.outliers
    assert (outlier.step, outlier.ops) == (17, ())
    assert report.steps[17].blame.ops[0].ns > 0


def test_a_stage_that_gets_slower_within_the_run_is_a_change_from_that_step_on(tmp_path: Path) -> None:
    durations = np.tile(USUAL, (40, 1))
    durations[24:] = np.where(TABLE.stage == 1, 13 * USUAL // 10, USUAL)
    report = report_of(tmp_path, durations)
    series = report.step_series
    (change,) = series.changes
    assert change.step == 24
    assert sum(part.ns for part in change.differences) == change.after_ns - change.before_ns
    assert change.differences[0].where == {"stage": 1}
    (finding,) = [finding for finding in report.findings if "step" in finding.evidence]
    assert finding.evidence == {"cause": "imbalance", "where": {"stage": 1}, "step": 24}


def test_a_run_that_gets_faster_has_a_change_and_no_finding_about_it(tmp_path: Path) -> None:
    durations = np.tile(USUAL, (40, 1))
    durations[:24] = 13 * USUAL // 10
    report = report_of(tmp_path, durations)
    assert [change.step for change in report.step_series.changes] == [24]
    assert [finding.evidence["cause"] for finding in report.findings] == ["structural"]


def test_first_steps_that_are_long_on_all_ranks_are_no_finding_and_those_that_one_rank_delays_are(
    tmp_path: Path,
) -> None:
    durations = np.tile(USUAL, (30, 1))
    durations[0] = 3 * USUAL
    warm = report_of(tmp_path, durations)
    assert [outlier.step for outlier in warm.step_series.outliers] == [0]
    assert [finding.evidence["cause"] for finding in warm.findings] == ["structural"]
    durations[0] = USUAL
    durations[0, np.flatnonzero(TABLE.rank == 3)[0]] += 20_000_000
    late = report_of(tmp_path, durations)
    assert [finding.evidence.get("where") for finding in late.findings] == [{}, {"rank": 3}]


def test_a_report_without_known_lengths_has_no_series() -> None:
    (step,) = ONE_STEP.steps
    assert series_of([replace(step, span_ns=None, period_ns=None)]) is None


@pytest.mark.parametrize("num_steps", [FEWEST_OF_LEVEL - 1, FEWEST_OF_LEVEL])
def test_a_level_of_the_fewest_steps_has_outliers(num_steps: int) -> None:
    spans = np.full(num_steps, 1_000_000)
    spans[2] = 3_000_000
    assert _far_above(spans) == ([2] if num_steps == FEWEST_OF_LEVEL else [])
