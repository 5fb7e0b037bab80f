"""Messages of which a pipeline's rank has one end and a rank without ops the other are matched, however both count steps."""

from __future__ import annotations

import pandas as pd
import pytest

from pptrace.model.tables import COMMS
from pptrace.recognise.messages.kernels_from_plan import match_between
from tests.support.tables import table_of


def messages(kind: str, rank: int, peer: int, sizes: list[int], step: int) -> pd.DataFrame:
    rows = [
        {"rank": rank, "kind": kind, "peer": peer, "axis": "pp", "bytes": size, "start_ns": index, "match": -1}
        for index, size in enumerate(sizes)
    ]
    return table_of(COMMS, [{**row, "step": step + index if step >= 0 else -1} for index, row in enumerate(rows)])


@pytest.mark.parametrize("swapped", [False, True])
def test_both_ends_meet_in_their_order(swapped: bool) -> None:
    tables = [messages("send", 2, 3, [4, 8, 4], -1), messages("recv", 3, 2, [4, 8, 4], 7)]
    first, second = reversed(tables) if swapped else tables
    taken = messages("send", 0, 1, [4], 0).assign(match=5)
    result = match_between(pd.concat([taken, first], ignore_index=True), second)
    assert result["match"].tolist() == [5, 6, 7, 8, 6, 7, 8]


def test_sizes_that_differ_leave_them_open() -> None:
    result = match_between(messages("send", 2, 3, [4, 8], -1), messages("recv", 3, 2, [8, 4], 7))
    assert set(result["match"]) == {-1}


def test_what_one_table_could_not_match_stays_open() -> None:
    both = pd.concat([messages("send", 2, 3, [4], 1), messages("recv", 3, 2, [4], 1)], ignore_index=True)
    assert set(match_between(both, messages("send", 0, 1, [4], 1))["match"]) == {-1}
    assert set(match_between(messages("send", 0, 1, [4], 1), both)["match"]) == {-1}
