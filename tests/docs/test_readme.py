"""The README is short, and what it shows is what there is."""

from __future__ import annotations

import io
import re

from rich.console import Console

import pptrace
from pptrace.report.whatif import whatif_text
from tests.support.programs import ROOT, SAMPLES

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return TEXT.split(f"## {title}\n")[1].split("\n## ")[0]


def test_it_has_at_most_nine_kilobytes() -> None:
    assert 7 * 1024 < len(TEXT.encode()) <= 9 * 1024


def test_each_line_of_its_report_is_one_of_the_terminals() -> None:
    shown = TEXT.split("$ pptrace analyze sample_traces/1f1b_p4\n")[1].split("```")[0].splitlines()
    printed = pptrace.load(SAMPLES / "1f1b_p4").to_text(width=140).splitlines()
    lines = [line.rstrip() for line in shown if line.strip() not in ("", "…")]
    assert len(lines) > 15
    assert [line for line in lines if line not in {line.rstrip() for line in printed}] == []


def test_each_line_of_its_predictions_is_one_of_the_terminals() -> None:
    shown = TEXT.split("$ pptrace whatif sample_traces/uneven_p4\n")[1].split("```")[0].splitlines()
    result = pptrace.load(SAMPLES / "uneven_p4", cache=False).whatif().result
    console = Console(width=100, file=io.StringIO(), highlight=False)
    console.print(whatif_text(result, 100))
    printed = {line.rstrip() for line in console.file.getvalue().splitlines()}
    assert len(shown) > 5
    assert [line for line in shown if line != "…" and line not in printed] == []


def test_it_names_every_schedule_of_the_catalogue_and_no_other() -> None:
    named = re.findall(r"`([\w-]+)`", section("Schedules").split(": every one")[0])
    assert sorted(named) == sorted(pptrace.schedules)


def test_its_links_lead_to_files() -> None:
    targets = set(re.findall(r"\]\(([^)#]+)", TEXT))
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_it_names_five_limits_that_change_a_number() -> None:
    assert len(re.findall(r"^- ", section("Five limits that change a number"), re.MULTILINE)) == 5
