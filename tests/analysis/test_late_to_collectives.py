"""Times in which the members of a collective wait for one rank alone, of tables by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pptrace.analysis.steps.plain_steps import times_waited_for
from pptrace.model.tables import COMMS, empty_table


def comms(*rows: tuple[int, int, int, int], kind: str = "all_reduce", size: int = 3) -> pd.DataFrame:
    """Rows of (match, rank, start, asked), which end at 1,000."""
    match, rank, start, asked = zip(*rows, strict=True)
    columns = {"match": match, "rank": rank, "start_ns": start, "posted_ns": start, "asked_ns": asked, "end_ns": 1_000}
    columns |= {"group_size": size, "kind": kind}
    table = empty_table(COMMS).reindex(range(len(rows)))
    return table.assign(**{name: list(value) if isinstance(value, tuple) else value for name, value in columns.items()})


def found(
    table: pd.DataFrame, uncertainty_ns: int = 0, computes: dict[int, list[list[int]]] | None = None
) -> dict[int, list[list[int]]]:
    sets = {rank: np.array(times) for rank, times in (computes or {}).items()}
    return {rank: times.tolist() for rank, times in times_waited_for(table, uncertainty_ns, sets).items()}


def test_a_rank_is_waited_for_from_when_the_next_one_asks_until_it_comes() -> None:
    assert found(comms((0, 0, 10, 10), (0, 1, 20, 45), (0, 2, 100, 100))) == {2: [[45, 100]]}
    assert found(comms((0, 0, 10, 10), (0, 1, 20, 120), (0, 2, 100, 100))) == {}, "compute hid it"


def test_collectives_under_way_at_once_are_waited_for_once() -> None:
    first, second = [(0, 0, 10, 50), (0, 1, 90, 95)], [(1, 0, 40, 40), (1, 1, 110, 110)]
    third = [(2, 0, 300, 300), (2, 1, 200, 200)]
    assert found(comms(*first, *second, *third, size=2)) == {1: [[40, 110]], 0: [[200, 300]]}


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_messages_and_collectives_of_which_a_member_has_no_trace_tell_nothing(kind: str) -> None:
    rows = ((0, 0, 10, 10), (0, 1, 90, 90))
    assert found(comms(*rows, kind=kind, size=2)) == {}
    assert found(comms(*rows, size=3)) == {}
    assert found(comms((-1, 0, 10, 10), (-1, 1, 90, 90), size=2)) == {}
    assert found(empty_table(COMMS)) == {}


@pytest.mark.parametrize(("uncertainty", "is_late"), [(39, True), (40, False)])
def test_what_the_clocks_may_make_up_is_not_late(uncertainty: int, is_late: bool) -> None:
    assert bool(found(comms((0, 0, 10, 10), (0, 1, 90, 90), size=2), uncertainty)) is is_late


def test_a_call_that_returns_at_its_end_waits_from_its_begin() -> None:
    table = comms((0, 0, 10, 1_000), (0, 1, 100, 1_000), size=2).assign(posted_ns=1_000)
    assert found(table) == {1: [[10, 100]]}
