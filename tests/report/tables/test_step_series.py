"""The table of outliers and changes of level, and what it says of one step."""

from __future__ import annotations

from msgspec.structs import replace

from pptrace.analysis.whole_run import BlamedOp, Cause, StepChange, StepOutlier, StepSeries
from pptrace.report.tables.step_series import NO_LENGTH, differences_table, length_of, step_line
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES

MS = 1_000_000
CAUSES = tuple(Cause("jitter", {"rank": rank}, (9 - rank) * MS) for rank in range(6))
OUTLIER = StepOutlier(7, 60 * MS, 3, 20 * MS, CAUSES, (BlamedOp(2, "B", 1, 5, 4 * MS),))
CHANGE = StepChange(9, 3, 20 * MS, 11, 30 * MS, None)
SERIES = StepSeries(12, 19 * MS, 19 * MS, 20 * MS, 30 * MS, 60 * MS, (OUTLIER,), (CHANGE,), evaluations=(12,))


def test_the_largest_differences_of_every_outlier_and_change_are_listed() -> None:
    table = differences_table(SERIES)
    assert [row[:4] for row in table.rows] == [
        ("outlier", "7", "step 3", "jitter, rank 0"),
        *(("", "", "", f"jitter, rank {rank}") for rank in (1, 2, 3)),
        ("new level", "9", "step 3", "not known"),
    ]
    assert table.rows[0][4:] == ("60.00", "20.00", "+9.00", "22.5%")
    assert table.notes == (
        "step 7: most of the bubble that it has more is charged to B of microbatch 5 on rank 2, stage 1: 4.00 ms",
    )


def test_of_one_step_all_differences_are_listed_and_of_an_ordinary_one_none() -> None:
    assert len(differences_table(SERIES, 7).rows) == len(CAUSES)
    assert differences_table(SERIES, 9).rows == (("new level", "9", "step 3", "not known", "30.00", "20.00", "–", "–"),)
    assert differences_table(SERIES, 4).rows == ()


def test_a_step_is_told_against_the_others_in_a_sentence() -> None:
    step = replace(load([SAMPLES / "1f1b_p2"]).report.steps[0], step=4, span_ns=22 * MS, period_ns=None)
    assert step_line(step, SERIES) == "22.00 ms, 10.0% above the median; no outlier"
    assert step_line(replace(step, span_ns=18 * MS), SERIES) == "18.00 ms, 10.0% below the median; no outlier"
    assert step_line(replace(step, span_ns=20 * MS + 9), SERIES) == "20.00 ms, the median; no outlier"
    assert step_line(step, replace(SERIES, num_steps=4)).endswith("10.0% above the median"), (
        "too few to be an outlier of"
    )
    assert step_line(step, replace(SERIES, num_steps=1)) == "22.00 ms; the only step"
    assert step_line(replace(step, step=7), SERIES).endswith(
        "an outlier, 40.00 ms more than step 3, the usual one of its time"
    )
    assert step_line(replace(step, step=9), SERIES).endswith("the first step of a new level, 30.00 ms after 20.00")
    assert "evaluation" in step_line(replace(step, step=12), SERIES)
    assert step_line(replace(step, span_ns=None), SERIES) == NO_LENGTH
    assert step_line(step, None) == "22.00 ms"
    spans = replace(SERIES, measure="span")
    assert step_line(replace(step, period_ns=25 * MS), spans).startswith("Pipeline span 22.00 ms, 10.0% above")
    assert length_of(replace(step, bubble=None, ranks=()), spans) == (22 * MS, ""), "no pipeline"
