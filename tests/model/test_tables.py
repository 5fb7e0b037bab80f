"""Tables of a run: texts as categories, parts joined without a copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pptrace.ingest.op_tables.rows import Reader
from pptrace.model.join_tables import concat_tables, join_adjacent
from pptrace.model.tables import (
    COMMS,
    OPS,
    as_category,
    category_of_codes,
    empty_table,
    make_table,
    same_category,
    with_categories,
    without_categories,
)


def ops(count: int) -> pd.DataFrame:
    numbers = {name: np.arange(count) for name, dtype in OPS.items() if dtype == "int64"}
    texts = {name: np.array(["", name] * count, dtype=object)[:count] for name, dtype in OPS.items() if dtype == "str"}
    return make_table(OPS, numbers | texts)


def test_parts_of_one_table_are_joined_without_a_copy() -> None:
    table = with_categories(ops(9))
    parts = [table.iloc[2:4].reset_index(drop=True), table.iloc[4:8], table.iloc[8:]]
    joined = join_adjacent(parts)
    pd.testing.assert_frame_equal(joined, table.iloc[2:].reset_index(drop=True))
    for name in ("step", "start_ns"):
        assert np.shares_memory(joined[name].to_numpy(), table[name].to_numpy())
    assert np.shares_memory(joined["kind"].array.codes, table["kind"].array.codes)


def test_time_for_texts_grows_with_their_number_and_not_with_its_square() -> None:
    """With a search among all categories for each text it took five seconds and more."""
    texts = np.array([f"{number}" for number in range(30_000)], dtype=object)
    begin = time.process_time()
    columns = [
        as_category(texts),
        category_of_codes(np.arange(len(texts)), texts.tolist()),
        Reader(Path("ops.csv"), pd.DataFrame({"step": texts})).texts("step"),
    ]
    assert time.process_time() - begin < 2
    for column in columns:
        assert np.array_equal(np.asarray(column), texts)


@pytest.mark.parametrize(
    "order", [[(0, 3), (4, 9)], [(3, 9), (0, 3)], [(0, 3), (0, 3)]], ids=["gap", "reversed", "again"]
)
def test_other_parts_are_copied_behind_each_other(order: list[tuple[int, int]]) -> None:
    table = with_categories(ops(9))
    parts = [table.iloc[first:last] for first, last in order]
    joined = join_adjacent(parts)
    pd.testing.assert_frame_equal(joined, pd.concat(parts, ignore_index=True))
    assert not np.shares_memory(joined["step"].to_numpy(), table["step"].to_numpy())


def test_tables_with_other_texts_are_joined_too() -> None:
    first, second = with_categories(ops(4)), with_categories(ops(4).assign(kind="B"))
    joined = join_adjacent([first, second])
    assert joined["kind"].tolist() == [*first["kind"], *"BBBB"]
    assert with_categories(joined)["kind"].tolist() == joined["kind"].tolist()


def test_categories_are_in_alphabetical_order_with_the_usual_texts_of_a_column() -> None:
    comms = with_categories(empty_table(COMMS))
    assert comms["direction"].cat.categories.tolist() == ["", "B", "F"]
    column = as_category(np.array(["send", "recv", "send"], dtype=object), ("",))
    assert (column.tolist(), column.categories.tolist()) == (["send", "recv", "send"], ["", "recv", "send"])
    lacking = with_categories(pd.DataFrame({"direction": same_category("F", 2)}))
    assert (lacking["direction"].tolist(), lacking["direction"].cat.categories.tolist()) == (["F", "F"], ["", "B", "F"])


def test_codes_become_the_categories_that_their_texts_would() -> None:
    texts, codes = ("recv", "send", "barrier", "send"), np.array([1, 0, 3, 1])
    column = category_of_codes(codes, texts, ("",))
    expected = as_category(np.array([texts[code] for code in codes], dtype=object), ("",))
    assert (column.tolist(), column.categories.tolist()) == (expected.tolist(), expected.categories.tolist())
    assert category_of_codes(codes[:0], texts).tolist() == []


@pytest.mark.parametrize("join", [join_adjacent, concat_tables])
def test_categories_stay_categories_where_tables_have_others(join: Callable[..., pd.DataFrame]) -> None:
    first, second = with_categories(ops(4)), with_categories(ops(4).assign(kind="B"))
    joined = join([first, second])
    assert joined["kind"].cat.categories.tolist() == sorted({*first["kind"], "B"})
    assert joined["step"].dtype == "int64"
    mixed = join([first, ops(4).assign(kind="B")])
    assert (mixed["kind"].tolist(), mixed["kind"].dtype) == (joined["kind"].tolist(), object)


def test_a_table_for_users_has_texts_again() -> None:
    table = without_categories(with_categories(ops(3)))
    pd.testing.assert_frame_equal(table, ops(3))


def test_a_table_beside_empty_ones_is_not_copied() -> None:
    table = ops(3)
    alone = concat_tables([empty_table(OPS), table, None])
    pd.testing.assert_frame_equal(alone, table)
    assert np.shares_memory(alone["step"].to_numpy(), table["step"].to_numpy())


@pytest.mark.parametrize("values", [(7, 7), (7, 8)])
def test_columns_of_one_value_are_joined_whether_the_values_are_the_same_or_not(values: tuple[int, int]) -> None:
    parts = [pd.DataFrame({"bytes": np.broadcast_to(np.int64(value), 3)}, copy=False) for value in values]
    joined = join_adjacent(parts)["bytes"].to_numpy()
    assert joined.tolist() == [values[0]] * 3 + [values[1]] * 3
    assert (joined.strides == (0,)) == (values[0] == values[1]), "one value takes no memory"


def test_columns_of_tables_that_are_no_parts_of_one_are_joined_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [with_categories(ops(count)) for count in (3, 4)]
    expected = pd.concat(tables, ignore_index=True)
    monkeypatch.delattr(pd, "concat")  # takes twice as long for columns of a small trace
    pd.testing.assert_frame_equal(join_adjacent(tables), expected)
