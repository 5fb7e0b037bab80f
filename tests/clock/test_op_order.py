"""Clocks from the order of ops and from the names of hosts, on single ops worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from pptrace.clock import Clock, ClockMethod, estimate_clock
from pptrace.clock.bounds import UNBOUNDED, Matrix
from pptrace.clock.same_host import drop_contradicted, from_op_order, pairs_of_same_host_name, with_op_ends
from pptrace.model.tables import OPS
from pptrace.model.traces import HOST_NAME
from tests.support.tables import Match, matched_comms, table_of
from tests.support.tables import named as named_rows

Op = tuple[int, str, int, int, int, int]
"""(rank, kind, stage, microbatch, start, end)."""


def ops_of(*rows: Op, clock: str = "device", step: int = 0, source: str = "label") -> pd.DataFrame:
    table = table_of(OPS, named_rows("rank kind stage microbatch start_ns end_ns", rows))
    return table.assign(clock=clock, step=step, source=source)


def nothing(num_ranks: int) -> Matrix:
    low = np.full((num_ranks, num_ranks), -UNBOUNDED, dtype=np.int64)
    np.fill_diagonal(low, 0)
    return low


def there_and_back(gap: int, moved: int = 0) -> pd.DataFrame:
    """F on rank 0 ends at 100 and F on rank 1 begins ``gap`` later; the same for B. Rank 1's clock shows ``moved`` more."""
    one = 100 + gap + moved
    return ops_of(
        (0, "F", 0, 3, 0, 100),
        (1, "F", 1, 3, one, one + 50),
        (1, "B", 1, 3, one + 60, one + 150),
        (0, "B", 0, 3, 250 + 2 * gap, 400),
    )


@pytest.mark.parametrize(
    ("moved", "offset", "error"),
    [(0, 0, 7), (7, 0, 14), (-7, 0, 14), (8, -1, 14), (-8, 1, 14), (21, -14, 14), (22, -22, 7), (5_000, -5_000, 7)],
)
def test_clocks_are_moved_as_far_as_the_order_demands_and_into_its_middle_where_they_are_of_another_host(
    moved: int, offset: int, error: int
) -> None:
    ops = there_and_back(7, moved)
    assert from_op_order([0, 1], nothing(2), ops, [(0, 1)]) == Clock(ClockMethod.OP_ORDER, {0: 0, 1: offset}, error)
    assert estimate_clock(comms_of(), [0, 1], {}, ops, [(0, 1)]).method is ClockMethod.OP_ORDER
    first = from_op_order([0, 1], nothing(2), ops.assign(microbatch=0), [(0, 1)])
    assert first == Clock(ClockMethod.OP_ORDER, {0: 0, 1: offset}, error)


def test_an_op_that_waits_inside_itself_is_ordered_by_its_end() -> None:
    """F on rank 1 begins before rank 0's has ended, and ends 50 after; the B's as well. Host ops always count by their ends."""
    waiting = ops_of(
        (0, "F", 0, 3, 0, 100), (1, "F", 1, 3, 90, 150), (1, "B", 1, 3, 160, 250), (0, "B", 0, 3, 230, 300)
    )
    for ops in (waiting, waiting.assign(clock="host")):
        assert from_op_order([0, 1], nothing(2), ops, [(0, 1)]) == Clock(ClockMethod.OP_ORDER, {0: 0, 1: 0}, 50)
    apart = there_and_back(7).assign(clock="host")
    assert from_op_order([0, 1], nothing(2), apart, [(0, 1)]) == Clock(
        ClockMethod.OP_ORDER, {0: 0, 1: 0}, max(150 + 7 - 100, 400 - 257)
    )
    contradictory = ops_of(
        (0, "F", 0, 3, 0, 100), (1, "F", 1, 3, 40, 60), (1, "B", 1, 3, 65, 90), (0, "B", 0, 3, 70, 80)
    )
    assert from_op_order([0, 1], nothing(2), contradictory, [(0, 1)]) is None


