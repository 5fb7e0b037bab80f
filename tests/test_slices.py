"""Parts of tables against frames."""

from __future__ import annotations

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from pptrace.slices import slice_of, slices

rows = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["F", "B", "W"]), st.integers(-5, 5)), max_size=20)


def table_of(found: list[tuple[int, str, int]]) -> pd.DataFrame:
    return pd.DataFrame(found, columns=["rank", "kind", "start_ns"]).astype({"rank": "int64", "start_ns": "int64"})


@given(rows)
def test_slices_are_the_rows_of_each_combination_in_their_order(found: list[tuple[int, str, int]]) -> None:
    parts = slices(table_of(found), ("rank", "kind"))
    assert {key: part["start_ns"].tolist() for key, part in parts.items()} == {
        key: [time for rank, kind, time in found if (rank, kind) == key] for key in {row[:2] for row in found}
    }


@given(rows)
def test_a_slice_is_ordered_and_parted_by_its_columns(found: list[tuple[int, str, int]]) -> None:
    whole = slice_of(table_of(found))
    ordered = whole.in_order_of("start_ns")
    assert list(zip(*ordered.columns.values(), strict=True)) == sorted(found, key=lambda row: row[2])
    assert [(rank, len(part)) for rank, part in whole.by("rank").items()] == [
        (rank, sum(row[0] == rank for row in found)) for rank in sorted({row[0] for row in found})
    ]
    assert whole.among("kind", ("F", "W")).tolist() == [kind != "B" for _, kind, _ in found]
