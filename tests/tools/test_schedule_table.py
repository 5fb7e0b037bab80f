"""The table of measured schedules: how it is written, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from pptrace.errors import UsageError
from pptrace.schedule.registry import SCHEDULES
from tests.support.programs import ROOT
from tests.support.sleeping import Measured, SleepingRun
from tools.marked_tables import MarkedTable
from tools.schedule_table import BEGIN, CATALOGUE_BEGIN, CATALOGUE_END, END, catalogue_table, main, to_markdown

TABLE = MarkedTable(Path("page.md"), BEGIN, END)


def row() -> Measured:
    run = SleepingRun("zbv", 4, 8, None, 0.1, 2, 2)
    return Measured(run, run.plan, 0.0625, 0.08, 0.0808, (0.0011,), 8, 7)


def test_the_table_has_a_line_for_each_run_with_the_error_of_its_bubble() -> None:
    header, rule, line = to_markdown([row()]).splitlines()
    assert header.count("|") == rule.count("|") == line.count("|")
    assert line == "| `zbv` | 4 | 8 | 2 | 0.0625 | 0.0800 | 0.0808 | +1.0% | +0.1% | 8 | 7 |"


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    replaced = TABLE.replaced("new", text)
    assert replaced == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    assert TABLE.replaced("new", replaced) == replaced


@pytest.mark.parametrize("text", ["", f"{BEGIN}\n", f"{END}\n{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n"])
def test_a_file_without_its_two_markers_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"page\.md: expected one line"):
        TABLE.replaced("new", text)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("no markers")
    assert main(["--write", str(page)]) == 2
    assert capsys.readouterr().err.startswith(f"schedule_table: {page}: expected one line")


def test_the_catalogue_of_the_docs_is_that_of_the_registry() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    table = page.split(CATALOGUE_BEGIN)[1].split(CATALOGUE_END)[0].strip()
    assert table == catalogue_table(), (
        "write it with: python tools/schedule_table.py --catalogue --write docs/schedules.md"
    )
    names, *cells = zip(
        *([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]), strict=True
    )
    assert names == tuple(f"`{name}`" for name in SCHEDULES)
    assert cells[1] == tuple(schedule.bubble_text for schedule in SCHEDULES.values())


def test_the_catalogue_is_written_without_measuring_and_the_measured_table_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{CATALOGUE_BEGIN}\nold\n{CATALOGUE_END}\nbetween\n{BEGIN}\nmeasured\n{END}\n", encoding="utf-8")
    assert main(["--catalogue", "--write", str(page)]) == 0
    expected = f"{CATALOGUE_BEGIN}\n{catalogue_table()}\n{CATALOGUE_END}\nbetween\n{BEGIN}\nmeasured\n{END}\n"
    assert page.read_text(encoding="utf-8") == expected
