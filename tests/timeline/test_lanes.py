"""Part of a rank's lane that each kind of communication counts as, one row at a time."""

from __future__ import annotations

import numpy as np
import pytest

from pptrace.clock import Clock, ClockMethod
from pptrace.intervals import EMPTY
from pptrace.model.device import DeviceWork
from pptrace.model.tables import COMMS, OPS
from pptrace.slices import Slice, slice_of
from pptrace.timeline.lanes import Lane, communication_inside_ops, is_inner, is_nested, lane_of
from tests.support.tables import table_of

AS_IT_IS = Clock(ClockMethod.SINGLE_RANK, {}, 0)
Row = dict[str, object]


def ops_of(*rows: Row) -> Slice:
    return slice_of(table_of(OPS, [{"kind": "F", "clock": "host"} | row for row in rows]))


def comm(start: int, end: int, **more: object) -> Row:
    """A matched all-reduce that moves all the time and that its rank waits for."""
    times: Row = dict.fromkeys(("start_ns", "transfer_start_ns", "posted_ns", "asked_ns"), start)
    times |= dict.fromkeys(("transfer_end_ns", "end_ns"), end)
    return times | {"kind": "all_reduce", "axis": "dp", "group_size": 2, "clock": "host"} | more


def comms_of(*rows: Row) -> Slice:
    return slice_of(table_of(COMMS, rows))


def work_of(*kernels: tuple[int, int], is_compute: bool = True) -> DeviceWork:
    starts, ends = (np.array([kernel[edge] for kernel in kernels], dtype=np.int64) for edge in (0, 1))
    mask = np.full(len(kernels), is_compute)
    return DeviceWork(starts, ends, starts, starts, mask, ~mask)


def spans(lane: Lane) -> dict[str, list[list[int]]]:
    names = ("compute", "transfer", "exposed", "unknown", "not_overlapped")
    return {name: rows for name in names if (rows := getattr(lane, name).tolist())}


KERNEL = {"match": -1, "stage": -1, "group_size": -1, "peer": -1}
MATCHED = {"transfer": [[10, 30]], "exposed": [[10, 30]], "not_overlapped": [[10, 30]]}
UNKNOWN = {"unknown": [[10, 30]], "not_overlapped": [[10, 30]]}
WAITING = {"not_overlapped": [[10, 30]]}


@pytest.mark.parametrize(
    ("row", "lacks_peers", "expected"),
    [
        *(({}, False, MATCHED), ({"match": -1}, False, UNKNOWN)),
        *(({"match": -1, "group_size": 1}, False, MATCHED), (KERNEL, False, MATCHED), (KERNEL, True, MATCHED)),
        *((KERNEL | {"kind": "send"}, False, WAITING), (KERNEL | {"kind": "send"}, True, UNKNOWN)),
        *((KERNEL | {"kind": "barrier"}, False, WAITING), (KERNEL | {"kind": "barrier"}, True, WAITING)),
        *(({"kind": "barrier"}, False, MATCHED), (KERNEL | {"kind": "recv", "peer": 3}, False, UNKNOWN)),
        *((KERNEL | {"kind": "recv", "stage": 1}, False, UNKNOWN), (KERNEL | {"group_size": 4}, True, UNKNOWN)),
    ],
    ids=str,
)
def test_communication_is_transfer_where_its_other_side_is_there_and_else_waiting_or_not_known(
    row: Row, lacks_peers: bool, expected: dict[str, list[list[int]]]
) -> None:
    lane = lane_of(0, ops_of(), comms_of(comm(10, 30, **row)), None, AS_IT_IS, lacks_peers)
    assert spans(lane) == expected
    if not lacks_peers:
        assert spans(lane_of(0, ops_of(), comms_of(comm(10, 30, **row)), None, AS_IT_IS)) == expected
    with_another = lane_of(0, ops_of(), comms_of(comm(10, 30, **row), comm(100, 110)), None, AS_IT_IS, lacks_peers)
    assert with_another.unknown.tolist() == lane.unknown.tolist()


def test_a_collective_without_a_group_may_wait_for_ranks_without_a_trace() -> None:
    lane, barrier, alone, matched = (
        lane_of(0, ops_of(), comms_of(comm(10, 30, **row)), None, AS_IT_IS, lacks_members=True)
        for row in (KERNEL, KERNEL | {"kind": "barrier"}, KERNEL | {"group_size": 1}, {})
    )
    assert (spans(lane), spans(barrier)) == (UNKNOWN, WAITING)
    assert spans(alone) == spans(matched) == MATCHED


def test_what_compute_or_an_exposed_transfer_overlaps_is_not_unknown() -> None:
    """Unknown from 10 to 60; an op until 20, a transfer from 40 on."""
    comms = comms_of(comm(10, 60, match=-1, kind="recv", peer=1), comm(40, 70))
    lane = lane_of(0, ops_of({"start_ns": 0, "end_ns": 20}), comms, None, AS_IT_IS)
    assert spans(lane) == {
        "compute": [[0, 20]],
        "transfer": [[40, 70]],
        "exposed": [[40, 70]],
        "unknown": [[20, 40]],
        "not_overlapped": [[20, 70]],
    }


