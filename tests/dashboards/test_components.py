"""Components: text is text, and a page of a large run has few of them."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
from dash.development.base_component import Component

from dashboards.components import table
from dashboards.pages import overview
from dashboards.store import Store
from pptrace.schedule.registry import build
from pptrace.simulator import simulate, uniform


class Cells(HTMLParser):
    """The texts of a table's cells, and the tags that it has."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_names_of_a_trace_are_text_in_a_table() -> None:
    hostile = ['<script>alert("1")</script>', "<img src=x onerror='alert(1)'>", "</table>&amp;"]
    shown = Cells(getattr(table(hostile, [hostile, [1, 2, 3]], id='"><b>'), "data-markup"))
    assert shown.texts == [*hostile, *hostile, "1", "2", "3"]
    assert shown.tags == {"table", "thead", "tbody", "tr", "th", "td"}


def test_a_page_has_few_components_for_many_ranks(tmp_path: Path) -> None:
    replicas = 16
    ops = simulate(build("1f1b", 4, 8), uniform(1_000_000, 2_000_000)).ops()
    ops = ops[["rank", "kind", "stage", "microbatch", "start_ns", "end_ns"]]
    later = [
        ops.assign(step=step, **{name: ops[name] + step * 100_000_000 for name in ("start_ns", "end_ns")})
        for step in range(6)
    ]
    rows = [part.assign(rank=part["rank"] + 4 * replica) for part in later for replica in range(replicas)]
    pd.concat(rows).to_csv(tmp_path / "ops.csv", index=False)
    loaded = Store([tmp_path / "ops.csv"]).get()
    assert len(loaded.analysis.report.steps[0].ranks) == 4 * replicas
    shown = overview.body(loaded, 3)
    assert sum(1 + sum(1 for _ in part._traverse()) for part in shown if isinstance(part, Component)) < 150
