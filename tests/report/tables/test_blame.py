"""The table of who causes the bubble, and the line about the critical path."""

from __future__ import annotations

from msgspec.structs import replace

from pptrace.analysis.result import StepReport
from pptrace.analysis.whole_run import Blame, BlamedOp, CriticalPath
from pptrace.model.report_table import Amount, Bar, ReportTable
from pptrace.report.tables import tables_of_step
from pptrace.schedule.registry import build
from tests.support.analysed import analyse
from tests.support.synthetic import record

(STEP,) = analyse(record(build("1f1b", 2, 3, 1)).traces()).report.steps
OPS = (BlamedOp(7, "B", 1, 3, 40_000_000),)


def table(step: StepReport, amount: Amount = Amount.BRIEF) -> ReportTable | None:
    return next((made for made in tables_of_step(step, amount) if made.key == "blame"), None)


def test_few_ranks_are_listed_by_what_they_cause() -> None:
    blame = Blame(80_000_000, {0: 20_000_000, 7: 60_000_000}, {0: 20_000_000, 1: 60_000_000}, {"B": 80_000_000}, OPS)
    made = table(replace(STEP, blame=blame))
    assert made.rows == (
        ("7", "60.00", "75.0%", Bar((("bubble", 0.75),))),
        ("0", "20.00", "25.0%", Bar((("bubble", 0.25),))),
    )
    assert made.notes == ("by kind: B 100%", "most of one op 40.00 ms (B of microbatch 3 on rank 7, stage 1)")


def test_many_ranks_are_summed_by_stage_and_the_worst_is_named() -> None:
    by_rank = {rank: 1_000_000 + rank for rank in range(100)}
    total = sum(by_rank.values())
    blame = Blame(total, by_rank, {0: total // 4, 1: total - total // 4}, {"idle": total}, ())
    made = table(replace(STEP, blame=blame))
    assert [row[0] for row in made.rows] == ["1", "0"]
    assert made.columns[0] == "stage"
    assert made.notes == ("by kind: idle 100%", "most of one rank 1.00 ms (rank 99)")
    whole = table(replace(STEP, blame=blame), Amount.WHOLE)
    assert len(whole.rows) == 100


def test_a_step_without_bubble_or_blame_has_no_such_table() -> None:
    assert table(replace(STEP, blame=None)) is None
    assert table(replace(STEP, blame=Blame(0, {0: 0}, {0: 0}, {}, ()))) is None


def test_the_critical_path_is_a_line_of_its_parts_and_its_longest_stage() -> None:
    path = CriticalPath(1000, {"F": 300, "B": 600, "transfer": 5, "idle": 95}, {0: 400, 1: 600})
    (waterfall,) = [
        made for made in tables_of_step(replace(STEP, critical_path=path), Amount.BRIEF) if made.key == "waterfall"
    ]
    assert waterfall.notes == ("critical path: B 60%, F 30%, idle 10%; 60% of it in stage 1",)
