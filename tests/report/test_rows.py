"""Rows of files: CSV that spreadsheets and programs read, JSON with the report's names."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from pptrace.analysis.memory.types import InFlight, RankMemory
from pptrace.analysis.whole_run import Cause
from pptrace.report.to_files import csv_of, json_of


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_parts_of_parts_have_columns_of_their_own_and_the_unknown_is_empty() -> None:
    rank = RankMemory(3, 1, (1, 5), 2, 77, None, None, None, InFlight(4, 3), None)
    (row,) = read(csv_of([rank]))
    assert (row["rank"], row["stages"], row["peak_bytes"], row["kind"]) == ("3", "1 5", "77", "")
    assert (row["in_flight_planned"], row["in_flight_measured"]) == ("4", "3")


def test_json_keeps_the_structure_of_the_report() -> None:
    rows = json.loads(json_of([Cause("jitter", {"rank": 2}, -5)]))
    assert rows == [{"cause": "jitter", "where": {"rank": 2}, "ns": -5, "reason": None}]
    assert read(csv_of([Cause("jitter", {"rank": 2}, -5)])) == [
        {"cause": "jitter", "where": "rank 2", "ns": "-5", "reason": ""}
    ]


def test_rows_with_other_columns_share_one_table() -> None:
    rows: list[Any] = [{"a": 1}, {"a": 2, "b": "x, y"}]
    assert read(csv_of(rows)) == [{"a": "1", "b": ""}, {"a": "2", "b": "x, y"}]
    assert (csv_of([]), json.loads(json_of([]))) == ("\n", [])


@pytest.mark.parametrize("name", ["=1+1", "+1", "@SUM(A1)", "-1+cmd", "\t=1"])
def test_no_name_of_a_trace_is_a_formula_of_a_spreadsheet(name: str) -> None:
    (row,) = read(csv_of([{"name": name, "ns": -3}]))
    assert row == {"name": f"'{name}", "ns": "-3"}
    assert json.loads(json_of([{"name": name}])) == [{"name": name}]
