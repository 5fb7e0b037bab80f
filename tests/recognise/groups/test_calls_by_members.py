"""A collective that names no group, as gloo's in a plain trace, is of the group whose members all make such calls."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from pptrace.model.tables import CALLS
from pptrace.recognise.groups.calls_by_members import with_groups_by_members
from tests.support.groups import facts_of_groups
from tests.support.tables import table_of

ALL, ENDS = [0, 1, 2], [0, 2]
Call = tuple[str, int]


def made(*calls: Call, **named: object) -> pd.DataFrame:
    """These calls of a host, eight times in turn."""
    rows = [
        {"kind": kind, "bytes": size, "clock": "host", "start_ns": index, "end_ns": index + 1, **named}
        for index, (kind, size) in enumerate(calls * 8)
    ]
    return table_of(CALLS, rows)


def groups_of(calls: dict[int, pd.DataFrame], *groups: Sequence[int]) -> dict[int, list[str]]:
    """By rank the groups of the calls of a turn."""
    filled, _ = with_groups_by_members(calls, facts_of_groups(3, groups))
    turns = {rank: table["group_ranks"].tolist()[: len(table) // 8] for rank, table in filled.items()}
    assert all(table["group_ranks"].tolist() == turns[rank] * 8 for rank, table in filled.items())
    return turns


LOSS, GRADIENTS = ("all_reduce", 4), ("all_reduce", 6144)


def test_a_rank_in_one_group_tells_which_calls_of_the_others_are_of_it() -> None:
    calls = {0: made(GRADIENTS, LOSS), 1: made(LOSS), 2: made(GRADIENTS, LOSS)}
    result = groups_of(calls, ALL, ENDS)
    assert result[0] == result[2] == ["[0, 2]", "[0, 1, 2]"]
    _, lines = with_groups_by_members(calls, facts_of_groups(3, [ALL, ENDS]))
    assert lines == ("32 collectives without a recorded group are of the one whose members all make such calls",)


def test_groups_of_one_set_of_ranks_are_one() -> None:
    calls = {0: made(GRADIENTS, LOSS), 1: made(LOSS), 2: made(GRADIENTS, LOSS)}
    assert groups_of(calls, ALL, ALL, ENDS, ENDS)[0] == ["[0, 2]", "[0, 1, 2]"]


def test_calls_that_may_be_of_several_groups_stay_open() -> None:
    pairs = ([0, 1], [1, 2], [0, 2])
    calls = {rank: made(LOSS) for rank in range(3)}
    assert groups_of(calls, *pairs) == {0: [""], 1: [""], 2: [""]}
    assert with_groups_by_members(calls, facts_of_groups(3, pairs))[0] is calls


def test_more_calls_than_a_group_can_have_made_stay_open() -> None:
    calls = {0: made(LOSS, LOSS), 1: made(LOSS), 2: made(LOSS, LOSS)}
    assert groups_of(calls, ALL, ENDS)[0] == ["", ""]


def test_a_member_without_a_trace_excludes_nothing() -> None:
    calls = {0: made(GRADIENTS), 2: made(GRADIENTS)}
    assert groups_of(calls, ALL, ENDS) == {0: [""], 2: [""]}


def test_a_single_call_at_the_edge_of_a_recording_tells_nothing() -> None:
    calls = {0: made(LOSS).head(1), 1: made(LOSS).head(0), 2: made(LOSS).head(1)}
    filled, lines = with_groups_by_members(calls, facts_of_groups(3, [ALL, ENDS]))
    assert filled[0]["group_ranks"].tolist() == [""]
    assert lines == ()


@pytest.mark.parametrize("unsized", [0, 1])
def test_sizes_tell_calls_only_where_all_have_one(unsized: int) -> None:
    calls = {0: made(GRADIENTS, LOSS), 1: made(LOSS), 2: made(GRADIENTS, LOSS)}
    calls[unsized] = calls[unsized].assign(bytes=-1)
    assert groups_of(calls, ALL, ENDS)[0] == ["", ""]


def test_calls_that_name_their_group_stay_as_they_are() -> None:
    named = made(LOSS, group_id="7", group_ranks="[0, 2]", group_size=2)
    calls = {0: named, 1: made(LOSS).head(0), 2: made(LOSS)}
    filled, _ = with_groups_by_members(calls, facts_of_groups(3, [ALL, ENDS]))
    assert filled[0] is named
    assert set(filled[2]["group_ranks"]) == {"[0, 2]"}


def test_calls_cost_columns_and_no_objects() -> None:
    num_calls = 100_000
    one = made(GRADIENTS, LOSS)
    calls = {rank: one.iloc[np.arange(num_calls) % 16].reset_index(drop=True) for rank in (0, 2)}
    calls[1] = calls[0][calls[0]["bytes"] == LOSS[1]]
    tracemalloc.start()
    filled, _ = with_groups_by_members(calls, facts_of_groups(3, [ALL, ENDS]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert set(filled[0]["group_ranks"]) == {"[0, 2]", "[0, 1, 2]"}
    assert peak < 100 * sum(map(len, calls.values()))
