"""The README's figures of benchmarks are those of docs/benchmarks.md."""

from __future__ import annotations

import re

from tests.support.programs import ROOT

_FIGURE = r"(?<![\w.])\d+(?:\.\d+)?(?: (?:MB|GB|s|ms|µs|%|million)(?!\w)|(?! cores))"


def test_every_figure_of_the_readme_stands_on_the_page_of_benchmarks() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Benchmarks")[1].split("\n## ")[0]
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    figures = re.findall(_FIGURE, section)
    assert len(figures) >= 7
    assert {"215 MB", "45.5 s"} <= set(figures)
    assert [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", page)] == []
