"""docs/compare.md describes every field of the comparison, and its measured table keeps what is promised."""

from __future__ import annotations

import json
import re
from typing import Any

import pptrace
from tests.support.programs import ROOT, SAMPLES
from tools.compare_table import BEGIN, END, HEADER, NOISES, SLEEPING_BEGIN, SLEEPING_END, pairs_of
from tools.marked_tables import MarkedTable

PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
LEAST_FOUND = {
    "ops 3 %, and steps 1 % with correlation 0.7": 0.85,  # knowing the correlation exactly one finds 0.92
    "ops 3 %, and runs 1.5 %; five runs of each": 0.35,  # of five runs t finds 0.45
}


def described() -> set[str]:
    """The names in code in the table of the JSON, and those of the parts."""
    tables = [line for line in PAGE.splitlines() if line.startswith("| `")]
    return {name.removesuffix("[]") for line in tables for name in re.findall(r"`([\w\[\]]+)`", line)}


def fields_of(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(fields_of, value))
    if not isinstance(value, dict):
        return set()
    return set(value).union(*(fields_of(member) for name, member in value.items() if name != "where"))


def test_every_field_and_part_is_described() -> None:
    written = json.loads(pptrace.compare(SAMPLES / "1f1b_p2", SAMPLES / "1f1b_p4").to_json())
    assert fields_of(written) <= described()
    for part in written["parts"]:
        assert f"| `{part['name']}` |" in PAGE
        assert set(part["where"]) <= described()


def test_the_measured_table_has_every_noise_with_few_alarms_and_almost_all_changes_found() -> None:
    for markers in ((BEGIN, END), (SLEEPING_BEGIN, SLEEPING_END)):
        assert MarkedTable(ROOT / "docs" / "compare.md", *markers).replaced("", PAGE)
    table = PAGE.partition(BEGIN)[2].partition(END)[0]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines())
    assert tuple(head) == HEADER
    assert [row[0] for row in rows] == list(NOISES)
    for noise, steps, pairs, alarms, _, found, _ in rows:
        assert (steps, int(pairs)) == ("50", pairs_of(NOISES[noise], 100))
        assert int(alarms) <= 0.05 * int(pairs)
        assert int(found) >= LEAST_FOUND.get(noise, 0.95) * int(pairs)