@pytest.mark.parametrize(
    "changes",
    [*({"kind": "W"}, {"stage": -1}, {"microbatch": -1}, {"microbatch": 4}, {"step": 1}, {"rank": 2})],
    ids=str,
)
def test_only_forwards_and_backwards_of_one_microbatch_step_and_pipeline_are_ordered(
    changes: dict[str, object],
) -> None:
    """One of four ops is another: then one side alone is bounded."""
    ops = there_and_back(7)
    assert from_op_order([0, 1, 2], nothing(3), ops, [(0, 1), (2,)]) is None, "nothing is known of rank 2"
    for row in (0, 1):
        changed = ops.copy()
        for name, value in changes.items():
            changed.loc[row, name] = value
        assert from_op_order([0, 1], nothing(2), changed, [(0, 1), (2,)]) is None


@pytest.mark.parametrize("moved", [0, 5, -1_000_000, 5_000_000])
def test_stages_whose_neighbours_have_no_trace_are_ordered_by_what_passes_through_them(moved: int) -> None:
    """Of three stages the middle one has no trace: F leaves stage 0 at 100, stage 2 begins at 180; B does at 300 and 400."""
    rows = [(0, "F", 0, 0, 0, 100), (2, "F", 2, 0, 180, 220), (2, "B", 2, 0, 220, 300), (0, "B", 0, 0, 400, 500)]
    ops = ops_of(*((*row[:4], row[4] + moved, row[5] + moved) if row[0] == 2 else row for row in rows))
    clock = estimate_clock(comms_of(), [0, 2], {}, ops, [(0, 1, 2)])
    assert clock.method is ClockMethod.OP_ORDER
    assert abs(clock.offsets_ns[2] + moved) <= clock.uncertainty_ns <= 100, "F has 80 on its way, B has 100"
    if abs(moved) < 80:
        assert clock.offsets_ns == {0: 0, 2: 0}, "recorded clocks stay where no op is against them"


def test_an_input_gradient_is_ordered_as_a_backward_and_one_op_twice_is_not() -> None:
    ops = there_and_back(7)
    split = ops.assign(kind=["F", "F", "I", "B"])
    assert from_op_order([0, 1], nothing(2), split, [(0, 1)]) == Clock(ClockMethod.OP_ORDER, {0: 0, 1: 0}, 7)
    with_weights = pd.concat([split, ops.iloc[2:].assign(kind="W", start_ns=900, end_ns=999)], ignore_index=True)
    assert from_op_order([0, 1], nothing(2), with_weights, [(0, 1)]) == Clock(ClockMethod.OP_ORDER, {0: 0, 1: 0}, 7)
    twice = pd.concat([ops, ops.iloc[2:3]], ignore_index=True)
    assert from_op_order([0, 1], nothing(2), twice, [(0, 1)]) is None
    outside = pd.concat([ops, ops.iloc[2:3].assign(rank=9)], ignore_index=True)
    assert from_op_order([0, 1], nothing(2), outside, [(0, 1)]) is not None, "rank 9 is in no pipeline"


def test_messages_bound_as_well_as_ops() -> None:
    """The ops allow −7 to 7; a message says that rank 1 is at least 3 behind."""
    low = nothing(2)
    low[0, 1] = 3
    assert from_op_order([0, 1], low, there_and_back(7), [(0, 1)]) == Clock(ClockMethod.OP_ORDER, {0: 0, 1: 3}, 4)
    both = with_op_ends(low, [0, 1], there_and_back(7), [(0, 1)])
    assert both.tolist() == [[0, 3], [257 - 400, 0]], "the ends of ops: F 100 and 157, B 257 and 400"
    assert low.tolist() == [[0, 3], [-UNBOUNDED, 0]], "the bounds that came in are as they were"


def comms_of(*rows: Match) -> pd.DataFrame:
    return matched_comms(rows)


def named(*names: object) -> dict[int, dict[str, object]]:
    return {rank: {HOST_NAME: name} for rank, name in enumerate(names)}


def test_ranks_have_one_host_where_a_name_that_means_a_host_is_the_same() -> None:
    facts = named("a", "b", "a", "LocalHost ", "LocalHost ", 7, 7)
    pairs = pairs_of_same_host_name(range(8), facts)
    same = {(i, j) for i, row in enumerate(pairs.tolist()) for j, is_same in enumerate(row) if is_same}
    assert same == {(0, 0), (1, 1), (2, 2), (0, 2), (2, 0)}


