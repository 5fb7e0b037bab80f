"""Arguments of communication events: lists of ranks that torch shortened."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.ingest.conftest import Op, Write
from tests.support.read import read_kineto


def ranks_read(
    write: Write, op: Op, text: str, size: int, distributed: dict[str, Any] | None = None
) -> list[int] | None:
    args = {"Collective name": "allreduce", "Process Group Ranks": text, "Group size": size, "Process Group Name": "7"}
    events = [op(name="record_param_comms", args=args), op(name="record_param_comms", args=args)]
    result = (
        read_kineto(write(events, after={"distributedInfo": distributed or {}}))
        .events.comm_args["group_ranks"]
        .tolist()
    )
    assert len(result) == 2
    assert result[0] == result[1]
    return json.loads(result[0]) if result[0] else None


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        ("[0, 2, 4, 6, ..., 126]", 64, list(range(0, 128, 2))),
        ("[5, 6, 7, ..., 44]", 40, list(range(5, 45))),
        ("[0, 2, 4, 6, ..., 127]", 64, None),  # the last is not where the distance leads
        ("[0, 2, 5, 6, ..., 126]", 64, None),
        ("[8, 4, ..., 0]", 3, None),
        ("[0, 1, ..., 9]", -1, None),
    ],
)
def test_a_shortened_list_is_whole_again_where_its_ranks_have_one_distance(
    write: Write, op: Op, text: str, size: int, expected: list[int] | None
) -> None:
    assert ranks_read(write, op, text, size) == expected


def test_a_configured_list_may_be_a_text(write: Write, op: Op) -> None:
    info = {"pg_config": [{"pg_name": "7", "ranks": "[3, 9, 11]"}]}
    assert ranks_read(write, op, "", 3, info) == [3, 9, 11]


@pytest.mark.parametrize(
    ("sent", "received", "expected"),
    [
        ("[3, 7]", "[3, 1]", "3,7>3,1"),
        ("[3]", "[4]", "3>4"),
        ("[]", "[]", ""),  # equal parts
        ("[3, 7]", "[3, 1, 4]", ""),
        ("[1, 2, ...]", "[3, 4, ...]", ""),  # more than 30 are not all there
        ("[-1, 2]", "[3, 4]", ""),
    ],
)
def test_splits_of_all_to_alls_are_read(write: Write, op: Op, sent: str, received: str, expected: str) -> None:
    kernel = {"Collective name": "all_to_allv", "In split size": sent, "Out split size": received, "Group size": 2}
    inputs = ["", "", "", received, sent, "False", "-1"]
    shapes = {
        "Input Dims": [[4], [10], [], [], [], [], []],
        "Input type": ["float", "float", "", *["ScalarList"] * 2, "Scalar", "Scalar"],
    }
    events = [
        op(name="record_param_comms", args=kernel),
        op(name="c10d::alltoall_base_", args=shapes | {"Concrete Inputs": inputs}),
    ]
    assert read_kineto(write(events)).events.comm_args["splits"].tolist() == [expected] * 2
