"""Windows, lanes and phases of single ranks, worked out by hand or counted nanosecond by nanosecond."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from pptrace.analysis.aligned import RowsByRank
from pptrace.clock import Clock, ClockMethod, shift
from pptrace.intervals import Int64
from pptrace.model.device import DeviceWork
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMMS, OPS, empty_table
from pptrace.model.traces import Category
from pptrace.recognise.device.work import device_work
from pptrace.recognise.messages.match import with_transfers
from pptrace.schedule.registry import build
from pptrace.simulator import simulate, uniform
from pptrace.slices import slice_of
from pptrace.timeline.lanes import Lane, communication_inside_ops, lane_of
from pptrace.timeline.windows import StepWindow, phase_spans_of_steps, step_windows, tag_ops
from tests.support.analysed import recognise
from tests.support.lanes import bubble_ns
from tests.support.synthetic import Event, make_trace, record
from tests.support.tables import named, table_of

TWO_BY_TWO = MeshInfo(4, pp=2, vpp=1, tp=1, cp=1, dp=2, ep=1, pipelines=((0, 2), (1, 3)))

AS_IT_IS = Clock(ClockMethod.SINGLE_RANK, {}, 0)


def ops_of(*rows: tuple[int, int, str, int, int]) -> pd.DataFrame:
    return table_of(OPS, named("rank step kind start_ns end_ns", rows))


def test_a_window_is_from_the_first_to_the_last_op_of_the_pipeline() -> None:
    ops = ops_of(
        (0, 5, "F", 100, 110),
        (2, 5, "F", 112, 120),
        (2, 5, "B", 120, 150),
        (0, 5, "B", 155, 180),
        (0, 5, "OPTIMIZER", 190, 250),
        (0, 5, "STEP", 90, 260),
        (0, 6, "F", 300, 310),
        (1, 5, "F", 95, 111),
    )
    windows = step_windows(ops, TWO_BY_TWO)
    assert windows == (
        StepWindow(5, (0, 2), 100, 180),
        StepWindow(5, (1,), 95, 111),
        StepWindow(6, (0,), 300, 310),
    )
    assert windows[0].span_ns == 80


def test_there_are_no_windows_without_ops_or_pipelines() -> None:
    assert step_windows(empty_table(OPS), TWO_BY_TWO) == ()
    assert step_windows(ops_of((0, 0, "STEP", 0, 9)), TWO_BY_TWO) == ()


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=8)


def moments(rows: list[tuple[int, int]]) -> set[int]:
    return {moment for start, duration in rows for moment in range(start, start + duration)}


def as_set(intervals: Int64) -> set[int]:
    return {moment for start, end in intervals.tolist() for moment in range(start, end)}


def comms_of(transfers: list[tuple[int, int]], waits: list[int]) -> pd.DataFrame:
    """Communication of rank 0: transfers after waits."""
    rows = [(at - wait, at, at + size, at + size) for (at, size), wait in zip(transfers, waits, strict=True)]
    return table_of(COMMS, named("start_ns transfer_start_ns transfer_end_ns end_ns", rows))


def lane_of_tables(
    rank: int, ops: pd.DataFrame, comms: pd.DataFrame, work: Mapping[int, DeviceWork], clock: Clock
) -> Lane:
    rows = RowsByRank(ops, comms).of_rank(rank)
    return lane_of(rank, rows.ops, rows.comms, work.get(rank), clock)


@given(spans, spans, st.lists(st.integers(0, 5), min_size=8, max_size=8), st.integers(0, 40), st.integers(0, 40))
def test_a_host_lane_splits_every_nanosecond_of_its_window(
    ops: list[tuple[int, int]], transfers: list[tuple[int, int]], waits: list[int], start: int, duration: int
) -> None:
    """Compute is in ops, not in calls wholly inside one; transfers beside it are exposed; the rest is bubble."""
    waits = waits[: len(transfers)]
    table = ops_of(*((0, 0, "F", begin, begin + length) for begin, length in ops), (1, 0, "F", 0, 99))
    comms = comms_of(transfers, waits)
    lane = lane_of_tables(0, table, comms, {}, AS_IT_IS)
    calls = [(begin - wait, size + wait) for (begin, size), wait in zip(transfers, waits, strict=True)]
    nested = moments(
        [(b, size) for b, size in calls if any(begin <= b and b + size <= begin + length for begin, length in ops)]
    )
    compute, moving = moments(ops) - nested, moments(transfers)
    assert as_set(lane.compute) == compute
    assert as_set(lane.transfer) == moving
    assert as_set(lane.exposed) == moving - compute
    window = set(range(start, start + duration))
    assert bubble_ns(lane, start, start + duration) == len(window - compute - moving)


def test_a_device_lane_is_the_union_of_compute_kernels_on_the_common_clock() -> None:
    """Kernels on two streams overlap; copies are no compute; the op's host range does not matter."""
    kernels = [
        Event(Category.KERNEL, "gemm", 10, 20, 0, 7),
        Event(Category.KERNEL, "norm", 15, 30, 0, 8),
        Event(Category.KERNEL, "ncclDevKernel_SendRecv", 25, 50, 0, 20),
        Event(Category.MEMCPY, "copy", 50, 60, 0, 7),
    ]
    work = {0: device_work(make_trace(kernels).events)}
    lane = lane_of_tables(
        0, ops_of((0, 0, "F", 1000, 1900)), comms_of([(1025, 25)], [0]), work, Clock(ClockMethod.BOUNDS, {0: 1000}, 0)
    )
    assert lane.compute.tolist() == [[1010, 1030]]
    assert lane.exposed.tolist() == [[1030, 1050]]
    assert bubble_ns(lane, 1000, 1060) == 60 - 20 - 20