def test_without_messages_ranks_of_one_host_are_related_by_it_and_not_by_a_recording_of_one_rank() -> None:
    facts: dict[int, dict[str, object]] = {0: {HOST_NAME: "a"}, 1: {HOST_NAME: "a"}, 2: {"one_clock": "session 5"}}
    clock = estimate_clock(comms_of(), [0, 1, 2], facts)
    assert (clock.method, clock.uncertainty_ns, clock.unrelated) == (ClockMethod.SAME_HOST, None, frozenset({2}))
    facts |= {3: {"one_clock": "session 5"}}
    assert estimate_clock(comms_of(), range(4), facts).method is ClockMethod.SAME_SESSION


def test_only_ranks_of_one_host_add_the_error_of_its_readings() -> None:
    """A message each way of 40 between ranks 0 and 1; ranks 1 and 2 may be on one host."""
    rows = [(0, "send", 0, 100, 101), (1, "recv", 0, 90, 140), (1, "send", 1, 200, 201), (0, "recv", 1, 190, 240)]
    assert estimate_clock(comms_of(*rows), [0, 1], named("a", "b")) == Clock(ClockMethod.BOUNDS, {0: 0, 1: 0}, 40)
    more = [*rows, (2, "send", -1, 95, 230)]
    clock = estimate_clock(comms_of(*more), [0, 1, 2], named("a", "b", "b"))
    assert clock == Clock(ClockMethod.BOUNDS, {0: 0, 1: 0, 2: 0}, 40 + 50_000)


READING = 50_000


def kept(low: Matrix, comms: pd.DataFrame, ops: pd.DataFrame, names: Sequence[str]) -> list[list[bool]]:
    pairs = pairs_of_same_host_name(range(len(names)), named(*names))
    same: list[list[bool]] = drop_contradicted(
        pairs, low, range(len(names)), comms, ops, [tuple(range(len(names)))]
    ).tolist()
    return same


@pytest.mark.parametrize(("contradiction", "is_kept"), [(READING, True), (READING + 1, False)])
def test_one_host_is_believed_unless_its_messages_or_labelled_ops_contradict_it_by_more_than_a_reading(
    contradiction: int, is_kept: bool
) -> None:
    """Rank 2 is on another host, whose contradictions do not matter."""
    low = np.array([[0, contradiction, 10**9], [-100, 0, 0], [0, 0, 0]])
    far = 10**6  # the ops meet in time, and their order allows everything
    ops = ops_of((0, "F", 0, 3, 0, far), (1, "F", 1, 3, 0, 2 * far), (2, "F", 2, 3, 0, 9 * far))
    assert kept(low, comms_of(), ops, ["a", "a", "b"])[0][:2] == [is_kept, is_kept]
    assert kept(low, comms_of(), ops, ["a", "a", "b"])[2] == [False, False, True]
    unbounded = nothing(2)
    late = ops_of((0, "F", 0, 3, 0, far + contradiction), (1, "F", 1, 3, 0, far))
    assert kept(unbounded, comms_of(), late, ["a", "a"])[0][1] == is_kept
    assert kept(unbounded, comms_of(), late.assign(source="inferred"), ["a", "a"])[0][1]


@pytest.mark.parametrize(("begin", "is_kept"), [(10, True), (11, False)])
def test_ranks_that_no_message_relates_are_on_one_host_where_their_traces_meet(begin: int, is_kept: bool) -> None:
    for comms, ops in (
        (comms_of((0, "send", -1, 0, 10), (1, "send", -1, begin, 30)), ops_of()),
        (comms_of((0, "send", -1, 5, 7)), ops_of((0, "W", 0, 0, 0, 10), (1, "W", 0, 0, begin, 12))),
    ):
        assert kept(nothing(2), comms, ops, ["a", "a"])[0][1] == is_kept
        related = np.array([[0, -5], [-5, 0]])
        assert kept(related, comms, ops, ["a", "a"])[0][1]
    assert kept(nothing(2), comms_of((0, "send", -1, 0, 10)), ops_of(), ["a", "a"])[0][1], "of rank 1 there is nothing"
