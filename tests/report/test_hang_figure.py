"""A hang as a table and a graph."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dashboards.pages.problem import layout
from dashboards.store import Store
from pptrace.report.hang import edge_rows, wait_graph
from pptrace.report.html import report_page
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES

SVG = "{http://www.w3.org/2000/svg}"


def edge(rank: int, others: list[int], call: str = "all_reduce", seq: int = 3) -> dict[str, Any]:
    return {"rank": rank, "waits_for": others, "call": call, "group": "default_pg", "seq": seq}


def late(num_ranks: int) -> dict[str, Any]:
    """The last rank is late, and all others wait for it."""
    edges = [edge(rank, [num_ranks - 1]) for rank in range(num_ranks - 1)]
    return {"verdict": "late", "ranks": [num_ranks - 1], "detail": "late: the last rank <sleeps>", "edges": edges}


def test_ranks_that_wait_alike_are_one_row_the_most_first() -> None:
    hang = {**late(4), "edges": [edge(0, [1], "recv", 7), edge(1, [3]), edge(2, [3])]}
    assert edge_rows(hang) == [
        ("ranks 1 and 2", "all_reduce", "default_pg", "3", "rank 3"),
        ("rank 0", "recv", "default_pg", "7", "rank 1"),
    ]


def test_an_arrow_leads_from_each_rank_to_those_that_it_waits_for_and_the_guilty_stand_out() -> None:
    drawing = ElementTree.fromstring(wait_graph(late(4)))
    groups = {group.findtext(f"{SVG}title"): group for group in drawing.iter(f"{SVG}g")}
    nodes = {
        text: (float(circle.get("cx", "")), float(circle.get("cy", "")), circle.get("fill"))
        for group in groups.values()
        for text, circle in zip((group.findtext(f"{SVG}text"),), group.iter(f"{SVG}circle"), strict=False)
    }
    assert sorted(map(str, nodes)) == ["0", "1", "2", "3"]
    assert nodes["0"][2] == nodes["1"][2] == nodes["2"][2] != nodes["3"][2]
    assert "rank 3: to blame" in groups
    for rank in "012":
        line, head = groups[f"rank {rank} waits for rank 3"].iter(f"{SVG}path")
        begin, end = (tuple(map(float, point.split())) for point in line.get("d", "").removeprefix("M").split("L"))
        tip = tuple(map(float, head.get("d", "").removeprefix("M").split("L")[0].split()))
        assert math.dist(begin, nodes[rank][:2]) == pytest.approx(math.dist(tip, nodes["3"][:2]), abs=0.2)
        assert 17 < math.dist(begin, nodes[rank][:2]) < 25
        assert math.dist(begin, tip) > math.dist(begin, end)
    assert len(groups) == 4 + 3


@pytest.mark.parametrize("hang", [late(64), {**late(4), "edges": []}])
def test_what_cannot_be_drawn_is_not(hang: dict[str, Any]) -> None:
    assert wait_graph(hang) is None


def run_that_hung(folder: Path, *, with_traces: bool) -> Path:
    source = SAMPLES / "1f1b_p4"
    run = json.loads((source / "run.json").read_text())
    folder.mkdir()
    if with_traces:
        for entry in run["ranks"]:
            (folder / entry["trace"]).write_bytes((source / entry["trace"]).read_bytes())
    (folder / "run.json").write_text(json.dumps({**run, "status": "timeout", "hang": late(4)}))
    return folder


def test_the_page_shows_the_verdict_and_who_waits_for_whom(tmp_path: Path) -> None:
    page = report_page(load([run_that_hung(tmp_path / "run", with_traces=True)], cache=False))
    assert "The run hung" in page
    assert "plotly" not in page
    assert page.count("<title>rank 3: to blame</title>") == 1
    assert "late: the last rank &lt;sleeps&gt;" in page
    assert "<td>ranks 0–2</td><td>all_reduce</td><td>default_pg</td><td>3</td><td>rank 3</td>" in page
    assert "The run hung" not in report_page(load([SAMPLES / "1f1b_p2"]))


def test_the_dashboard_of_a_run_that_hung_before_anything_was_recorded_shows_the_verdict(tmp_path: Path) -> None:
    shown = str(layout(Store([run_that_hung(tmp_path / "run", with_traces=False)]).get()))
    assert "late: the last rank <sleeps>" in shown
    assert "hang-graph" in shown
