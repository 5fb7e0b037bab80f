"""``pptrace.hang``: the verdict that ``pptrace hang`` prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pptrace
from tests.analysis.test_hang import three_dimensions
from tests.support.programs import SAMPLES, pptrace_here


def test_dumps_give_the_verdict_of_the_command_line(tmp_path: Path) -> None:
    three_dimensions(tmp_path, 10, [])
    report = pptrace.hang(tmp_path)
    assert (report.verdict, report.ranks) == ("missing", (10,))
    assert f"{report}\n" == pptrace_here("hang", tmp_path).out
    assert report.to_json() + "\n" == pptrace_here("hang", tmp_path, "--json", "-").out
    assert report.detail.startswith("missing: rank 10 is missing")
    in_tensor_group = report.edges[report.edges.group.str.contains("mesh_tp")]
    assert sorted(in_tensor_group[["rank", "waits_for"]].itertuples(index=False, name=None)) == [
        (8, 10),
        (9, 10),
        (11, 10),
    ]
    listed = json.loads(report.to_json())["hang"]["edges"]
    assert len(report.edges) == sum(len(edge["waits_for"]) for edge in listed)
    assert report._repr_html_().startswith("<pre>missing: ")
    assert report.reason == ""


def test_several_dumps_are_given_as_paths(tmp_path: Path) -> None:
    three_dimensions(tmp_path, 10, [])
    report = pptrace.hang([tmp_path / "job_dump_8", str(tmp_path / "job_dump_9")])
    assert report.seen_ranks == (8, 9)


def test_a_run_that_ended_well_has_no_verdict_but_a_reason() -> None:
    report = pptrace.hang(SAMPLES / "1f1b_p4")
    assert (report.verdict, report.ranks, report.detail, len(report.edges)) == (None, (), "", 0)
    assert report.reason.endswith("the run ended as 'ok', and no rank was seen to hang")
    assert list(report.edges.columns) == ["rank", "waits_for", "call", "group", "seq"]


EDGE = {"rank": 0, "waits_for": [1], "call": "recv", "group": "default_pg", "seq": 3}


@pytest.mark.parametrize(
    ("edges", "ranks", "is_read"),
    [
        *(([EDGE], [1], True), ([EDGE | {"waits_for": None}], [1], False), ([EDGE | {"rank": "0"}], [1], False)),
        *(([EDGE | {"seq": {}}], [1], False), ([EDGE | {"call": 3}], [1], False), ([EDGE], ["x"], False)),
    ],
)
def test_a_verdict_in_a_damaged_run_file_is_not_taken(tmp_path: Path, edges: Any, ranks: Any, is_read: bool) -> None:
    hang = {"verdict": "late", "ranks": ranks, "detail": "late: rank 1", "edges": edges}
    (tmp_path / "run.json").write_text(json.dumps({"status": "hang", "hang": hang}), encoding="utf-8")
    report = pptrace.hang(tmp_path)
    assert (report.verdict == "late") is is_read
    assert len(report.edges) == is_read
    assert str(report)


@pytest.mark.parametrize(("paths", "said"), [([], "no path is given"), ("nowhere", "nowhere: not found")])
def test_a_mistake_is_an_error_of_one_line(paths: Any, said: str) -> None:
    with pytest.raises(pptrace.PptraceError) as caught:
        pptrace.hang(paths)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
