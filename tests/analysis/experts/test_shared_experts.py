"""Rows of experts that several ranks share (etp), by the splits of calls alone."""

from __future__ import annotations

import numpy as np
import pytest

from pptrace.analysis.aligned import RankRows
from pptrace.analysis.experts.exchanges import exchanges_of
from pptrace.intervals import EMPTY
from pptrace.slices import Slice

STEP, FORWARD = 2, (("ep", "3>5"), ("etp", "5,5>5,4"), ("etp", "5,4>5,5"), ("ep", "5>3"))
BACKWARD = (("ep", "3>7"), ("etp", "7,7>7,1"), ("etp", "7,1>7,7"), ("ep", "7>3"))
NO_OPS = Slice.empty("step", "stage", "microbatch", "start_ns", "end_ns", "kind", texts=("kind",))


def exchanges_in(calls: list[tuple[str, str]], ops: Slice = NO_OPS) -> Slice:
    """The exchanges that all-to-alls of one rank, one after another, are."""
    num = len(calls)
    start = 10 * np.arange(num)
    numbers = dict.fromkeys(("start_ns", "posted_ns", "asked_ns", "transfer_start_ns"), start)
    numbers |= dict.fromkeys(("end_ns", "transfer_end_ns"), start + 5)
    received = [8 * sum(map(int, splits.partition(">")[2].split(","))) if splits else 8 for _, splits in calls]
    sent = [8 * sum(map(int, splits.partition(">")[0].split(","))) if splits else 8 for _, splits in calls]
    columns = numbers | {"match": np.arange(num), "bytes": np.array(sent), "received_bytes": np.array(received)}
    columns |= {"step": np.full(num, STEP), "group_size": np.full(num, 2)}
    texts = {"kind": ["all_to_all"] * num, "axis": [axis for axis, _ in calls], "splits": [text for _, text in calls]}
    comms = Slice({**columns, **{name: np.array(of, dtype=object) for name, of in texts.items()}})
    return exchanges_of(0, RankRows(ops, NO_OPS, comms), [STEP], EMPTY)


def rows_of(calls: list[tuple[str, str]]) -> list[int]:
    """Rows of these exchanges."""
    return exchanges_in(calls)["rows"].tolist()


def test_a_rank_computes_what_came_to_all_that_share_its_experts() -> None:
    assert rows_of([*FORWARD, *BACKWARD]) == [9, 8]
    assert rows_of([call for call in (*FORWARD, *BACKWARD) if call[0] == "ep"]) == [5, 7]
    assert rows_of([*(call for call in FORWARD if call[0] == "ep"), *BACKWARD]) == [5, 8]
    once = [*FORWARD[:2], FORWARD[3], *BACKWARD[:2], BACKWARD[3]]
    assert rows_of(once) == [9, 8], "an all-to-all along etp before the experts alone"


def test_rows_are_not_known_where_the_calls_along_etp_do_not_tell_them() -> None:
    assert rows_of([(axis, "" if axis == "etp" else text) for axis, text in FORWARD]) == [-1]


@pytest.mark.parametrize("behind", [1, 2])
def test_of_calls_in_no_op_nothing_tells_the_layer_and_the_direction_however_many_an_op_without_a_stage_has(
    behind: int,
) -> None:
    numbers = {"step": STEP, "stage": -1, "microbatch": 0, "start_ns": 0, "end_ns": 20}
    columns = {name: np.array([number]) for name, number in numbers.items()}
    forward = Slice({**columns, "kind": np.array(["F"], dtype=object)})
    exchanges = exchanges_in([("ep", "3>5"), ("ep", "5>3")] * (1 + behind), forward)
    assert exchanges["op_output"].tolist() == [0, *[-1] * behind], "one in the forward, the others behind it"
    assert exchanges["layer"].tolist() == [0, *[-1] * behind]
    assert exchanges["backward"].tolist() == [0, *[-1] * behind]
    assert exchanges["again"].tolist() == [0, *[0] * behind]
