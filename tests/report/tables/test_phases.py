"""The table of phases."""

from __future__ import annotations

import pytest

from pptrace.model.report_table import Amount
from pptrace.report.tables import tables_of_step
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES


def test_ideal_lengths_sum_to_the_ideal_step_of_the_measured_compute() -> None:
    report = load([SAMPLES / "1f1b_p4"]).report
    step = report.typical_step
    assert step.bubble.ideal_ratio is not None
    (table,) = (table for table in tables_of_step(step, Amount.WHOLE) if table.key == "phases")
    compute_ms = sum(rank.compute_ns or 0 for rank in step.ranks) / len(step.ranks) / 1e6
    ideals = [index for index, name in enumerate(table.columns) if name == "ideal"]
    assert [table.columns[index - 1] for index in ideals] == ["warmup ms", "steady ms", "cooldown ms"]
    for r, row in enumerate(table.rows):
        warmup, steady, cooldown = (float(str(row[index])) for index in ideals)
        assert warmup == pytest.approx(compute_ms / 24 * 3, abs=0.02)  # (p−1)f, of m(f + b)
        assert cooldown == pytest.approx(compute_ms / 24 * (2 * r + 3 * (3 - r)), abs=0.02)
        assert warmup + steady + cooldown == pytest.approx(compute_ms * (1 + step.bubble.ideal_ratio), abs=0.03)
