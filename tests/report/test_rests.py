"""Parts below zero, and warnings that a root cause states, in tables and lines."""

from __future__ import annotations

from pptrace.model.report_table import Amount, Bar
from pptrace.report.tables import warning_lines
from pptrace.report.tables.waterfall import waterfall_table
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES


def test_a_part_below_zero_has_its_reason_and_no_bar() -> None:
    (step,) = load([SAMPLES / "gpu_1f1b_p4"]).report.steps
    rows = {row[0]: row for row in waterfall_table(step, Amount.WHOLE).rows}
    assert step.parts["unexplained"] < 0
    bar, words = rows["unexplained"][3], rows["unexplained"][4]
    assert bar == Bar((("compute", 0.0),))
    assert str(words).startswith("the replay is longer than the run was")
    assert rows["host"][3] == Bar((("compute", step.parts["host"] / (step.length_ns or 1)),))


def test_a_warning_that_a_root_cause_states_stands_there_alone() -> None:
    report = load([SAMPLES / "gpu_nccl_experts_pp2_ep2"]).report
    (root,) = report.root_causes
    assert any(line.startswith(root.title) for line in report.warnings)
    assert not any(line.startswith(root.title) for line in warning_lines(report))
