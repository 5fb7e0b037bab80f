"""A collective that names no group is of the one whose members were in it together, by the one clock of their host."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pptrace.model.tables import CALLS
from pptrace.recognise.groups.calls_by_time import with_groups_by_time
from pptrace.recognise.groups.usage import When
from tests.support.groups import facts_of_groups
from tests.support.tables import table_of

Groups = Sequence[Sequence[int]]
DP_AND_TP: Groups = [[0, 1], [2, 3], [0, 2], [1, 3]]
SECOND = 1_000_000_000


def job(groups: Groups, world: int) -> dict[int, dict[str, Any]]:
    return dict(facts_of_groups(world, [range(world), *groups]))


def ran(
    turn: Groups, world: int, seed: int, late_ns: int, turns: int = 8, kind: str = "all_reduce"
) -> tuple[dict[int, pd.DataFrame], dict[int, list[str]]]:
    """The calls of ranks that compute before each collective, some up to ``late_ns`` longer; and the group of each call."""
    chance = random.Random(seed)
    now = [SECOND] * world
    rows: dict[int, list[dict[str, object]]] = {rank: [] for rank in range(world)}
    truth: dict[int, list[str]] = {rank: [] for rank in range(world)}
    for ranks in list(turn) * turns:
        starts = {rank: now[rank] + 100_000 + chance.randrange(late_ns + 1) for rank in ranks}
        for rank, start in starts.items():
            end = max(starts.values()) + 100_000 + chance.randrange(50_000)
            row = {"kind": kind, "bytes": 4, "clock": "host", "start_ns": start, "end_ns": end, "peer": -1}
            rows[rank].append(row)
            truth[rank].append(str(list(ranks)))
            now[rank] = end
    return {rank: table_of(CALLS, of_rank) for rank, of_rank in rows.items()}, truth


def filled_of(
    calls: dict[int, pd.DataFrame],
    facts: dict[int, dict[str, Any]],
    one_clock: bool = True,
) -> tuple[Mapping[int, pd.DataFrame], tuple[str, ...]]:
    return with_groups_by_time(calls, facts, lambda _, other: one_clock)


def found(calls: dict[int, pd.DataFrame], truth: dict[int, list[str]], groups: Groups, one_clock: bool = True) -> int:
    """Number of calls with a group; each has the right one."""
    filled, lines = filled_of(calls, job(groups, len(calls)), one_clock)
    count = 0
    for rank, table in filled.items():
        for group, right in zip(table["group_ranks"], truth[rank], strict=True):
            assert group in ("", right)
            count += group != ""
    assert bool(lines) == bool(count)
    return count


@pytest.mark.parametrize("seed", range(8))
def test_collectives_of_equal_size_are_of_the_group_whose_members_were_in_them_together(seed: int) -> None:
    assert found(*ran(DP_AND_TP, 4, seed, 20_000_000), DP_AND_TP) > 16
    assert found(*ran([[0, 2], [1, 3]], 4, seed, 20_000_000), DP_AND_TP) > 16


@pytest.mark.parametrize("seed", range(8))
def test_one_group_of_three_of_four_ranks_after_another_is_never_wrong(seed: int) -> None:
    triples = [list(ranks) for ranks in combinations(range(4), 3)]
    found(*ran(triples, 4, seed, 20_000_000), [*triples, *DP_AND_TP])


def test_ranks_that_are_always_together_leave_the_group_open() -> None:
    calls, truth = ran([[0, 2], [1, 3]], 4, 0, late_ns=0)
    assert found(calls, truth, DP_AND_TP) == 0


@pytest.mark.parametrize("named", [{"group_ranks": "[0, 2]"}, {"group_id": "3"}])
def test_calls_that_tell_their_group_tell_that_of_their_other_sides(named: dict[str, str]) -> None:
    calls, _ = ran([[0, 2], [1, 3]], 4, 0, late_ns=0)
    filled, _ = filled_of(calls | {2: calls[2].assign(**named)}, job(DP_AND_TP, 4))
    assert set(filled[0]["group_ranks"]) == {"[0, 2]"}


def test_ranks_of_several_clocks_leave_the_group_open() -> None:
    calls, truth = ran([[0, 2], [1, 3]], 4, 0, 20_000_000)
    assert found(calls, truth, DP_AND_TP, one_clock=False) == 0


@pytest.mark.parametrize(("ranks", "off"), [((2, 3), SECOND), ((3,), SECOND // 5)])
def test_a_clock_that_contradicts_every_group_of_a_call_leaves_all_open(ranks: tuple[int, ...], off: int) -> None:
    calls, truth = ran([[0, 2], [1, 3]], 4, 0, 20_000_000, turns=40)
    shifted = calls | {
        rank: calls[rank].assign(start_ns=calls[rank]["start_ns"] + off, end_ns=calls[rank]["end_ns"] + off)
        for rank in ranks
    }
    assert found(shifted, truth, DP_AND_TP) == 0


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_collectives_that_some_may_leave_early_stay_open(kind: str) -> None:
    assert found(*ran([[0, 2], [1, 3]], 4, 0, 20_000_000, kind=kind), DP_AND_TP) == 0


def test_calls_while_another_member_was_not_recorded_stay_open() -> None:
    calls, truth = ran([[0, 2], [1, 3]], 4, 0, 20_000_000)
    calls, truth = calls | {2: calls[2].iloc[3:]}, truth | {2: truth[2][3:]}
    filled, _ = filled_of(calls, job(DP_AND_TP, 4))
    assert filled[0]["group_ranks"].tolist()[:3] == ["", "", ""]
    assert found(calls, truth, DP_AND_TP) > 8, "the others are known"


def test_ranks_in_one_group_alone_stay_as_they_are() -> None:
    calls, _ = ran([[0, 1]], 2, 0, 20_000_000)
    assert filled_of(calls, job([], 2)) == (calls, ())


def test_the_other_side_of_a_call_may_be_in_one_group_alone() -> None:
    calls, truth = ran([[0, 1, 2], [0, 2]], 3, 0, 20_000_000)
    filled, _ = filled_of(calls, job([[0, 2]], 3))
    assert set(filled[1]["group_ranks"]) == {""}
    assert {"[0, 1, 2]", "[0, 2]"} < set(filled[0]["group_ranks"])
    assert all(group in ("", right) for group, right in zip(filled[0]["group_ranks"], truth[0], strict=True))


def test_the_calls_of_a_rank_in_a_group_that_does_not_tell_its_ranks_stay_open() -> None:
    calls, truth = ran(DP_AND_TP, 4, 0, 20_000_000)
    facts = job(DP_AND_TP, 4)
    facts[0]["pg_config"] += [{"pg_name": "9", "pg_size": 3}]
    filled, _ = filled_of(calls, facts)
    assert set(filled[0]["group_ranks"]) == {""}
    assert "[1, 3]" in set(filled[3]["group_ranks"])
    assert all(group in ("", right) for group, right in zip(filled[3]["group_ranks"], truth[3], strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_where_many_calls_can_be_of_groups_of_one_shape_alone_all_are(seed: int) -> None:
    calls, truth = ran([[0, 2], [1, 3]], 4, seed, 2_000_000, turns=40)
    assert found(calls, truth, DP_AND_TP) == 160


@pytest.mark.parametrize("seed", range(8))
def test_calls_before_the_update_are_told_apart_from_those_of_forwards(seed: int) -> None:
    calls, truth = ran([*[[0, 1], [2, 3]] * 6, [0, 2], [1, 3]], 4, seed, 2_000_000, turns=20)
    parts = {rank: np.array([group in ("[0, 2]", "[1, 3]") for group in of_rank]) for rank, of_rank in truth.items()}
    assert found(calls, truth, DP_AND_TP) < 560, (
        "calls of both shapes, in one part of the step for all that is known, leave some open"
    )
    with_times = {
        rank: table.assign(backward=np.where(parts[rank], When.BEFORE_UPDATE, When.IN_FORWARD))
        for rank, table in calls.items()
    }
    filled, _ = filled_of(with_times, job(DP_AND_TP, 4))
    assert {rank: table["group_ranks"].tolist() for rank, table in filled.items()} == truth


@pytest.mark.parametrize("turn", [[[0, 2], [1, 3]], [[rank] for rank in range(4)]])
def test_ranks_that_are_in_all_calls_together_are_not_alone_in_their_groups(turn: Groups) -> None:
    calls, truth = ran(turn, 4, 0, 2_000_000, turns=40)
    assert found(calls, truth, [[0, 2], [1, 3], *[[rank] for rank in range(4)]]) == 160


def test_groups_whose_members_made_unequal_numbers_of_calls_stay_open() -> None:
    calls, truth = ran([[0, 2], [1, 3]], 4, 0, 2_000_000, turns=40)
    filled, _ = filled_of(calls | {3: calls[3].iloc[3:]}, job(DP_AND_TP, 4))
    assert filled[0]["group_ranks"].tolist() == truth[0]
    assert filled[1]["group_ranks"].tolist()[:3] == ["", "", ""]
