"""Table, columns, figures and page of a sweep."""

from __future__ import annotations

import csv
import io
import json

import pytest
from rich.console import Console

from pptrace.api.sweep import SweepOptions, grid_of
from pptrace.report.columns import as_csv
from pptrace.report.html import sweep_page
from pptrace.report.sweep.figures import curves, heat_maps
from pptrace.report.sweep.layout import sweep_columns, sweep_object
from pptrace.report.sweep.table import refused_lines, sweep_tables, sweep_text
from pptrace.report.to_json import dump
from pptrace.simulator.sweep.run import Sweep, run_sweep


def swept(schedules: str, **asked: object) -> Sweep:
    return run_sweep(grid_of(SweepOptions(schedules, **asked)))


def printed(sweep: Sweep, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(sweep_text(sweep, width))
    return console.file.getvalue()


def test_a_row_has_a_schedule_and_v_and_the_longest_axis_is_the_columns() -> None:
    (table,) = sweep_tables(swept("1f1b,interleaved-1f1b", pp="4,8", microbatches="8..32:8", chunks="1,2,4"))
    assert table.columns == ("schedule", "v", "p", "holds", "m=8", "m=16", "m=24", "m=32")
    assert [row[:3] for row in table.rows] == [
        *(("1f1b", "1", "4"), ("interleaved-1f1b", "2", "4"), ("interleaved-1f1b", "4", "4")),
        *(("1f1b", "1", "8"), ("interleaved-1f1b", "2", "8"), ("interleaved-1f1b", "4", "8")),
    ]
    assert table.rows[0][4:] == ("0.375", "0.188", "0.125", "0.094")


def test_with_several_p_and_microbatches_that_depend_on_it_p_is_the_columns() -> None:
    (table,) = sweep_tables(swept("1f1b", pp="2..32:x2", microbatches="p-1,32"))
    assert table.columns == ("schedule", "v", "m", "holds", "p=2", "p=4", "p=8", "p=16", "p=32")
    rows = {row[2]: row[4:] for row in table.rows}
    assert rows["p−1"] == ("1.000",) * 5
    assert rows["32"] == ("0.031", "0.094", "0.219", "0.469", "0.969")


def test_costs_that_vary_are_columns_or_labels() -> None:
    (table,) = sweep_tables(swept("1f1b", pp=4, microbatches="8,16", p2p="0,0.1,0.2"))
    assert table.columns == ("schedule", "v", "m", "holds", "message ms=0", "message ms=0.1", "message ms=0.2")
    (table,) = sweep_tables(swept("1f1b", pp=4, microbatches="8,16,24", backward="2,3"))
    assert table.columns == ("schedule", "v", "B ms", "holds", "m=8", "m=16", "m=24")


def test_what_is_refused_is_counted_with_its_reason_and_its_place() -> None:
    sweep = swept("1f1b,dualpipe", pp="3,4", microbatches="8", chunks="1,2,3")
    lines = refused_lines(sweep)
    assert sum(int(line.split()[1]) for line in lines) == len(sweep.refused) == 9
    assert (
        lines[0]
        == "refused: 4 of p=3,4 m=8 v=2,3, such as 1f1b: 2 chunks per rank; this schedule has 1 (try interleaved-1f1b)"
    )
    assert all(line in printed(sweep, 400) for line in lines)


def test_nothing_but_refusals_is_said_too() -> None:
    text = printed(swept("1f1b", pp=4, microbatches=8, chunks=2))
    assert "1 combination: 0 simulated, 1 refused" in text
    assert "try interleaved-1f1b" in text


def test_a_long_table_is_cut_in_the_terminal_alone() -> None:
    sweep = swept("gpipe,1f1b,zb-h1", pp="2..15", microbatches="4..18")
    (brief,), (whole,) = sweep_tables(sweep), sweep_tables(sweep, every_row=True)
    assert (len(brief.rows), len(brief.columns)) == (40, 5 - 1 + 10)
    assert (len(whole.rows), len(whole.columns)) == (42, 4 + 15)
    assert brief.columns[4:] == tuple(f"m={4 + number * 14 // 9}" for number in range(10))
    assert any("2 more rows" in note for note in brief.notes)
    assert any("10 of 15 values of m" in note for note in brief.notes)


def test_csv_and_json_have_every_point() -> None:
    sweep = swept("1f1b,interleaved-1f1b", pp=4, microbatches="8,9", chunks="1,2", p2p="0,0.5")
    rows = list(csv.DictReader(io.StringIO(as_csv(sweep_columns(sweep)))))
    found = json.loads(dump(sweep_object(sweep)))
    assert found["schema"] == "pptrace.sweep/1"
    assert len(rows) == len(found["points"]) == len(sweep.points) == 16
    assert list(rows[0]) == list(found["points"][0]) == list(sweep_columns(sweep))
    for row, point in zip(rows, found["points"], strict=True):
        assert row["schedule"] == point["schedule"]
        assert (row["bubble_ratio"] == "") == (point["bubble_ratio"] is None) == bool(point["refused"])
    first = found["points"][0]
    assert (first["makespan_ns"], first["bubble_ratio"], first["throughput_per_rank"]) == (33_000_000, 0.375, 8 / 11)


def test_a_heat_map_for_each_p_has_every_cell_and_says_why_one_is_empty() -> None:
    maps = heat_maps(swept("1f1b,dualpipe", pp="4,8", microbatches="8,16,24"))
    assert [title for title, _ in maps] == ["p=4", "p=8"]
    trace = maps[1][1].data[0]
    assert list(trace.x) == ["8", "16", "24"]
    assert list(trace.y) == ["1f1b v=1", "dualpipe v=2"]
    assert list(trace.z[0]) == pytest.approx([7 / 8, 7 / 16, 7 / 24])
    assert trace.z[1][0] is None
    assert (
        "refused: dualpipe: 8 microbatches over p=8; expected an even number, at least 2p=16" in trace.customdata[1][0]
    )
    assert [figure.data[0].zmax for _, figure in maps] == [7 / 8, 7 / 8]
    assert heat_maps(swept("1f1b", pp="4,8", microbatches="8")) == []


def test_schedules_without_any_bubble_have_their_rows_too() -> None:
    ((_, figure),) = heat_maps(swept("1f1b,gpipe,dualpipe", pp=1, microbatches="4,8"))
    trace = figure.data[0]
    assert (list(trace.y), [list(row) for row in trace.z]) == (["1f1b v=1", "gpipe v=1"], [[0, 0], [0, 0]])
    assert trace.zmin < trace.zmax


def test_curves_of_throughput_against_p_are_those_of_the_formula() -> None:
    (per_rank, total) = curves(swept("1f1b", pp="2..32:x2", microbatches="p-1,32"))
    assert per_rank[0] == "Throughput per rank against p"
    lines = {trace.name: (list(trace.x), list(trace.y)) for trace in per_rank[1].data}
    assert set(lines) == {"1f1b v=1, m=p−1", "1f1b v=1, m=32"}
    x, y = lines["1f1b v=1, m=32"]
    assert x == [2, 4, 8, 16, 32]
    assert y == pytest.approx([32 / (32 + p - 1) for p in x])
    assert lines["1f1b v=1, m=p−1"][1] == pytest.approx([0.5] * 5)
    assert list(total[1].data[0].y) == pytest.approx([p / 2 for p in x])


def test_of_many_m_curves_show_the_least_the_most_and_multiples_of_p() -> None:
    (per_rank, _) = curves(swept("1f1b", pp="2,4", microbatches="8..64:8,p-1"))
    assert [trace.name for trace in per_rank[1].data] == ["1f1b v=1, m=8", "1f1b v=1, m=64", "1f1b v=1, m=p−1"]


def test_the_page_has_maps_curves_table_and_refusals() -> None:
    page = sweep_page(swept("1f1b,zbv", pp="4,8", microbatches="8,16", chunks="1,2"))
    for words in ("Bubble ratio, p=4", "Throughput per rank against p", "refused: 4 of p=4,8 m=8,16 v=2, such as 1f1b"):
        assert words in page
    assert "<script src" not in page
