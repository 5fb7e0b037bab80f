"""Runs of a plan: of a schedule one, of several in a row as many."""

from __future__ import annotations

import pytest

from pptrace.schedule.plan import Plan, runs_of
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.text import from_rows
from tests.schedule.shapes import in_a_row


@pytest.mark.parametrize(("name", "pp"), [("1f1b", 1), *((name, 4) for name in sorted(SCHEDULES))])
def test_a_schedule_is_one_run(name: str, pp: int) -> None:
    plan = build(name, pp, 8)
    (run,) = runs_of(plan)
    assert [list(row) for row in run] == [list(plan.compute_actions(rank)) for rank in range(pp)]


def test_schedules_in_a_row_are_as_many_runs() -> None:
    plans = [build("zb-h1", 3, 5), build("1f1b", 3, 4), build("gpipe", 3, 2)]
    runs = runs_of(in_a_row(*plans))
    assert [[len(row) for row in run] for run in runs] == [
        [len(plan.compute_actions(rank)) for rank in range(3)] for plan in plans
    ]


def test_a_rank_that_is_done_earlier_than_others_ends_no_run() -> None:
    """The last rank of 1F1B has nothing under way after each of its backwards, others have."""
    plan: Plan = from_rows([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], "custom")
    assert len(runs_of(plan)) == 1
