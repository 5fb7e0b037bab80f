"""Lines of the report for a terminal before and after its tables."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from msgspec.structs import replace
from rich.console import Console

from pptrace.analysis.findings.verdict import with_verdict
from pptrace.analysis.report import Report
from pptrace.analysis.steps.step_series import series_of
from pptrace.model.report_table import Amount, ReportTable
from pptrace.report.tables import tables_of
from pptrace.report.text import print_report
from pptrace.report.text_table import Stripped, render_table
from pptrace.schedule.registry import build
from tests.support.analysed import analyse
from tests.support.extent import ALL
from tests.support.synthetic import record, without

TRACES = record(build("1f1b", 2, 3, 1)).traces()
WHOLE = analyse(TRACES).report
LACKING = "parts of the run are missing, damaged or left out: see the warnings at the end"


def printed(report: Report, amount: Amount = Amount.BRIEF) -> str:
    out = StringIO()
    print_report(report, Console(file=out, width=200), amount)
    return out.getvalue()


def many(num_steps: int, num_ranks: int, num_stages: int) -> Report:
    """A report of many steps and ranks, made of copies of a small one's; the last step is five times as long, rank 5 slow."""
    (step,) = WHOLE.steps
    ranks = tuple(
        replace(step.ranks[0], rank=rank, stage=rank % num_stages, compute_ns=100 if rank != 5 else 150, window_ns=1000)
        for rank in range(num_ranks)
    )
    spans = [*(step.span_ns + number % 7 for number in range(num_steps - 1)), 5 * step.span_ns]
    steps = tuple(
        replace(step, step=number, span_ns=span, period_ns=None, outside=None, ranks=ranks)
        for number, span in enumerate(spans)
    )
    warnings = tuple(f"warning {number}" for number in range(20))
    return replace(WHOLE, steps=steps, step_series=series_of(steps), warnings=warnings)


@pytest.mark.parametrize(
    ("num_steps", "num_ranks", "num_stages"),
    [(43, 64, 8), *([(1000, 1000, 16), (20, 1024, 1024)] if ALL else [(60, 130, 16)])],
)
def test_a_run_of_any_size_fits_a_screen(num_steps: int, num_ranks: int, num_stages: int) -> None:
    report = many(num_steps, num_ranks, num_stages)
    text = printed(report)
    assert len(text.splitlines()) <= 76
    whole = printed(report, Amount.WHOLE)
    assert len(whole.splitlines()) > num_steps + 2 * num_ranks
    assert "--all" in text
    assert "--all" not in whole


def test_many_steps_are_a_distribution_with_the_outlier_named() -> None:
    lines = printed(many(43, 4, 2)).splitlines()
    (outlier,) = [line for line in lines if "slowest, outlier" in line]
    assert outlier.split()[0] == "42"
    assert any("typical, shown below" in line for line in lines)
    assert any(line.startswith("43 steps: ") and "1 outlier" in line for line in lines)


def test_many_ranks_are_grouped_by_stage_with_the_slowest_named() -> None:
    lines = printed(many(1, 64, 4)).splitlines()
    (stage,) = [line for line in lines if "rank 5:" in line]
    assert stage.split()[:2] == ["1", "16"]
    rows = [line.split()[:2] for line in lines if line.split()[1:2] == ["16"]]
    assert rows == [[str(stage), "16"] for stage in range(4)]


def test_the_verdict_comes_first_and_the_findings_before_the_tables() -> None:
    text = printed(WHOLE)
    assert text.startswith(WHOLE.verdict[:60])
    assert text.index("Findings") < text.index("Steps") < text.index("Ranks")


def test_the_verdict_of_a_hang_is_the_hang() -> None:
    hung = with_verdict(
        replace(WHOLE, hang={"detail": "rank 2 is gone.", "verdict": "missing", "ranks": [2], "edges": []})
    )
    assert hung.verdict == "The run hung: rank 2 is gone."


