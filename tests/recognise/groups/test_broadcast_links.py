"""A pipeline that sends by broadcasts in groups of two is named in a line; replicas and other pipelines are not."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pandas as pd
import pytest

from pptrace.model.tables import CALLS
from pptrace.recognise.groups.broadcast_links import line_of_broadcast_links
from tests.support.tables import table_of

CHAIN = [[0, 1], [1, 2]]


def job(groups: Sequence[Sequence[int]], world: int) -> dict[int, dict[str, object]]:
    entries = [
        {"pg_name": str(index), "pg_desc": "undefined", "ranks": list(ranks), "pg_size": len(ranks)}
        for index, ranks in enumerate([list(range(world)), *groups])
    ]
    return {rank: {"pg_config": [entry for entry in entries if rank in entry["ranks"]]} for rank in range(world)}  # type: ignore[operator]


def made(groups: Sequence[Sequence[int]], world: int, named: bool) -> dict[int, pd.DataFrame]:
    """By rank its broadcasts, with or without their groups."""
    rows: dict[int, list[dict[str, object]]] = {rank: [] for rank in range(world)}
    for index, ranks in enumerate(groups):
        group = {"group_id": str(index + 1), "group_ranks": json.dumps(list(ranks)), "group_size": len(ranks)}
        for rank in ranks:
            rows[rank].append({"kind": "broadcast", "clock": "host", "peer": -1, **(group if named else {})})
    return {rank: table_of(CALLS, of_rank) for rank, of_rank in rows.items()}


@pytest.mark.parametrize("named", [True, False])
def test_broadcasts_along_a_chain_are_told(named: bool) -> None:
    (line,) = line_of_broadcast_links(made(CHAIN, 3, named), job(CHAIN, 3))
    assert line.startswith("ranks 0 to 2 broadcast in groups of two along a chain and send no messages")


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 1], [2, 3], [0, 2], [1, 3]], [[0, 1, 2, 3]], [[0, 1]]])
@pytest.mark.parametrize("named", [True, False])
def test_groups_that_form_no_chain_are_not_told(groups: list[list[int]], named: bool) -> None:
    assert line_of_broadcast_links(made(groups, 4, named), job(groups, 4)) == ()


def test_a_run_with_messages_is_not_told() -> None:
    calls = made(CHAIN, 3, True)
    message = table_of(CALLS, [{"kind": "send", "peer": 1}])
    assert line_of_broadcast_links(calls | {0: pd.concat([calls[0], message])}, job(CHAIN, 3)) == ()
