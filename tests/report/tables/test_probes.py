"""The table of probes: in the terminal, brief or not, and in the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pptrace.analysis.whole_run import ProbedTarget
from pptrace.report.html import report_page
from pptrace.report.tables import Amount, tables_of
from pptrace.report.tables.probes import probes_table
from pptrace.schedule.registry import build
from pptrace.workflow.analyse import analyse
from tests.support.synthetic import record

PROBES = (
    ProbedTarget("F", 0.2, (3, 5, 7, 9, 11, 13), 0.333, 0.31, 0.35, 0.34, 0.335, 0.02),
    ProbedTarget("stage=2", 0.5, (1, 3), 0.1, None, None, 0.11, 0.12, 0.02, "2 probed steps are too few"),
    ProbedTarget("W", 0.25, (), reason="no step with this probe is next to one without"),
)


def test_a_row_for_each_target_and_the_reasons_below() -> None:
    table = probes_table(PROBES)
    assert table.rows == (
        ("F", "20%", "6", "33.3%", "31.0% to 35.0%", "34.0%", "33.5%"),
        ("stage=2", "50%", "2", "10.0%", "–", "11.0%", "12.0%"),
        ("W", "25%", "0", "–", "–", "–", "–"),
    )
    assert table.notes[-2:] == (
        "stage=2: 2 probed steps are too few",
        "W: no step with this probe is next to one without",
    )


@pytest.mark.parametrize("amount", list(Amount))
def test_every_output_has_it_where_there_are_probes(amount: Amount) -> None:
    analysis = analyse(record(build("1f1b", 2, 3, 1)).traces())
    probed = replace(analysis, report=replace(analysis.report, probes=PROBES))
    for run, number in ((analysis, 0), (probed, 1)):
        made = tables_of(run.report, run.report.typical_step, amount)
        assert [table.key for table in made].count("probes") == number
        assert report_page(run).count("What a faster target would gain") == number