def test_a_whole_run_lacks_nothing_whatever_was_taken_for_its_ranks() -> None:
    report = replace(WHOLE, warnings=("x.json: no rank is named in it; read as rank 0",))
    assert "see the warnings" not in printed(report)


def test_missing_ranks_and_damaged_files_are_said_first() -> None:
    assert LACKING in printed(analyse(without(TRACES, 1)).report)
    assert LACKING in printed(replace(WHOLE, inputs=(replace(WHOLE.inputs[0], warnings=("trace ends early",)),)))


def test_bubbles_that_are_not_known_are_no_damage() -> None:
    (step,) = WHOLE.steps
    unknown = replace(step, span_ns=None, bubble=replace(step.bubble, ratio=None, waterfall_ns=None))
    text = printed(replace(WHOLE, steps=(unknown,)))
    assert "bubbles are not known: see the warnings at the end" in text
    assert LACKING not in text
    text = printed(replace(WHOLE, steps=(step, replace(unknown, step=5))))
    assert "bubbles of step 5 are not known: see the warnings at the end" in text


def test_a_rank_of_unknown_compute_has_an_empty_bar() -> None:
    (step,) = WHOLE.steps
    ranks = tuple(replace(rank, compute_ns=None, exposed_comm_ns=None, bubble_ns=None) for rank in step.ranks)
    lines = [line.split() for line in printed(replace(WHOLE, steps=(replace(step, ranks=ranks),))).splitlines()]
    assert all([str(rank), str(rank), *"––––"] in lines for rank in range(2))


@pytest.mark.parametrize(
    ("source", "words"),
    [("metadata", "from metadata"), ("recognised", "recognised by the order of ops"), ("option", "from --schedule")],
)
def test_the_source_of_the_schedule_is_told_in_words(source: str, words: str) -> None:
    schedule = replace(WHOLE.schedule, source=source, num_microbatches=1, num_stages=1)
    assert f"1f1b, 1 microbatch, 1 stage ({words})" in printed(replace(WHOLE, schedule=schedule))


@pytest.mark.parametrize("width", [50, 80, 200])
@pytest.mark.parametrize("amount", list(Amount))
@pytest.mark.parametrize("report", [WHOLE, many(43, 64, 8)], ids=["two ranks", "64 ranks"])
def test_in_a_terminal_of_any_width_labels_are_whole_and_what_has_no_room_is_named(
    report: Report, amount: Amount, width: int
) -> None:
    out = StringIO()
    print_report(report, Console(file=out, width=width), amount)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line and not line.startswith("… ")]
    assert not [line for line in lines if line != line.rstrip()]
    step = report.typical_step
    for table in tables_of(report, step, amount):
        start = lines.index(table.title)
        head, *below = lines[start + 1 :]
        rows = below[: len(table.rows)] if table.key != "waterfall" else below  # whose descriptions may wrap
        for row in table.rows:
            label = " +".join(re.escape(str(cell)) for cell in row[: table.num_labels])
            assert any(re.match(rf"{label}( |$)", line) for line in rows), (table.title, row)
        note = " ".join(below[: below.index("")] if "" in below else below).partition("need a wider terminal: ")[2]
        for name in filter(str.strip, table.columns):
            assert name.strip() in head or name.strip() in note, (table.title, name, head, note)


def test_a_terminal_of_80_columns_keeps_what_a_message_costs() -> None:
    out = StringIO()
    print_report(WHOLE, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    head = lines[lines.index("Communication, means over the ranks") + 1]
    assert {"axis", "kind", "overlap", "most"} <= set(head.split())
    assert " not hidden ms " in " ".join(head.split())
    phases = lines[lines.index("Phases") + 1]
    assert phases.split().count("bubble") == 3


def test_the_title_of_a_narrow_table_is_one_line() -> None:
    out = StringIO()
    table = ReportTable("compared-facts", "Facts that differ", ("fact", "A", "B"), (("pp", "1", "2"),), num_labels=3)
    Console(file=out, width=80).print(Stripped(render_table(table, 80)))
    assert out.getvalue().splitlines() == ["", "Facts that differ", "fact  A  B", "pp    1  2"]
