"""The tables of docs/whatif.md against the program."""

from __future__ import annotations

import re
from pathlib import Path

from pptrace.analysis.whatif.frameworks import FRAMEWORKS
from pptrace.analysis.whatif.recompute import WEIGHT_SHARE
from pptrace.analysis.whatif.result import Standing
from pptrace.schedule.registry import SCHEDULES
from tests.support.programs import pptrace_here

TEXT = (Path(__file__).parents[2] / "docs" / "whatif.md").read_text(encoding="utf-8")


def test_the_table_of_frameworks_has_each_with_its_schedules() -> None:
    section = TEXT.split("\n## Frameworks\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")][1:]
    written = {}
    for names, schedules in rows:
        has = set(SCHEDULES) if schedules.strip() == "all" else set(re.findall("`([^`]+)`", schedules))
        written |= dict.fromkeys(re.findall("`([^`]+)`", names), has)
    assert written == {name: set(framework.schedules) for name, framework in FRAMEWORKS.items()}


def test_the_share_that_is_taken_of_w_is_the_one_that_page_and_help_say() -> None:
    help_text = " ".join(pptrace_here("whatif", "--help").out.split())
    assert f"else {WEIGHT_SHARE} of what is no" in help_text
    assert f"else {WEIGHT_SHARE} of what is no" in TEXT


def test_every_standing_is_described_in_its_order() -> None:
    section = TEXT.split("\n## What comes first\n")[1].split("\n## ")[0]
    listed = [line for line in section.splitlines() if re.match(r"\d\. ", line)]
    assert len(listed) == len(Standing)
    assert all(f"`{standing}`" in line for standing, line in zip(Standing, listed, strict=True))