def test_phases_of_1f1b_by_hand() -> None:
    """p=2, m=2: rank 0 runs F0 0-10, F1 10-20, B0 40-60 (steady: F1 to B0), B1 70-90; rank 1 F0 10-20 … B1 50-70."""
    ops = simulate(build("1f1b", 2, 2), uniform(10, 20)).ops()
    of_ranks = [slice_of(ops[ops["rank"] == rank]) for rank in (0, 1)]
    spans = [phase_spans_of_steps(of_rank, np.zeros(len(of_rank), dtype=np.int64), [0], [90]) for of_rank in of_ranks]
    assert [[(str(span.phase), *astuple(span)[1:]) for span in of_rank] for (of_rank,) in spans] == [
        [("warmup", 0, 10, 1, 0), ("steady", 10, 60, 1, 1), ("cooldown", 60, 90, 0, 1)],
        [("warmup", 0, 10, 0, 0), ("steady", 10, 70, 2, 2), ("cooldown", 70, 90, 0, 0)],
    ]


def test_an_op_takes_the_phase_of_the_plan_then_its_own_then_that_of_the_order() -> None:
    plan = build("1f1b", 2, 3)
    ops = simulate(plan, uniform(1, 2)).ops()
    expected = ops["phase"].tolist()
    assert tag_ops(ops.assign(phase="steady"), lambda step: plan)["phase"].tolist() == expected
    assert tag_ops(ops.assign(phase="cooldown"), lambda step: None)["phase"].tolist() == ["cooldown"] * len(ops)
    assert tag_ops(ops.assign(phase=""), lambda step: None)["phase"].tolist() == expected
    shuffled = ops.assign(phase="").sample(frac=1, random_state=3)
    assert tag_ops(shuffled, lambda step: None)["phase"].sort_index().tolist() == expected
    assert ops["phase"].tolist() == expected, "the table that came in is as it was"


def test_an_op_that_the_plan_does_not_have_keeps_its_label() -> None:
    plan = build("1f1b", 2, 2)
    foreign = simulate(build("1f1b", 2, 3), uniform(1, 2)).ops().assign(phase="warmup")
    tagged = tag_ops(foreign, lambda step: plan)
    assert set(tagged["phase"][foreign["microbatch"] == 2]) == {"warmup"}


def test_lanes_of_a_shifted_rank_are_those_of_the_rank() -> None:
    recording = record(build("1f1b", 2, 3), latency=70, device=True)
    run = recognise(recording.traces())
    late = recognise(recording.traces(shifts_ns={1: 5_000}))
    clock = Clock(ClockMethod.BOUNDS, {0: 0, 1: -5_000}, 0)
    straight = lane_of_tables(1, run.ops, with_transfers(run.comms), run.work, AS_IT_IS)
    bent = lane_of_tables(1, shift(late.ops, clock), with_transfers(shift(late.comms, clock)), late.work, clock)
    assert bent.compute.tolist() == straight.compute.tolist()
    assert bent.exposed.tolist() == straight.exposed.tolist()


def test_a_transfer_posted_ahead_is_exposed_while_it_is_posted_and_while_its_reader_waits() -> None:
    """It moves from 100 to 400; its posting ends at 110, and its reader asks at 380, or only when it has come."""
    for asked, exposed in ((380, [[100, 110], [380, 400]]), (400, [[100, 110]])):
        comms = comms_of([(100, 300)], [0]).assign(posted_ns=110, asked_ns=asked)
        lane = lane_of_tables(0, empty_table(OPS), comms, {}, AS_IT_IS)
        assert lane.exposed.tolist() == exposed
        assert lane.transfer.tolist() == [[100, 400]]


def test_what_an_op_waits_for_inside_itself_is_no_compute_and_what_runs_beside_it_is() -> None:
    """An op from 0 to 100: a blocking call from 10 to 20, one posted 30 to 35, awaited 50 to 60, and computed beside."""
    ops = ops_of((0, 0, "F", 0, 100))
    comms = comms_of([(10, 10), (30, 30)], [0, 0]).assign(microbatch=-1)
    comms["posted_ns"], comms["asked_ns"] = [10, 35], [10, 50]
    lane = lane_of_tables(0, ops, comms, {}, AS_IT_IS)
    assert lane.compute.tolist() == [[0, 10], [20, 30], [35, 50], [60, 100]]
    assert communication_inside_ops(slice_of(ops), slice_of(comms), lane).tolist() == [25]
