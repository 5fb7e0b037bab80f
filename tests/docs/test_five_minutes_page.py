"""docs/five-minutes.md quotes a report as it is printed, in its order, and names options that there are."""

from __future__ import annotations

import re

import pptrace
from pptrace.cli.main import cli
from tests.support.programs import ROOT, SAMPLES

PAGE = (ROOT / "docs" / "five-minutes.md").read_text(encoding="utf-8")
WIDTH = 120


def test_each_quoted_line_is_one_of_the_report_in_its_order() -> None:
    printed = iter(pptrace.load(SAMPLES / "gpu_nccl_torch_1f1b_p4").to_text(width=WIDTH).splitlines())
    quoted = [line for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    assert len(quoted) > 15
    assert [line for line in quoted if line not in printed] == []


def test_its_commands_are_commands() -> None:
    named = set(re.findall(r"(?:^|`)pptrace (\w+) ", PAGE, re.MULTILINE))
    assert named >= {"run", "analyze", "whatif", "compare", "dashboard"}
    assert named <= set(cli.list_commands(None))


def test_the_readme_and_the_index_lead_to_it() -> None:
    assert "(docs/five-minutes.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\nfive-minutes\n" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
