"""What the report for a terminal says before and after its tables."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from pptrace.analysis.analyse import analyse
from pptrace.analysis.result import Report
from pptrace.report.text import print_report
from pptrace.schedule.registry import build
from tests.synthetic import record, without

TRACES = record(build("1f1b", 2, 3, 1)).traces()
WHOLE = analyse(TRACES).report
LACKING = "parts of the run are missing or damaged: see the warnings at the end"


def told(report: Report) -> str:
    out = StringIO()
    print_report(report, Console(file=out, width=200))
    return out.getvalue()


def test_a_whole_run_lacks_nothing_whatever_was_taken_for_its_ranks() -> None:
    report = replace(WHOLE, warnings=("x.json: nothing in it says which rank it is; taken as rank 0",))
    assert "see the warnings" not in told(report)


def test_missing_ranks_and_damaged_files_are_said_first() -> None:
    assert LACKING in told(analyse(without(TRACES, 1)).report)
    assert LACKING in told(replace(WHOLE, inputs=(replace(WHOLE.inputs[0], warnings=("trace ends early",)),)))


def test_bubbles_that_are_not_known_are_no_damage() -> None:
    (step,) = WHOLE.steps
    unknown = replace(step, span_ns=None, bubble=replace(step.bubble, ratio=None, waterfall_ns=None))
    text = told(replace(WHOLE, steps=(unknown,)))
    assert "bubbles are not known: see the warnings at the end" in text
    assert LACKING not in text


def test_a_rank_of_unknown_compute_has_an_empty_bar() -> None:
    (step,) = WHOLE.steps
    ranks = tuple(replace(rank, compute_ns=None, exposed_comm_ns=None, bubble_ns=None) for rank in step.ranks)
    lines = [line.split() for line in told(replace(WHOLE, steps=(replace(step, ranks=ranks),))).splitlines()]
    assert all([str(rank), str(rank), *"––––"] in lines for rank in range(2))


@pytest.mark.parametrize(
    ("source", "words"),
    [("metadata", "from metadata"), ("recognised", "recognised by the order of ops"), ("option", "from --schedule")],
)
def test_the_source_of_the_schedule_is_told_in_words(source: str, words: str) -> None:
    schedule = replace(WHOLE.schedule, source=source, num_microbatches=1, num_stages=1)
    assert f"1f1b, 1 microbatch, 1 stage ({words})" in told(replace(WHOLE, schedule=schedule))