def test_compute_is_that_of_kernels_else_of_ops_else_of_the_hosts_operators() -> None:
    """The clock of rank 3 is 1,000 ahead; a call blocks from 1,010 to 1,020 on the common one."""
    clock = Clock(ClockMethod.BOUNDS, {3: 1_000}, 0)
    ops = ops_of({"rank": 3, "start_ns": 1_000, "end_ns": 1_100}, {"rank": 3, "kind": "STEP", "end_ns": 9_000})
    comms = comms_of(comm(1_010, 1_020, rank=3, clock="host"))
    host = np.array([[5, 15], [50, 60]])
    kernels, copies = work_of((30, 40)), work_of((30, 40), is_compute=False)
    step_alone = ops.where(ops["kind"] == "STEP")
    by_ops, by_operators = [[1_000, 1_010], [1_020, 1_100]], [[1_005, 1_010], [1_050, 1_060]]
    for its_ops, work, operators, compute in (
        *((ops, kernels, host, [[1_030, 1_040]]), (step_alone, kernels, host, [[1_030, 1_040]])),
        *((ops, None, host, by_ops), (ops, copies, None, by_ops), (step_alone, copies, host, by_operators)),
        *((step_alone, None, host, by_operators), (step_alone, None, EMPTY, [])),
        (step_alone, None, None, []),
    ):
        assert lane_of(3, its_ops, comms, work, clock, host=operators).compute.tolist() == compute


def test_only_what_lies_wholly_inside_an_op_is_taken_out_of_it() -> None:
    ops = ops_of({"start_ns": 0, "end_ns": 100}, {"start_ns": 200, "end_ns": 300})
    comms = comms_of(comm(0, 10), comm(90, 101), comm(150, 160), comm(199, 220), comm(280, 300))
    assert is_nested(comms, ops, is_table=True).tolist() == [True, False, False, False, True]
    lane = lane_of(0, ops, comms, None, AS_IT_IS)
    assert lane.compute.tolist() == [[10, 100], [200, 280]]
    assert is_nested(comms, ops_of(), is_table=True).tolist() == [False] * 5
    assert is_nested(comms_of(), ops, is_table=True).tolist() == []


@pytest.mark.parametrize(
    ("op_clock", "comm_clock", "is_table", "nested"),
    [
        ("device", "device", True, False),
        ("device", "host", True, True),
        ("host", "device", True, True),
        ("device", "device", False, True),
    ],
)
def test_device_communication_of_a_table_overlaps_with_its_device_ops(
    op_clock: str, comm_clock: str, is_table: bool, nested: bool
) -> None:
    ops, comms = ops_of({"end_ns": 100, "clock": op_clock}), comms_of(comm(10, 30, clock=comm_clock))
    assert is_nested(comms, ops, is_table).tolist() == [nested]
    mixed = ops_of({"end_ns": 100, "clock": op_clock}, {"start_ns": 200, "end_ns": 300, "clock": "host"})
    assert is_nested(comms, mixed, is_table).tolist() == [True]
    work = None if is_table else work_of((500, 501), is_compute=False)
    lane = lane_of(0, ops, comms, work, AS_IT_IS)
    assert lane.compute.tolist() == ([[0, 10], [30, 100]] if nested else [[0, 100]])
    if is_table:
        assert spans(lane_of(0, ops, comms, work_of(), AS_IT_IS)) == spans(lane)


def test_communication_of_a_part_of_an_op_has_no_microbatch_and_is_no_message_of_the_pipeline() -> None:
    rows = (
        ({"microbatch": -1}, True),
        ({"microbatch": 0}, False),
        ({"microbatch": -1, "axis": "pp"}, True),
        ({"microbatch": -1, "axis": "pp", "kind": "send"}, False),
        ({"microbatch": -1, "axis": "cp", "kind": "recv"}, True),
    )
    assert is_inner(comms_of(*(comm(0, 9, **row) for row, _ in rows))).tolist() == [inner for _, inner in rows]


def test_an_ops_communication_counts_where_nothing_is_computed_beside_it() -> None:
    """Two ops; of calls at 10–30 and 120–150 kernels overlap 20–40 and 100–130. A message within does not count."""
    ops = ops_of({"start_ns": 0, "end_ns": 50}, {"start_ns": 100, "end_ns": 140})
    comms = comms_of(
        comm(10, 30, microbatch=-1),
        comm(120, 150, microbatch=-1, match=-1),
        comm(40, 50, microbatch=-1, axis="pp", kind="send"),
    )
    lane = lane_of(0, ops, comms, work_of((20, 40), (100, 130)), AS_IT_IS)
    assert communication_inside_ops(ops, comms, lane).tolist() == [10, 10]
