"""Parts of tables against frames."""

from __future__ import annotations

import pickle
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.slices import (
    are_of,
    distinct_rows,
    group_codes,
    last_like,
    rows_among,
    rows_where,
    slice_of,
    slices,
    slices_by_rank,
)

rows = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["F", "B", "W"]), st.integers(-5, 5)), max_size=20)


def table_of(result: list[tuple[int, str, int]]) -> pd.DataFrame:
    return pd.DataFrame(result, columns=["rank", "kind", "start_ns"]).astype({"rank": "int64", "start_ns": "int64"})


@given(rows)
def test_slices_are_the_rows_of_each_combination_in_their_order(result: list[tuple[int, str, int]]) -> None:
    parts = slices(table_of(result), ("rank", "kind"))
    assert {key: part["start_ns"].tolist() for key, part in parts.items()} == {
        key: [time for rank, kind, time in result if (rank, kind) == key] for key in {row[:2] for row in result}
    }


@given(rows)
def test_a_slice_is_ordered_and_parted_by_its_columns(result: list[tuple[int, str, int]]) -> None:
    whole = slice_of(table_of(result))
    ordered = whole.in_order_of("start_ns")
    assert list(zip(*ordered.columns.values(), strict=True)) == sorted(result, key=lambda row: row[2])
    assert [(rank, len(part)) for rank, part in whole.by("rank").items()] == [
        (rank, sum(row[0] == rank for row in result)) for rank in sorted({row[0] for row in result})
    ]
    assert whole.among("kind", ("F", "W")).tolist() == [kind != "B" for _, kind, _ in result]


numbers = st.integers(-3, 3)


@given(st.lists(st.tuples(numbers, numbers, st.sampled_from(["", "b", "a"])), max_size=12))
def test_codes_of_groups_are_equal_for_equal_rows_and_for_no_others(rows: list[tuple[int, int, str]]) -> None:
    table = pd.DataFrame(rows, columns=["x", "y", "text"]).astype({"x": "int64", "y": "int64", "text": "object"})
    for texts in (table["text"], table["text"].astype("category")):
        codes = group_codes([table["x"], texts, table["y"] * 2**61]).tolist()
        for (code, row), (other_code, other) in product(zip(codes, rows, strict=True), repeat=2):
            assert (code == other_code) == (row == other)


@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=12))
def test_rows_of_each_number_come_in_order_and_without_a_copy_where_they_are(rows: list[tuple[int, int, int]]) -> None:
    table = pd.DataFrame(rows, columns=["rank", "step", "start"], dtype="int64")
    parts = slices_by_rank(table, ("step", "start"))
    assert list(parts) == sorted({rank for rank, _, _ in rows})
    for rank, part in parts.items():
        result = list(zip(part["rank"].tolist(), part["step"].tolist(), part["start"].tolist(), strict=True))
        assert result == sorted((row for row in rows if row[0] == rank), key=lambda row: row[1:])
    ordered = table.sort_values(["rank", "step", "start"]).reset_index(drop=True)
    for part in slices_by_rank(ordered, ("step", "start")).values():
        assert np.shares_memory(part["step"], ordered["step"].to_numpy())


@pytest.mark.parametrize("kind", ["object", "category"])
def test_codes_of_a_column_count_its_values_in_ascending_order(kind: str) -> None:
    rows = slice_of(pd.DataFrame({"text": pd.Series(["b", "a", "b", ""], dtype=kind)})).where(slice(0, 3))
    codes, values = rows.codes("text")
    assert (codes.tolist(), values) == ([1, 0, 1], ("a", "b"))


def test_texts_are_compared_and_chosen_like_those_of_the_table() -> None:
    texts = ["b", "a", "b", ""]
    rows = slice_of(pd.DataFrame({"text": pd.Series(texts, dtype="category")}))
    assert [rows["text"][row] for row in range(4)] == rows["text"].tolist() == texts
    assert (rows["text"] == "b").tolist() == [True, False, True, False]
    assert (rows["text"] != "b").tolist() == [False, True, False, True]
    assert not (rows["text"] == "c").any()
    assert rows.where(np.array([False, True, True, False]))["text"].tolist() == ["a", "b"]


def test_chosen_rows_travel_without_the_rest_of_their_table() -> None:
    rows = slice_of(pd.DataFrame({"x": np.arange(100_000), "y": np.arange(100_000)}))
    sent = pickle.dumps(rows.where(np.array([7, 3])))
    assert len(sent) < 10_000
    received = pickle.loads(sent)
    assert (received["x"].tolist(), received["y"].tolist()) == ([7, 3], [7, 3])


def test_a_mask_that_chooses_all_rows_gives_the_table_itself() -> None:
    table = pd.DataFrame({"x": [1, 2]})
    assert rows_where(table, table["x"] > 0) is table
    assert rows_where(table, table["x"] > 1)["x"].tolist() == [2]


pairs = st.lists(st.tuples(numbers, numbers), max_size=12)


@given(pairs, pairs)
def test_the_last_row_like_another_is_found_by_all_its_columns(
    wanted: list[tuple[int, int]], known: list[tuple[int, int]]
) -> None:
    columns = [list(np.array(rows, dtype=np.int64).reshape(-1, 2).T) for rows in (wanted, known)]
    last = {row: index for index, row in enumerate(known)}
    assert last_like(*columns).tolist() == [last.get(row, -1) for row in wanted]


@given(pairs)
def test_every_row_is_like_the_distinct_row_of_its_number(rows: list[tuple[int, int]]) -> None:
    distinct, index = distinct_rows(np.array(rows, dtype=np.int64).reshape(-1, 2))
    assert sorted(map(tuple, distinct)) == sorted(set(rows))
    assert [tuple(distinct[number]) for number in index.tolist()] == rows


@pytest.mark.parametrize("dtype", [object, "category"])
def test_rows_among_are_those_of_isin(dtype: str) -> None:
    column = pd.Series(["F", "B", "", "W", "F"], dtype=dtype)
    for values in (("F",), ("W", "B", "I"), ("I",), ()):
        assert rows_among(column, values).tolist() == column.isin(values).tolist()
    assert rows_among(column.iloc[:0], ("F",)).tolist() == []


@given(st.lists(st.integers(-(2**62), 2**62) | numbers, max_size=12), st.lists(st.integers() | numbers, max_size=12))
def test_numbers_are_found_among_dense_ones_and_sparse_ones(values: list[int], known: list[int]) -> None:
    known = [number for number in known if abs(number) <= 2**62]
    found = are_of(np.array(values, dtype=np.int64), np.array(known, dtype=np.int64))
    assert found.tolist() == [value in known for value in values]
